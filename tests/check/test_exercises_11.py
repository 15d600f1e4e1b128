"""Wrong answers to the exercises of lesson 11, and the errors that the learner gets."""

from __future__ import annotations

import os

import pytest
from answers import check_of, solved

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.mark.parametrize("number", ["11.1", "11.2", "11.3"])
def test_the_solutions_leave_the_environment(number, capsys):
    before = os.environ.copy()
    check_of(number)(solved(number))
    assert ": right on 1, 2, 3, 4 and 5 " in capsys.readouterr().out
    assert os.environ == before
