"""`kit.predict`: what it prints about right, wrong and missing predictions. No processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ddp_kit as kit

SHARED = []


class Odd:
    """An object that cannot be compared."""

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


@pytest.fixture
def said(capsys):
    def said(*arguments):
        assert kit.predict(*arguments) is None
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return said


@pytest.mark.parametrize("nothing", [..., "...", [..., ...], (..., ...), {"a": ..., "b": [...]}])
def test_without_a_prediction_the_answer_is_said(said, nothing):
    assert said(nothing, 12) == "The answer is 12. You made no prediction.\n"


@pytest.mark.parametrize(
    ("guess", "actual", "shown"),
    [
        (12, 12, "12"),
        (2_101_248, torch.tensor(2_101_248), "2,101,248"),
        (1 / 3, 0.3333333, "0.333333"),
        (float("nan"), float("nan"), "nan"),
        ("Deadlock ", "deadlock", "'deadlock'"),
        ([0, 6], torch.tensor([0.0, 6.0]), "[0, 6]"),
        ([[1, 2], (3, 4)], np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        ({0, 2}, {2: 0, 0: 0}.keys(), "{0, 2}"),
        ({"a": (1,)}, {"a": [1]}, "{'a': [1]}"),
        (None, None, "None"),
        (SHARED.append, SHARED.append, "an object of type builtin_function_or_method"),
    ],
)
def test_a_right_prediction_is_called_right(said, guess, actual, shown):
    assert said(guess, actual) == f"Right: {shown}.\n"


def test_a_wrong_prediction_is_said_beside_the_answer(said):
    assert said(7, 12) == "You predicted 7; it is 12.\n"
    assert said(True, False) == "You predicted True; it is False.\n"
    assert said("send", "recv") == "You predicted 'send'; it is 'recv'.\n"
    assert said({1}, {2, 10}) == "You predicted {1}; it is {10, 2}.\n"


@pytest.mark.parametrize(
    ("guess", "actual", "line"),
    [
        (6_000_000.0, 12_000_000, "You predicted 6,000,000; it is 12,000,000."),
        (0.100002, 0.100004, "You predicted 0.100002; it is 0.100004."),
    ],
)
def test_different_numbers_look_different_and_are_easy_to_read(said, guess, actual, line):
    assert said(guess, actual).splitlines()[0] == line


def test_zero_is_right_for_what_rounding_leaves_of_it(said):
    assert said(0, 0.1 + 0.2 - 0.3) == "Right: 5.55112e-17.\n"
    assert said(0, 1e-11).startswith("You predicted 0; it is 1e-11.")


@pytest.mark.parametrize(
    ("guess", "shown"),
    [
        (10**45 - 1, ",".join(["999"] * 15)),
        (torch.Tensor, "the class Tensor"),
        (torch.eye(2).to_sparse(), "an object of type Tensor"),
    ],
)
def test_an_odd_prediction_is_shown_without_an_address(said, guess, shown):
    assert said(guess, 7).splitlines()[0] == f"You predicted {shown}; it is 7."


@pytest.mark.parametrize(
    ("guess", "actual", "remark"),
    [
        (11, 12, "You are off by one."),
        (24, 12, "You predicted twice the answer."),
        (3, 12, "The answer is 4 times your prediction."),
        (-0.5, 0.5, "Only the sign is wrong."),
        (11.5, 12, "You are 4 % too low."),
        (12.01, 12, "You are less than 1 % too high."),
    ],
)
def test_a_number_that_is_nearly_right_has_a_remark(said, guess, actual, remark):
    assert said(guess, actual).splitlines()[1:] == [remark]


@pytest.mark.parametrize(
    ("guess", "actual"),
    [(0, 5), (5, 0), (7, 12), (float("nan"), 1), (float("inf"), 1), (1, 1j), (10**400, 2.0)],
)
def test_a_number_that_is_far_off_has_no_remark(said, guess, actual):
    assert len(said(guess, actual).splitlines()) == 1


@pytest.mark.parametrize(
    ("guess", "actual", "remark"),
    [
        (
            [0, 1],
            [0, 1, 2],
            "The answer has 3 entries, and your list has 2. The first 2 are the same.",
        ),
        ([5, 1], [0], "The answer has 1 entry, and your list has 2."),
        ([2, 0, 1], [0, 1, 2], "The entries are right, but not their order."),
        (
            [0, 1, 1, 4],
            [0, 1, 2, 3],
            "2 of 4 entries are right. The first that is not is [2]: you predicted 1; it is 2.",
        ),
        (
            [0, ...],
            [0, 1],
            "1 of 2 entries is right. The first that is not is [1]: you predicted ...; it is 1.",
        ),
        (
            {"a": 1},
            {"a": 1, "b": [2]},
            "1 of 2 entries is right. The first that is not is ['b']: you made no prediction;"
            " it is [2].",
        ),
    ],
)
def test_entries_that_are_right_are_counted(said, guess, actual, remark):
    assert said(guess, actual).splitlines()[1:] == [remark]


@pytest.mark.parametrize(
    ("guess", "actual", "kinds"),
    [
        ("12", 12, "a number, not a string"),
        (1, True, "True or False, not a number"),
        ([3], {0: 3}, "a dict, not a list"),
        (print, {1}, "a set, not an object of type builtin_function_or_method"),
        (Odd(), 5, "a number, not an object of type Odd"),
    ],
)
def test_a_guess_of_another_type_is_explained(said, guess, actual, kinds):
    assert said(guess, actual).splitlines()[1:] == [f"The answer is {kinds}."]


def test_a_long_value_is_shown_in_short(said):
    shown = said([*range(1000)], [*range(1, 1001)]).splitlines()
    assert all(len(line) < 160 for line in shown)
    assert shown[0].count(" ...") == 2


def test_a_prediction_without_an_answer_is_refused_in_a_sentence():
    with pytest.raises(kit.CompareError, match=r"'actual'; write kit.predict\(my_guess, answer\)"):
        kit.predict(6)
