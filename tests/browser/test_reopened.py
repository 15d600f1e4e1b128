"""A committed notebook in JupyterLab, opened and not run: all it shows comes from its file."""

from __future__ import annotations

import lab
import nbformat
import pytest
from regenerate import all_notebooks


@pytest.mark.parametrize("path", all_notebooks(), ids=lambda path: path.stem)
def test_a_saved_notebook_shows_all_before_it_runs(open_notebook, path):
    saved = nbformat.read(path, as_version=4)
    document = open_notebook(saved, path.stem)
    document.wait_for_pictures(lab.pictures(saved))
    document.wait_for_outputs(lab.visible(saved))
    assert document.page.locator(".jp-RenderedMarkdown table").count() == lab.tables(saved)
    assert document.dead_widgets() == []
