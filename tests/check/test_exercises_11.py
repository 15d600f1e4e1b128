"""Wrong answers to the exercises of lesson 11, and the errors that the learner gets."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from answers import assert_mistake, check_of, solved

import ddp_kit as kit
from ddp_kit.check import torchrun

pytestmark = pytest.mark.usefixtures("forked_ranks")


def test_ranks_that_wait_for_a_number_that_no_host_sets(monkeypatch):
    monkeypatch.setattr(torchrun, "STORE_LIMIT", timedelta(seconds=3))
    fact = "on 2 ranks: it raised an error\n"
    assert_mistake(kit.check.exercise_11_3, solved("11.3", {"store.set(": "str("}), "not set", fact)


@pytest.mark.parametrize("number", ["11.1", "11.2", "11.3"])
def test_the_solutions_leave_the_environment(number, capsys):
    before = os.environ.copy()
    check_of(number)(solved(number))
    assert ": right on 1, 2, 3, 4 and 5 " in capsys.readouterr().out
    assert os.environ == before
