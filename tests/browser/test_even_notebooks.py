"""Notebooks 0, 2, 4 and so on in JupyterLab: two files, because a worker takes a whole file."""

from __future__ import annotations

import lesson
import pytest
from regenerate import all_notebooks


@pytest.mark.parametrize("path", all_notebooks()[0::2], ids=lambda path: path.stem)
def test_a_notebook_shows_all_as_saved_and_runs_from_top_to_bottom(open_notebook, path):
    lesson.check(open_notebook, path)
