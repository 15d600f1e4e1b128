"""Every committed notebook in JupyterLab, before anything runs.

`make test` opens the lessons, `make browser` the exercises and solutions, too.
"""

from __future__ import annotations

import lesson
import nbformat
import pytest
from regenerate import FOLDER, all_notebooks


def as_parameter(path):
    marks = [] if path.parent == FOLDER else pytest.mark.long
    return pytest.param(path, id=str(path.relative_to(FOLDER)), marks=marks)


@pytest.mark.parametrize("path", [as_parameter(path) for path in all_notebooks()])
def test_a_saved_notebook_shows_all_without_running(open_notebook, path):
    saved = nbformat.read(path, as_version=4)
    document = open_notebook(saved, path.stem)
    document.wait_until_it_shows(*lesson.shows(saved))
    assert document.dead_widgets() == []
