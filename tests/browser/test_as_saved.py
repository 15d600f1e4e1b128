"""Every committed notebook in JupyterLab, before anything runs."""

from __future__ import annotations

import lesson
import nbformat
import pytest
from regenerate import FOLDER, all_notebooks


@pytest.mark.parametrize("path", all_notebooks(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_saved_notebook_shows_all_without_running(open_notebook, path):
    saved = nbformat.read(path, as_version=4)
    document = open_notebook(saved, path.stem)
    document.wait_until_it_shows(*lesson.shows(saved))
    assert document.dead_widgets() == []
