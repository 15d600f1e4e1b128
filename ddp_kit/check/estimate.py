"""Estimates: a number found with pencil and paper is right within a tolerance.

They are in estimates.ini: `answer` and the wrong answers are Python, with the names of `kit.model`;
`because` is shown once the learner's number is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ddp_kit import model
from ddp_kit.check.grader import Credit, only_message, register
from ddp_kit.check.hints import ESTIMATES, PLACE, Steps, find, read
from ddp_kit.errors import ExerciseError

CLOSE = 0.02  # a wrong answer is recognized within this
SCALES = (0.001, 0.01, 100, 1000)  # of the answer in another unit, such as a fraction for percent


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
        return [f"within {self.within:.0%}".replace("%", " %")]

    def check(self, answer: Any, step: int | None) -> Credit:
        """Compare a number with the answer, and raise if it is not close. step: of the hint."""
        steps = Steps(self.number, step)
        self._compare(answer, steps)
        steps.passed()
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
            dots = f"Exercise {self.number}: replace the dots by a number"
            raise only_message(NotImplementedError(dots))
        is_number = isinstance(answer, Real) and not isinstance(answer, bool)
        if not is_number or math.isnan(answer):
            raise ExerciseError(f"exercise {self.number}: the answer is a number, got {answer!r}")
        if math.isclose(answer, self.answer, rel_tol=self.within):
            return
        near = (n for n, value in self.wrong.items() if math.isclose(answer, value, rel_tol=CLOSE))
        scaled = (value * self.answer for value in SCALES)
        is_scaled = any(math.isclose(answer, value, rel_tol=self.within) for value in scaled)
        mistake = next(near, "other unit" if is_scaled else "other")
        size = "small" if answer < self.answer else "large"
        error = ExerciseError(f"exercise {self.number}: {self._format(answer)} is too {size}")
        error.hint = "\n".join(steps.of(mistake))
        error.mistake = find(self.number, mistake).mistake
        raise error

    def _format(self, value: float) -> str:
        # Three digits, but all of a whole number such as 1,024. "{2500:,.3g}" is 2.5e+03.
        rounded = value if value % 1 == 0 and abs(value) < 10_000 else float(f"{value:.3g}")
        return f"{rounded:,.10g} {self.unit}".strip()


def _add(number: str, section: dict[str, str]) -> None:
    names = {name: getattr(model, name) for name in model.__all__}
    wrong = {
        key.removeprefix("wrong "): float(eval(text, dict(names)))
        for key, text in section.items()
        if key.startswith("wrong ")
    }
    answer = float(eval(section["answer"], names))
    within = float(section["within"].removesuffix("%")) / 100
    task = Estimate(number, answer, section["unit"], within, section["because"], wrong)
    register(task, f"Compare a number in {task.unit} with the answer.")


for _number, _section in read(ESTIMATES).items():
    _add(_number, _section)
