"""Notebooks in JupyterLab, from top to bottom.

Running all of them takes as long as nbval does, which runs them without a browser. So `make test`
runs a few here, one of each kind, and `make browser` runs all.
"""

from __future__ import annotations

import lesson
import pytest
from regenerate import FOLDER, all_notebooks

FEW = ("00_start_here", "02_collectives", "exercises/04_ring_allreduce", "solutions/02_collectives")


@pytest.mark.parametrize("path", lesson.as_parameters(short=FEW.__contains__))
def test_a_notebook_runs_from_top_to_bottom(open_notebook, path):
    lesson.check_run(open_notebook, path)


def test_the_few_exist():
    names = {str(path.relative_to(FOLDER).with_suffix("")) for path in all_notebooks()}
    assert set(FEW) < names
