"""Exercises whose answers are compared with the solution: both run on real ranks, in one worker.

If an answer is not right, known wrong answers run as well: the one that does the same tells which
mistake the learner has made. Most are the solution with one change, which the mistake's section
has:

    [3.b not divided]
    replace = parameter.grad /= world_size
    by = pass

`make editions` writes the solutions, and the programs that they are in, into solutions.json.
"""

from __future__ import annotations

import ast
import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ddp_kit.check.grader import (
    FAILURES,
    SENT,
    TIMEOUT,
    Grader,
    by_size,
    exercise,
    filled,
    name_counts,
    same,
)
from ddp_kit.check.hints import hints, solutions
from ddp_kit.error_text import count
from ddp_kit.pool import Result, run

SPARE = 1.5  # times the bytes of the solution: there is more than one right answer
MANY = 8.0  # the same, where wider numbers and whole objects are fine
HUNTED = "train(rank, world_size)"
Worker = Callable[..., Any]


class Outcome(NamedTuple):
    """What an answer did: how it failed, or each rank's value and the bytes that it sent."""

    failed: list[str]
    values: list[Any]
    sent: list[int]


class Counted(NamedTuple):
    """Which messages count, in words such as " to other hosts", and for one of them and a case."""

    words: str
    is_one: Callable[..., bool]


@dataclass(frozen=True)
class Comparison:
    """How the answers to an exercise are compared.

    name: of the function or class that is the answer. worker: returns what must be as with the
    solution. spare: how many times the bytes of the solution a rank may send; None for any number.
    counted: the messages that count; None for all that is sent. call: returns the call in a case,
    for messages; None for the form.

    A case is the number of ranks, and what the worker gets after the answer.
    """

    number: str
    name: str
    worker: Worker
    spare: float | None
    counted: Counted | None
    call: Callable[..., str] | None

    def grade(self, grader: Grader, *case: Any) -> None:
        """Fail if an answer does not do what the solution does, sends more bytes, or sends none."""
        result = grader.run(
            self.worker,
            *case[1:],
            world_size=case[0],
            case=self.call and self.call(*case),
            failed=lambda error: self.mistake(self.outcome_of(error, case), case),
        )
        learners, right = self.outcome_of(result, case), outcome(self, "", case)
        if not same(right.values, learners.values):
            mistake = self.mistake(learners, case)
            for key in _keys(right.values, learners.values):
                wanted, found = ([value[key] for value in v] for v in (right.values, result))
                grader.compare(wanted, found, mistake, place=f" in {key}")
            grader.compare(right.values, result, mistake, verb="return")
        for rank, (sent, most) in enumerate(zip(learners.sent, self.most(case), strict=True)):
            if sent > most:
                enough = right.sent[rank]
                fact = f"right, but rank {rank} sent {count(sent, 'byte')}"
                fact += f"{self.counted.words if self.counted else ''}: {enough:,} are enough"
                fact += f", and {most:,} are allowed" * (most > enough)
                part = SENT if SENT in grader.parts else ""
                grader.fail(fact, hint=self.mistake(learners, case), part=part)
        if self.spare and sum(right.sent) and not sum(learners.sent):
            grader.fail("right, but no rank sent anything to another", hint="nothing sent")

    def mistake(self, learners: Outcome, case: tuple) -> str:
        """Return the mistake with which a wrong answer does the same; "" if none fits."""
        too_much = self._sends_too_much(learners, case)
        names = programs(self.number).keys() - ({"", "as before"} if learners.failed else {""})
        own_first = sorted(names, key=lambda name: (name in hints(), name))
        known = {name: outcome(self, name, case) for name in own_first}
        found = {
            name: one
            for name, one in known.items()
            if same(one[:2], learners[:2]) and self._sends_too_much(one, case) == too_much
        }
        as_much = (name for name, one in found.items() if one.sent == learners.sent)
        if name := next(as_much, next(iter(found), "")):
            return name
        right = outcome(self, "", case).values
        other = "too many bytes" if same(right, learners.values) else "otherwise"
        if learners.failed:
            other = "fails"
        elif _forms(right) != _forms(learners.values):
            other = "another form"
        if {other, f"{self.number} {other}"} & hints().keys():
            return other
        return "unknown" if other == "otherwise" else ""

    def outcome_of(self, ended: Result | Exception, case: tuple) -> Outcome:
        """Return what a run did, by its result or its error."""
        if isinstance(ended, Exception):
            failures = getattr(ended, "failures", {}).values()
            return Outcome([type(ended).__name__, *sorted({one.type for one in failures})], [], [])
        rows = [ended.trace.summary(rank=rank).rows for rank in range(len(ended))]
        sent = [sum(row.sent for row in each) for each in rows]
        if self.counted is not None:
            sent = [0.0] * len(ended)
            for message in ended.trace.messages():
                sent[message.src] += message.nbytes * self.counted.is_one(message, *case)
        return Outcome([], list(ended), list(map(round, sent)))

    def most(self, case: tuple) -> list[float]:
        sent = outcome(self, "", case).sent
        return [math.inf if self.spare is None else round(self.spare * each) for each in sent]

    def _sends_too_much(self, one: Outcome, case: tuple) -> bool:
        return any(sent > most for sent, most in zip(one.sent, self.most(case), strict=False))


def _forms(values: list[Any]) -> list[Any]:
    return [(type(each), len(each) if isinstance(each, tuple) else 0) for each in values]


def _keys(*values: list[Any]) -> list[str]:
    """Return the keys if all these values are dicts with the same ones."""
    every = [value for one in values for value in one]
    keys = list(every[0]) if isinstance(every[0], dict) else []
    return keys if all(isinstance(v, dict) and list(v) == keys for v in every) else []


def compared(
    number: str,
    form: str,
    right: str = "",
    *,
    kind: str = "gap",
    sizes: tuple[int, ...] = (2, 3),
    spare: float | None = SPARE,
    counted: Counted | None = None,
    call: Callable[..., str] | None = None,
    **about: Any,
) -> Callable[[Worker], Worker]:
    """Register the check of an exercise: `worker(rank, world_size, answer)` tries an answer.

    sizes: the numbers of ranks. For `worker`, `spare`, `counted` and `call`, see Comparison; for
    the others, such as `cases`, see `exercise`.
    """
    where, part, others = "in every case", lambda _: "in every case", ()
    if max(sizes) > 1:
        where, part = f"on {name_counts(sorted(sizes))} ranks", by_size(sizes)
        others = () if spare is None else (SENT,)
    about = {"where": where, "others": others, "part": part, "cases": sizes} | about

    def add(worker: Worker) -> Worker:
        comparison = Comparison(number, form.partition("(")[0], worker, spare, counted, call)
        exercise(number, form, right, kind=kind, **about)(comparison.grade)
        return worker

    return add


def hunt(*numbers: str) -> None:
    """Register the checks of bug hunts: the repaired program does what the solution does.

    The exercises have the broken program in a cell that begins with `# Hunt 9.1`, the solutions the
    repaired one. A program that sends more than needed is not repaired, and has no points.
    """
    for number in numbers:
        compared(number, HUNTED, kind="hunt", others=())(called)


def called(rank: int, world_size: int, answer: Callable[[int, int], Any]) -> Any:
    """Return what an answer returns that is a worker itself."""
    return answer(rank, world_size)


@cache
def programs(number: str) -> dict[str, str]:
    """Return the wrong programs by their mistakes, after the solution, whose name is ""."""
    solved = solutions()[number]
    found = {"": solved["program"]}
    if f"{number} as before" in hints():
        found["as before"] = solved["broken"]
    for section, hint in hints().items():
        shared = section[0].islower() and hint.replace in solved["program"]
        if hint.replace and (shared or section.startswith(f"{number} ")):
            changed = solved["program"].replace(hint.replace, hint.by)
            found[section.removeprefix(f"{number} ")] = changed
    return found


def defined(number: str, program: str, name: str) -> Callable[..., Any]:
    """Return the function or class that a program defines, without running the rest of it."""
    names: dict[str, Any] = {"__name__": f"exercise_{number.replace('.', '_')}"}
    for source in (solutions()[number]["setup"], program):
        tree = ast.parse(source)
        tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        exec(compile(tree, f"exercise {number}", "exec"), names)
    return names[name]


@cache
def outcome(comparison: Comparison, mistake: str, case: tuple) -> Outcome:
    """Return what a wrong answer does, or with "" the solution."""
    program = programs(comparison.number)[mistake]
    answer = defined(comparison.number, program, comparison.name)
    world_size, *more = case
    how = {"world_size": world_size, "backend": "gloo", "timeout": TIMEOUT}
    with redirect_stdout(io.StringIO()):
        try:
            return comparison.outcome_of(run(filled, comparison.worker, answer, *more, **how), case)
        except tuple(FAILURES) as error:
            return comparison.outcome_of(error, case)
