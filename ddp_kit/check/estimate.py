"""Estimates: a number found with pencil and paper is right within a tolerance.

They are in estimates.ini: `answer` and the wrong answers are Python, with the names of `kit.model`;
`because` is shown once the learner's number is right.
"""

from __future__ import annotations

import math
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ddp_kit import model
from ddp_kit.check.grader import EXERCISES, failed
from ddp_kit.check.hints import PLACE, Steps, find
from ddp_kit.check.partial_credit import Credit
from ddp_kit.errors import ExerciseError
from ddp_kit.progress_file import recorded

CLOSE = 0.02  # a wrong answer is recognized within this


@dataclass(frozen=True)
class Estimate:
    """A number to find, in a unit. within: the tolerance, 0.1 for 10 %. wrong: by the mistake."""

    number: str
    answer: float
    unit: str
    within: float
    because: str
    wrong: dict[str, float]
    kind = "estimate"

    @property
    def parts(self) -> list[str]:
        """The name of its only part, which is worth a point."""
        return [f"within {self.within:.0%}".replace("%", " %")]

    def check(self, answer: Any, step: int | None) -> Credit:
        """Compare a number with the answer, and raise if it is not close. step: of the hint."""
        steps = Steps(self.number, step or min(failed[self.number] + 1, PLACE))
        try:
            self._compare(answer, steps)
        except ExerciseError:
            failed[self.number] += 1
            raise
        failed[self.number] = 0
        print(f"Exercise {self.number}: right, {self._format(self.answer)}. {self.because}")
        return Credit(dict.fromkeys(self.parts, True))

    def credit(self, answer: Any, seconds: float) -> Credit:
        """Return whether a number is close to the answer. seconds: not needed."""
        part, wrong = self.parts[0], {}
        try:
            self._compare(answer, Steps(self.number, PLACE, is_last=True))
        except (ExerciseError, NotImplementedError) as error:
            wrong[part] = str(error)
        return Credit({part: not wrong}, wrong)

    def _compare(self, answer: Any, steps: Steps) -> None:
        if answer is ...:
            raise NotImplementedError(f"Exercise {self.number}: replace the dots by a number")
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        if not is_number or math.isnan(answer):
            raise ExerciseError(f"exercise {self.number}: the answer is a number, got {answer!r}")
        if math.isclose(answer, self.answer, rel_tol=self.within):
            return
        mistakes = (name for name, value in self.wrong.items() if _is_near(answer, value))
        mistake = next(mistakes, "other")
        size = "small" if answer < self.answer else "large"
        error = ExerciseError(f"exercise {self.number}: {self._format(answer)} is too {size}")
        error.hint = "\n".join(steps.of(mistake))
        error.mistake = find(self.number, mistake).mistake
        raise error

    def _format(self, value: float) -> str:
        rounded = float(f"{value:.3g}")  # "{2500:,.3g}" is 2.5e+03
        return f"{rounded:,.10g} {self.unit}".strip()


def _is_near(answer: float, value: float) -> bool:
    return math.isclose(answer, value, rel_tol=CLOSE)


def _register(each: Estimate) -> None:
    def check(answer: Any, *, hint: int | None = None) -> Credit:
        return each.check(answer, hint)

    check.__name__ = check.__qualname__ = f"exercise_{each.number.replace('.', '_')}"
    check.__module__ = __name__
    check.__doc__ = (
        f"Compare a number in {each.unit} with the answer of Exercise {each.number}.\n\n"
        "hint: what is said of a mistake: 1 only what is wrong, 2 also a question, 3 where to\n"
        "look, 4 a solution. Without it, each check that fails says one more, up to 3.\n\n"
        "Raises ExerciseError if it is not right yet, NotImplementedError for the dots."
    )
    check.exercise = each  # type: ignore[attr-defined]
    EXERCISES[check.__name__] = recorded(check)


def _read() -> None:
    parser = ConfigParser(interpolation=None, delimiters=("=",))
    parser.read_string(files(__package__).joinpath("estimates.ini").read_text("utf-8"))
    names = {name: getattr(model, name) for name in model.__all__}
    for number in parser.sections():
        section = {key: " ".join(text.split()) for key, text in parser[number].items()}
        values = {key: section.pop(key) for key in list(section) if key[:5] in ("answe", "wrong")}
        found = {key: float(eval(text, dict(names))) for key, text in values.items()}
        wrong = {key.removeprefix("wrong "): value for key, value in found.items()}
        answer = wrong.pop("answer")
        within = float(section["within"].removesuffix("%")) / 100
        _register(Estimate(number, answer, section["unit"], within, section["because"], wrong))


_read()
