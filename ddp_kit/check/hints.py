"""Hints in steps: the symptom, a question, the place, and only on request a solution.

The texts are in the .ini file beside each lesson's graders, a section for each mistake, `[4.1 wrong
chunk]`, and in shared.ini, `[unchanged]`, if it can be made in several exercises. `make editions`
writes docs/hints.md and solutions.json.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from configparser import ConfigParser
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ddp_kit.errors import ExerciseError

SYMPTOM, QUESTION, PLACE, SOLUTION = 1, 2, 3, 4  # the steps
ESTIMATES = "estimates.ini"
LIMIT = "DDP_KIT_HINTS"  # the environment variable with which a teacher sets the last step
# Of each exercise, how many checks have found which mistake since it last passed.
_failed: defaultdict[str, Counter[str]] = defaultdict(Counter)


class Hint(NamedTuple):
    """What is said of a mistake, for the teacher, and to the learner step by step.

    replace, by: what turns the solution into an answer with this mistake.
    """

    mistake: str
    question: str
    place: str
    replace: str = ""
    by: str = ""


@cache
def hints() -> dict[str, Hint]:
    """Return all hints, by the names of their sections."""
    names = sorted(file.name for file in files(__package__).iterdir())
    texts = [read(name) for name in names if name.endswith(".ini") and name != ESTIMATES]
    return {name: Hint(**section) for text in texts for name, section in text.items()}


def read(name: str) -> dict[str, dict[str, str]]:
    """Return the sections of a file of this package, whose texts are one line each."""
    parser = ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string(files(__package__).joinpath(name).read_text("utf-8"))
    return {
        section: {
            key: _code(text) if key in ("replace", "by") else " ".join(text.split())
            for key, text in parser[section].items()
        }
        for section in parser.sections()
    }


def _code(text: str) -> str:
    r"""Return code without the ` around it, which keep its spaces, and with a new line for \n."""
    return text.strip("`").replace("\\n", "\n")


def find(number: str, name: str) -> Hint:
    """Return the hint for a mistake in an exercise, or the one for this mistake in any."""
    return hints().get(f"{number} {name}") or hints()[name]


@cache
def solutions() -> dict[str, dict[str, str]]:
    """Return the code of each exercise, by its number.

    "solution": what is shown of it; "program": all of its cell; "setup": what that needs first. A
    hunt has also its "broken" program.
    """
    return json.loads(files(__package__).joinpath("solutions.json").read_text("utf-8"))


class Steps:
    """Says of a mistake what a learner should read now.

    number: of the exercise. step: the last one that is said; None for one more than the last time
    that this mistake was made, up to the place. is_last: whether the learner cannot ask for more.

    Raises ExerciseError if the learner asks for no step, or the teacher has set none.
    """

    def __init__(self, number: str, step: int | None, is_last: bool = False) -> None:
        if step not in (None, SYMPTOM, QUESTION, PLACE, SOLUTION):
            raise ExerciseError(f"hint must be 1, 2, 3 or 4, got {step!r}")
        if step == SOLUTION and number[0] == "P":
            raise ExerciseError("hint must be 1, 2 or 3: a project has no printed solution")
        limit = os.environ.get(LIMIT, str(SOLUTION))
        if limit not in ("1", "2", "3", "4"):
            raise ExerciseError(f"{LIMIT} must be 1, 2, 3 or 4, got {limit!r}")
        self._number, self._step, self._is_last = number, step, is_last
        self._last = min(int(limit), PLACE if number[0] == "P" else SOLUTION)

    def passed(self) -> None:
        """Begin with the symptom of each mistake again."""
        _failed.pop(self._number, None)

    def of(self, mistake: str) -> list[str]:
        """Return what follows the symptom, and how to get the next step. mistake: "": unknown."""
        failed = _failed[self._number]
        failed[mistake] += not self._is_last
        step = min(self._step or min(failed[mistake], PLACE), self._last)
        more = not self._is_last and step < self._last
        hint = find(self._number, mistake) if mistake else None
        lines = list(hint[QUESTION - 1 : min(step, PLACE)]) if hint else []
        if step == SOLUTION:
            return [*lines, "A solution:", solutions()[self._number]["solution"]]
        if more and step == PLACE:
            lines.append("Pass hint=4 for a solution.")
        elif more and hint:
            lines.append(f"Check again for a hint, or pass hint={step + 1}.")
        return lines
