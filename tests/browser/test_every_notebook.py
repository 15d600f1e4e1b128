"""Notebooks in JupyterLab: as they are committed, before anything runs, and from top to bottom.

Running all of them takes as long as nbval does, which runs them without a browser. So `make test`
has a few here, and `make browser` has all.
"""

from __future__ import annotations

import lesson
import nbformat
import pytest
from regenerate import FOLDER, all_notebooks

RUN = ("02_collectives", "exercises/04_ring_allreduce")
SHOWN = ("00_start_here", "04_ring_allreduce", "08_ddp")


@pytest.mark.parametrize("path", lesson.as_parameters(short=SHOWN.__contains__))
def test_a_saved_notebook_shows_all_without_running(open_notebook, path):
    saved = nbformat.read(path, as_version=4)
    document = open_notebook(saved, path.stem)
    document.wait_until_it_shows(*lesson.shows(saved))
    assert document.dead_widgets() == []


@pytest.mark.parametrize("path", lesson.as_parameters(short=RUN.__contains__))
def test_a_notebook_runs_from_top_to_bottom(open_notebook, path):
    lesson.check_run(open_notebook, path)


def test_the_few_exist():
    names = {str(path.relative_to(FOLDER).with_suffix("")) for path in all_notebooks()}
    assert {*RUN, *SHOWN} < names
