"""Every committed notebook in JupyterLab, before anything runs.

`make test` opens the lessons, `make browser` the exercises and solutions, too.
"""

from __future__ import annotations

import lesson
import nbformat
import pytest


@pytest.mark.parametrize("path", lesson.as_parameters(short=lambda name: "/" not in name))
def test_a_saved_notebook_shows_all_without_running(open_notebook, path):
    saved = nbformat.read(path, as_version=4)
    document = open_notebook(saved, path.stem)
    document.wait_until_it_shows(*lesson.shows(saved))
    assert document.dead_widgets() == []
