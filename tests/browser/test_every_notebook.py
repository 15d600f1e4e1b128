"""Each notebook in JupyterLab, from top to bottom."""

from __future__ import annotations

import lab
import pytest
from regenerate import all_notebooks


@pytest.mark.parametrize("path", all_notebooks(), ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(open_notebook, path):
    document = open_notebook(lab.without_outputs(path), path.stem)
    document.run_all(600)
