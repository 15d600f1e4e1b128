"""`kit.predict`: compares what a reader expected with what a run gave.

It prints plain text, the same for the same values, so that nbval can compare it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from ddp_kit.errors import CompareError
from ddp_kit.pool.arguments import explaining_arguments

LONGEST = 60  # characters of a value that are printed
LARGEST = 1e300  # a float may overflow beyond it
TINY = 1e-12  # what is closer to zero equals it: a sum of floats is seldom exactly zero
ROUNDED, READABLE = 1e6, 1e15  # between these a float is printed as a whole number
CLOSE = 0.1  # of the answer: how far off a number is, is said if it is no further away
# Factors that come from a known confusion: both directions, bits and bytes, elements and bytes.
FACTORS = (2, 3, 4, 8, 10, 100, 1000, 1024)
KINDS = (
    (bool, "True or False"),
    ((int, float, complex), "a number"),
    ((list, tuple), "a list"),
    (str, "a string"),
    (dict, "a dict"),
    (Set, "a set"),
    (type(None), "None"),
)


@explaining_arguments("kit.predict(my_guess, answer)", CompareError)
def predict(guess: object, actual: object) -> None:
    """Print whether a prediction was right; if it was not, print what was nearly right about it.

    guess: the prediction; `...` is none, which the printed text says.
    actual: the answer: a number, a bool, a string, a list, a tuple, a set, a dict, or a tensor,
        which counts as the number or the nested list that it holds.

    Numbers are equal up to rounding to five digits, and zero equals what is within 1e-12 of it.
    Strings are compared without regard to case and to spaces around them. A guess of another type
    than the answer is reported, not raised.

        kit.predict(my_guess, 12)
    """
    print("\n".join(_lines(_plain(guess), _plain(actual))))


def _lines(guess: Any, actual: Any) -> list[str]:
    if _is_no_prediction(guess):
        return [f"The answer is {_text(actual)}. You made no prediction."]
    if _equal(guess, actual):
        return [f"Right: {_text(actual)}."]
    lines = [f"You predicted {_text(guess)}; it is {_text(actual)}."]
    if _kind(guess) != _kind(actual):
        kind = "a tuple" if isinstance(actual, tuple) else _kind(actual)
        # "None" may be a choice that the question names.
        return lines if guess is None else [*lines, f"The answer is {kind}, not {_kind(guess)}."]
    if remark := _remark(guess, actual):
        lines.append(remark)
    return lines


def _plain(value: Any) -> Any:
    """Return tensors, arrays and their numbers as numbers and lists, also inside of others."""
    with suppress(Exception):  # no tolist, or one that raises: of a class, or a sparse tensor
        value = value.tolist()  # of PyTorch and NumPy
    if isinstance(value, (list, tuple, range)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _is_no_prediction(guess: Any) -> bool:
    if isinstance(guess, (list, tuple, dict)) and guess:
        items: Iterable[Any] = guess.values() if isinstance(guess, dict) else guess
        return all(_is_no_prediction(item) for item in items)
    return guess is ... or (isinstance(guess, str) and guess == "...")


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    other = f"an object of type {type(value).__name__}"
    return next((name for kind, name in KINDS if isinstance(value, kind)), other)


def _equal(one: Any, other: Any) -> bool:
    if _kind(one) != _kind(other):
        return False
    if isinstance(one, str):
        return one.strip().casefold() == other.strip().casefold()
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    try:
        if isinstance(one, float) or isinstance(other, float):
            both_nan = one != one and other != other
            rounding = TINY if 0 in (one, other) else 0.0
            return both_nan or math.isclose(one, other, rel_tol=1e-5, abs_tol=rounding)
        return bool(one == other)
    except Exception:  # an object of the learner's may compare in any way
        return one is other


def _text(value: Any) -> str:
    """Return a value as it is printed, shortened if it is long."""
    text = _inner_text(value, ",")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _inner_text(value: Any, comma: str = "") -> str:
    """Return a value as it is printed, and six digits of a fraction.

    comma: what separates the thousands of a number that is in no list.
    """

    def each(values: Iterable[Any]) -> list[str]:
        return [_inner_text(item) for item in values]

    if value is ...:
        return "..."
    if isinstance(value, (str, bool, complex, type(None))):
        return repr(value)
    if isinstance(value, float):
        size = abs(value)
        if size >= READABLE or not (value.is_integer() or size >= ROUNDED):
            return f"{value:.6g}"
        value = round(value)
    if isinstance(value, int):
        return f"{value:{comma}}"
    if isinstance(value, list):
        return f"[{', '.join(each(value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(each(value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        entries = zip(each(value), each(value.values()), strict=True)
        return f"{{{', '.join(f'{key}: {item}' for key, item in entries)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(each(value)))}}}" if value else "set()"
    return _kind(value)  # its repr may hold an address


def _remark(guess: Any, actual: Any) -> str:
    """Return what is nearly right about a wrong guess of the right kind; "" if nothing is."""
    if isinstance(guess, (list, tuple)):
        return _on_list(guess, actual)
    if isinstance(guess, dict):
        return _on_entries(guess, actual)
    real = isinstance(guess, (int, float)) and not isinstance(guess, bool)
    return _on_number(guess, actual) if real and not isinstance(actual, complex) else ""


def _on_number(guess: float, actual: float) -> str:
    if not (abs(guess) < LARGEST and abs(actual) < LARGEST):  # nor is NaN
        return ""
    if isinstance(guess, int) and isinstance(actual, int) and abs(guess - actual) == 1:
        return "You are off by one."
    if guess == 0 or actual == 0:
        return ""
    if _equal(guess, -actual):
        return "Only the sign is wrong."
    for factor in FACTORS:
        if _equal(guess, factor * actual):
            return f"You predicted {_times(factor)} the answer."
        if _equal(factor * guess, actual):
            return f"The answer is {_times(factor)} your prediction."
    share = abs(guess - actual) / abs(actual)
    if share > CLOSE:
        return ""
    percent = "less than 1" if share < 0.01 else f"{100 * share:.0f}"
    return f"You are {percent} % too {'high' if guess > actual else 'low'}."


def _times(factor: int) -> str:
    return "twice" if factor == 2 else f"{factor:,} times"


def _on_list(guess: Sequence[Any], actual: Sequence[Any]) -> str:
    if len(guess) != len(actual):
        lengths = f"The answer has {_count(len(actual))}, and your list has {len(guess):,}."
        common = min(len(guess), len(actual))
        if common and _equal(guess[:common], actual[:common]):
            same = "one is" if common == 1 else f"{common:,} are"
            lengths += f" The first {same} the same."
        return lengths
    left = list(actual)
    for item in guess:
        found = next((place for place, other in enumerate(left) if _equal(item, other)), None)
        if found is None:
            return _on_entries(dict(enumerate(guess)), dict(enumerate(actual)))
        del left[found]
    return "The entries are right, but not their order."


def _on_entries(guess: dict[Any, Any], actual: dict[Any, Any]) -> str:
    """Count the entries that are right, and name the first that is not."""
    right = sum(key in guess and _equal(guess[key], actual[key]) for key in actual)
    more = [key for key in guess if key not in actual]
    wrong = [key for key in actual if key not in guess or not _equal(guess[key], actual[key])]
    are = "is" if right == 1 or len(actual) == 1 else "are"
    text = f"{right:,} of {_count(len(actual))} {are} right."
    if not wrong:
        return f"{text} The answer has no entry [{_inner_text(more[0])}]."
    key = wrong[0]
    said, is_ = "you made no prediction", _text(actual[key])
    if key in guess:
        said = f"you predicted {_text(guess[key])}"
    return f"{text} The first that is not is [{_inner_text(key)}]: {said}; it is {is_}."


def _count(number: int) -> str:
    return "1 entry" if number == 1 else f"{number:,} entries"
