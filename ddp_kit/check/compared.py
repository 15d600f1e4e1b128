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
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, NamedTuple

from ddp_kit.check.grader import (
    FAILURES,
    SENT,
    SIZES,
    TIMEOUT,
    UNCHANGED,
    Grader,
    by_size,
    called_with,
    exercise,
    filled,
    name_counts,
    same,
)
from ddp_kit.check.hints import hints, solutions
from ddp_kit.error_text import count
from ddp_kit.pool import Result, run
from ddp_kit.trace import Trace

SPARE = 1.5  # times the bytes of the solution: there is more than one right answer
MANY = 32.0  # the same, where wider numbers and whole objects are fine
OTHER = "otherwise"  # the mistake behind all results that no known one has
HUNTED = "train(rank, world_size)"
Worker = Callable[..., Any]


class Used(NamedTuple):
    """What a run used: "rank 1 sent {}" for its words. part: does not hold if that is too much.

    spare: how many times as much as the solution an answer may use, if not that of the exercise.
    """

    words: str
    amount: float
    noun: str = "byte"
    part: str = SENT
    spare: float | None = None

    def __str__(self) -> str:
        return self.words.format(count(round(self.amount), self.noun))


class Outcome(NamedTuple):
    """What an answer did: how it failed and where it waited, or what is compared and was used."""

    failed: list[str]
    values: list[Any]
    used: list[Used]


@dataclass(frozen=True)
class Comparison:
    """How the answers to an exercise are compared.

    name: of the function or class that is the answer. worker: returns what must be as with the
    solution. spare: how many times as much as the solution an answer may use; None for any amount.
    used: returns what a trace and a case have used. together: returns what is compared of a
    result, if not each rank's value. call: returns the call in a case, for messages; None for the
    form. otherwise: returns the mistake in a case that no known one explains.

    A case is the number of ranks, and what the worker gets after the answer.
    """

    number: str
    name: str
    worker: Worker
    spare: float | None
    used: Callable[..., list[Used]]
    together: Callable[[Result], list[Any]]
    call: Callable[..., str] | None
    otherwise: Callable[..., str] | None

    def grade(self, grader: Grader, *case: Any) -> None:
        """Fail if an answer does not do what the solution does, uses more, or sends nothing."""
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
                wanted, found = ([each[key] for each in one.values] for one in (right, learners))
                grader.compare(wanted, found, mistake, place=f" in {key}")
            verb = "return" if _returns(self.number) else "hold"
            grader.compare(right.values, learners.values, mistake, verb=verb)
        for one, enough in self._too_much(learners, case):
            part = one.part if one.part in grader.parts else ""
            fact = f"right, but {one}: {enough}"
            grader.fail(fact, hint=self.mistake(learners, case), part=part)
        if self.spare and case[0] > 1 and _amount(right) and not _amount(learners):
            grader.fail("right, but no rank sent anything to another", hint="nothing sent")

    def mistake(self, learners: Outcome, case: tuple) -> str:
        """Return the mistake with which a wrong answer does the same; "" if none fits."""
        too_much = self._parts_with_too_much(learners, case)
        ended = {UNCHANGED, "as before"} if learners.failed else set()
        names = programs(self.number, self.name).keys() - {""} - ended
        expected = self.otherwise(*case) if self.otherwise else ""
        own_first = sorted(names, key=lambda n: (n != expected, n in hints(), n == OTHER, n))
        known = {name: outcome(self, name, case) for name in own_first}
        found = {
            name: one
            for name, one in known.items()
            if same(one[:2], learners[:2]) and self._parts_with_too_much(one, case) == too_much
        }
        as_much = (name for name, one in found.items() if one.used == learners.used)
        if name := next(as_much, next(iter(found), "")):
            return name
        right = outcome(self, "", case).values
        other = "too many bytes" if same(right, learners.values) else OTHER
        if learners.failed:
            raised = learners.failed[0] == "RankError" or f"{self.number} stuck" not in hints()
            other = "fails" if raised else "stuck"
        elif _returns(self.number) and _other_form(right, learners.values):
            other = "another form"
        if {other, f"{self.number} {other}"} & hints().keys():
            return other
        return (expected or "unknown") if other == OTHER else ""

    def outcome_of(self, ended: Result | Exception, case: tuple) -> Outcome:
        """Return what a run did, by its result or its error."""
        if isinstance(ended, Exception):
            failures = getattr(ended, "failures", {}).values()
            # Which attribute is missing tells one mistake from another.
            told = {f"{f.type} {f.message * (f.type == 'AttributeError')}" for f in failures}
            kinds = [type(ended).__name__, *sorted(told)]
            waits = (f"{wait.rank} {wait.op}" for wait in getattr(ended, "waits", ()))
            return Outcome(kinds, [], [Used(each, 0) for each in waits])
        return Outcome([], self.together(ended), self.used(ended.trace, *case))

    def _too_much(self, one: Outcome, case: tuple) -> list[tuple[Used, str]]:
        """Return of what too much is used, and how much would be enough, in words."""
        found, right = [], outcome(self, "", case).used if self.spare else []
        needed = {each.words: round(each.amount) for each in right}
        for each in one.used if self.spare else ():
            enough = needed.get(each.words, 0)
            most = round(enough * (each.spare or self.spare or 1))
            if round(each.amount) > most:
                text = f"{enough:,} {'is' if enough == 1 else 'are'} enough"
                text += f", and {most:,} are allowed" * (most > enough)
                found.append((each, text if enough else "none is needed"))
        return found

    def _parts_with_too_much(self, one: Outcome, case: tuple) -> set[str]:
        return {each.part for each, _ in self._too_much(one, case)}


def _amount(one: Outcome) -> float:
    return sum(each.amount for each in one.used)


def by_rank(trace: Trace, *case: Any) -> list[Used]:
    """Return the bytes that each rank sent."""
    rows = [trace.summary(rank=rank).rows for rank in range(trace.world_size)]
    sent = [sum(row.sent for row in each) for each in rows]
    return [Used(f"rank {rank} sent {{}}", each) for rank, each in enumerate(sent)]


def in_messages(trace: Trace, *case: Any) -> list[Used]:
    """Return the bytes and the messages that all ranks sent."""
    sent = trace.messages()
    nbytes = sum(message.nbytes for message in sent)
    return [Used("{} were sent", nbytes), Used("{} were sent in all", len(sent), "message")]


# What is said of an exercise in which ranks may send messages alone, and no more than needed.
IN_MESSAGES: dict[str, Any] = {
    "collectives": False,
    "used": in_messages,
    "spare": 1,
    "sizes": SIZES,
}


def in_collectives(trace: Trace, *case: Any) -> list[Used]:
    """Return the collectives of rank 0 and their bytes, and all messages."""
    called = [event for event in trace if event.rank == 0 and event.kind == "collective"]
    nbytes = sum(event.nbytes for event in called if event.op != "new_group")
    return [
        Used("rank 0 called {}", len(called), "collective", spare=1),
        Used("{} went into collectives of rank 0", nbytes),
        Used("{} were sent", len(trace.messages()), "message"),
    ]


def _other_form(want: list[Any], have: list[Any]) -> bool:
    """Return whether the first value that differs is of another type, or a tuple of another length.

    Not if a sentence was found: the check itself has written it.
    """
    for whole, found in zip(want, have, strict=True):
        keys = _keys([whole], [found])
        for one, other in [(whole[key], found[key]) for key in keys] or [(whole, found)]:
            if not same(one, other):
                is_sentence = isinstance(other, str) and " " in other
                lengths = [len(each) for each in (one, other) if isinstance(each, tuple)]
                return not is_sentence and (type(one) is not type(other) or len({*lengths}) > 1)
    return False


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
    used: Callable[..., list[Used]] = by_rank,
    together: Callable[[Result], list[Any]] = list,
    call: Callable[..., str] | None = None,
    otherwise: Callable[..., str] | None = None,
    **about: Any,
) -> Callable[[Worker], Worker]:
    """Register the check of an exercise: `worker(rank, world_size, answer)` tries an answer.

    sizes: the numbers of ranks. For `worker` and the arguments from `spare` to `otherwise`, see
    Comparison; for the others, such as `cases`, see `exercise`.
    """
    where, of_size, others = "in every case", lambda _: "in every case", ()
    if max(sizes) > 1:
        where, of_size = f"on {name_counts(sorted(sizes))} ranks", by_size(sizes)
        others = () if spare is None else (SENT,)
    cases = [(size,) for size in sizes]
    part = {"part": lambda case: of_size(case[0])}
    about = {"where": where, "others": others, "cases": cases} | part | about

    def add(worker: Worker) -> Worker:
        how = (worker, spare, used, together, call, otherwise)
        comparison = Comparison(number, form.partition("(")[0], *how)
        exercise(number, form, right, kind=kind, **about)(comparison.grade)
        return worker

    return add


def alone(
    number: str, form: str, where: str = "in every case", **about: Any
) -> Callable[[Worker], Worker]:
    """Register the check of an exercise on one rank: `tried(answer)` tries an answer."""

    def add(tried: Callable[[Any], Any]) -> Worker:
        def worker(rank: int, world_size: int, answer: Any) -> Any:
            return tried(answer)

        return compared(number, form, where=where, sizes=(1,), **about)(worker)

    return add


def asked(
    number: str,
    form: str,
    cases: Iterable[tuple],
    part: Callable[..., str] = lambda *given: "in every case",
    exact: bool = False,
    **about: Any,
) -> None:
    """Register the check of an answer that returns a number for what it is asked in each case.

    part: returns the part to which a case belongs. exact: whether 1.0 is another answer than 1.
    """
    name = form.partition("(")[0]

    @compared(
        number,
        form,
        sizes=(1,),
        cases=[(1, *given) for given in cases],
        part=lambda case: part(*case[1:]),
        call=lambda _, *given: called_with(name, given),
        **about,
    )
    def ask(rank: int, world_size: int, answer: Callable, *given: Any) -> Any:
        found = answer(*given)
        if exact and isinstance(found, Integral) and not isinstance(found, bool):
            return int(found)
        return found if exact else as_float(found)


def as_float(value: Any) -> Any:
    """Return a number as a float, and all else as it is."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if is_number else value


def in_parts(*others: str, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return an exercise's cases, numbers of ranks and parts: one by the ranks, and these others.

    Each of the others is what the worker gets after the answer, and "" for the part by the ranks.
    """
    cases = [(n, "") for n in sizes] + [(n, other) for other in others for n in sizes if n != 1]
    of_size = by_size(sizes)
    about = {"cases": cases, "part": lambda case: case[1] or of_size(case[0])}
    return about | {"sizes": sizes, "spare": None}


def hunt(*numbers: str, **about: Any) -> None:
    """Register the checks of bug hunts: the repaired program does what the solution does.

    The exercises have the broken program in a cell that begins with `# Hunt 9.1`, the solutions the
    repaired one. A program that sends more than needed is not repaired, and has no points. For the
    other arguments, see `compared`.
    """
    for number in numbers:
        compared(number, HUNTED, kind="hunt", others=(), **about)(called)


def called(rank: int, world_size: int, answer: Callable[[int, int], Any]) -> Any:
    """Return what an answer returns that is a worker itself."""
    return answer(rank, world_size)


def _returns(number: str) -> bool:
    """Return whether the solution returns something, or else only changes its arguments."""
    return solutions()[number]["program"].rpartition("\n")[2].lstrip().startswith("return")


@cache
def programs(number: str, name: str) -> dict[str, str]:
    """Return the wrong programs by their mistakes, after the solution, whose name is "".

    name: of the function or class that is the answer.
    """
    solved = solutions()[number]
    found = {"": solved["program"]}
    if not _returns(number):
        found[UNCHANGED] = f"def {name}(*given): pass"
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
    program = programs(comparison.number, comparison.name)[mistake]
    answer = defined(comparison.number, program, comparison.name)
    world_size, *more = case
    how = {"world_size": world_size, "backend": "gloo", "timeout": TIMEOUT}
    with redirect_stdout(io.StringIO()):
        try:
            return comparison.outcome_of(run(filled, comparison.worker, answer, *more, **how), case)
        except tuple(FAILURES) as error:
            return comparison.outcome_of(error, case)
