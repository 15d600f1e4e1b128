"""Notebooks in JupyterLab: as they are committed, before anything runs, and from top to bottom.

Running all of them takes as long as nbval does, which runs them without a browser. So `make test`
has one here, and `make browser` has all.
"""

from __future__ import annotations

import lesson
import nbformat
import pytest
from regenerate import FOLDER, all_notebooks

from ddp_kit.course import editions

RUN = ("01_point_to_point",)
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


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("00_start_here", "Each rank appended to a copy of its own"),
        ("01_point_to_point", "Rank 1's own number is gone"),
    ],
)
def test_a_learner_sees_no_answer_before_the_guess(open_notebook, name, answer):
    text = editions.lesson(editions.read(FOLDER / f"{name}.ipynb"))
    notebook = nbformat.reads(text, as_version=4)
    document = open_notebook(notebook, name)
    document.wait_until_it_shows(0, 0, lesson.shows(notebook)[2])
    details = document.page.locator("details", has_text=answer)
    assert not details.get_by_text(answer).is_visible()
    details.locator("summary").click()
    details.get_by_text(answer).wait_for(state="visible")


def test_the_few_exist():
    names = {str(path.relative_to(FOLDER).with_suffix("")) for path in all_notebooks()}
    assert {*RUN, *SHOWN} < names
