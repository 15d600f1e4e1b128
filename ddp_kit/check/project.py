"""Projects: programs of days, whose milestones are checked one after the other.

`kit.check.project_1("my_program.py", milestone=2)` checks one of them. No solution is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_kit.check.grader import Credit, Exercise, Grader, name_of, register
from ddp_kit.check.hints import Steps
from ddp_kit.error_text import count
from ddp_kit.errors import ExerciseError

SECONDS = 900.0  # for all milestones together, which takes a minute or two
Milestone = Callable[[Any], None]


@dataclass(frozen=True, eq=False)
class Project(Exercise):
    """A task of days. graded_by: the class of its grader."""

    graded_by: type[Grader] = Grader

    @property
    def title(self) -> str:
        return f"project {self.number.removeprefix('P')}"

    def grader(self, *args: Any) -> Grader:
        return self.graded_by(self, *args)

    def check(self, answer: Any, step: int | None, milestone: int | None = None) -> Credit:
        """Check a milestone, or all in order, and raise at the first that is not reached.

        step: of the hint; None for the next.
        """
        numbers = range(1, len(self.names) + 1)
        if milestone is not None and (milestone is True or milestone not in numbers):
            raise ExerciseError(f"milestone must be 1 to {numbers[-1]}, got {milestone!r}")
        steps = Steps(self.number, step)
        grader = self.grader(answer, steps)
        for number in numbers if milestone is None else [milestone]:
            grader.try_case(number - 1)
            name = self.names[number - 1]
            print(f"Project {self.number[1:]}, milestone {number}: reached, {name}.")
        steps.passed()
        return Credit(grader.parts)

    def credit(self, answer: Any, seconds: float) -> Credit:
        """Return which milestones are reached. seconds: too short for a project, so not used."""
        return super().credit(answer, SECONDS)


class ProgramGrader(Grader):
    """Grades a program, whose path is the answer."""

    def check_form(self) -> None:
        path, check = self.answer, f"kit.check.{name_of(self.exercise.number)}"
        if not isinstance(path, str | os.PathLike):
            got = type(path).__name__
            self.refuse(f"{check} expects the path of your program; got a value of type {got}")
        if not Path(path).is_file():
            self.refuse(f"there is no program {os.fspath(path)} in this folder")


def project(
    number: str,
    form: str,
    milestones: Mapping[str, Milestone],
    *,
    graded_by: type[Grader],
    on_failure: str | Mapping[type[Exception], str] = "",
    collectives: bool = True,
) -> None:
    """Register the check of a project. milestones: functions of a grader, by their names.

    graded_by: a class of graders. on_failure: the mistake behind runs that fail, or one for each
    error. collectives: whether the answer may call some.
    """
    names, functions = list(milestones), list(milestones.values())
    praise = f"all {count(len(names), 'milestone')} are reached"
    known = (functions, names, (), on_failure, collectives, graded_by)
    task = Project(number, "project", form, praise, lambda grader, reach: reach(grader), *known)

    def check(answer: Any, *, milestone: int | None = None, hint: int | None = None) -> Credit:
        return task.check(answer, hint, milestone)

    about = (
        f"Check the milestones of {task.title}, or one of them.\n\n"
        "milestone: its number, from 1; without it, all are checked, in order."
    )
    register(task, about, check)
