"""What all graders share: a registry, runs on real ranks, messages about what is wrong, credit."""

from __future__ import annotations

import inspect
import io
import math
import os
import reprlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ddp_kit.check.hints import PLACE, Steps, find
from ddp_kit.error_text import Wait, count, format_unawaited
from ddp_kit.errors import (
    DeadlockError,
    ExerciseError,
    InternalError,
    MismatchError,
    RankDiedError,
    RankError,
    RunTimeoutError,
)
from ddp_kit.pool import Result, run
from ddp_kit.pool.arguments import explaining_arguments
from ddp_kit.progress_file import recorded, recording

EXERCISES: dict[str, Callable[[Any], Credit]] = {}  # by name, "exercise_4_1"
# What gives away a mistake, by its name in the .ini files: the values that ranks have then, or
# whether it has been made. So the last one, with True, is for all other mistakes.
Mistakes = Mapping[str, Any]
Reason = str | Mapping[str, str]  # of a failure, see Exercise.on_failure
E = TypeVar("E", bound=Exception)

SIZES = (2, 3, 1, 4, 5)  # most mistakes show on two or three ranks, which start first
TIMEOUT = 60.0  # seconds for one run; a deadlock is found without it
SECONDS = 20.0  # for all runs in `credit`: less than the 30 s that nbgrader gives a cell
STORE_LIMIT = timedelta(seconds=30)  # for a key that nobody sets
SENT = "no more is sent than needed"  # a part of many exercises
UNCHANGED = "unchanged"  # a mistake of many exercises
_MOST_SHOWN = 8  # numbers of a tensor
_MOST_PRINTED = 10_000  # characters of what an answer prints: half of them the last
MISTAKES = {  # by what the error says, in any exercise
    "'tuple' object does not support item assignment": "tuple",
    "NotImplementedError: Exercise ": "another gap",
}
FAILURES: dict[type[Exception], str] = {
    RankError: "it raised an error",
    DeadlockError: "it deadlocks",
    MismatchError: "the ranks' calls do not match",
    RankDiedError: "a rank died",
    RunTimeoutError: "it did not finish in time",
    InternalError: "ddp_kit itself failed",
}


@dataclass(frozen=True, eq=False)
class Exercise:
    """What a learner is asked for, and how an answer is graded.

    number: "4.1", "4.a" if it is in the lesson itself, or "P1" for a project. kind: "gap" for
    missing lines, "function" for a whole function, "hunt" for a program to repair, "record" or
    "project". form: how the answer is called, "broadcast(tensor, src)". praise: what is said of a
    right answer. grade: runs the answer in one case, and returns if it is right. cases: each is a
    number of ranks or other arguments of `grade`. names: of the parts to which the cases belong.
    others: names of parts that `Grader.fail` may get. on_failure: the mistake behind runs that
    fail, or one for each error with which they do: its name, or names by words that the ranks'
    errors have. collectives: whether the answer may call collectives.
    """

    number: str
    kind: str
    form: str
    praise: str
    grade: Callable[..., None]
    cases: Sequence[Any]
    names: Sequence[str]
    others: Sequence[str]
    on_failure: str | Mapping[type[Exception], Reason]
    collectives: bool

    @property
    def title(self) -> str:
        return f"exercise {self.number}"

    @property
    def parts(self) -> list[str]:
        """The names of its parts, each of which is worth a point."""
        return list(dict.fromkeys([*self.names, *self.others]))

    @property
    def alone(self) -> bool:
        """Whether an answer is always tried on one rank; then no message names a rank."""
        sizes = [case[0] if isinstance(case, tuple) else case for case in self.cases]
        several = any(isinstance(size, int) and size > 1 for size in sizes)
        return self.kind in ("gap", "function") and not several

    def grader(self, *args: Any) -> Grader:
        """Return what grades an answer. args: those of Grader after the first."""
        return Grader(self, *args)

    def check(self, answer: Callable[..., Any], step: int | None) -> Credit:
        """Grade an answer, and raise at the first mistake. step: of the hint; None for the next."""
        steps = Steps(self.number, step)
        grader = self.grader(answer, steps)
        for number in range(len(self.cases)):
            grader.try_case(number)
        steps.passed()
        grader.parts |= dict.fromkeys(self.others, True)
        return grader.passed()

    def credit(self, answer: Callable[..., Any], seconds: float) -> Credit:
        """Grade an answer, and go on after a mistake with the parts that have not failed yet.

        seconds: for all runs together.
        """
        wrong: dict[str, str] = {}
        steps = Steps(self.number, PLACE, is_last=True)
        try:
            grader = self.grader(answer, steps, wrong, time.monotonic() + seconds)
        except ExerciseError as error:
            return Credit({}, {"": str(error)})
        for number, name in enumerate(self.names):
            try:
                if name not in wrong:
                    with recording(self.number):  # which takes the hint
                        grader.try_case(number)
            except ExerciseError as error:
                wrong.setdefault(name, str(error))
            except NotImplementedError as error:
                wrong |= dict.fromkeys(self.parts, f"NotImplementedError: {error}")
                break
        if not wrong:
            grader.passed()
        parts = {name: name not in wrong for name in self.names}
        right = all(parts.values())
        parts |= {part: right and part not in wrong for part in self.others}
        return Credit(parts, wrong)


def exercise(
    number: str,
    form: str,
    right: str = "",
    *,
    kind: str = "gap",
    cases: Iterable[Any] = SIZES,
    part: Callable[[Any], str] | None = None,
    others: Sequence[str] = (),
    on_failure: str | Mapping[type[Exception], Reason] = "",
    collectives: bool = True,
    where: str = "on 1, 2, 3, 4 and 5 ranks",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register how an answer is graded in one case, as `kit.check.exercise_4_1`.

    where, right: in which cases, and in which way, a right answer is right, for the line that says
    so. part: returns the name of the part to which a case belongs; without it, cases are numbers of
    ranks, the first of which is a part, and all others are one. For the others, see Exercise.
    """
    cases = list(cases)
    names = list(map(part or by_size(cases), cases))
    praise = f"right {where}, {right}" if right else f"right {where}"
    known = (cases, names, others, on_failure, collectives)

    def add(grade: Callable[..., None]) -> Callable[..., None]:
        about = f"Grade `{form}`, which should be {praise}."
        register(Exercise(number, kind, form, praise, grade, *known), about)
        return grade

    return add


def name_of(number: str) -> str:
    """Return the name of a check: "4.1" has exercise_4_1, and "P1" project_1."""
    kind = "project" if number[0] == "P" else "exercise"
    return f"{kind}_{number.removeprefix('P').replace('.', '_')}"


def register(task: Any, about: str, check: Callable[..., Credit] | None = None) -> None:
    """Add the check of an exercise or of an estimate. about: the first line of its docstring."""

    def with_hint(answer: Any, *, hint: int | None = None) -> Credit:
        return task.check(answer, hint)

    check = check or with_hint
    check.__name__ = check.__qualname__ = name_of(task.number)
    answer = task.form.partition("(")[0] if isinstance(task, Exercise) else "number"
    check.__doc__ = (
        f"{about}\n\n"
        "hint: what is said of a mistake: 1 only what is wrong, 2 also a question, 3 where to\n"
        f"look{', 4 a solution' * (task.kind != 'project')}. Without it, each check that finds\n"
        "this mistake says one more, up to 3.\n\n"
        "Raises ExerciseError if it is not right yet, NotImplementedError for the stub."
    )
    check.exercise = task  # type: ignore[attr-defined]
    example = f"kit.check.{check.__name__}({answer})"
    EXERCISES[check.__name__] = recorded(explaining_arguments(example, ExerciseError)(check))


class Grader:
    """Grades one answer: runs it case by case, and fails with a message that helps.

    Each case belongs to a part of the exercise, which holds if no case of it fails. Other parts
    are about answers that are right otherwise, such as the number of messages: they hold if all
    cases pass and no `fail(..., part=...)` names them.

    answer: the learner's function or class. case: the latest one, for messages. steps: what is
    said of a mistake. wrong: where to note, by part, what is wrong with parts of answers that are
    right otherwise; None to raise it. end: of all runs, by time.monotonic().

    Raises ExerciseError if the answer cannot be called in the form that is asked for.
    """

    def __init__(
        self,
        exercise: Exercise,
        answer: Callable[..., Any],
        steps: Steps,
        wrong: dict[str, str] | None = None,
        end: float | None = None,
    ) -> None:
        self.exercise, self.form, self.answer = exercise, exercise.form, answer
        self._steps = steps
        self.parts = dict.fromkeys(exercise.parts, False)  # whether each is known to hold
        self._wrong, self._end = wrong, end
        self._result: Result | None = None  # of the latest run
        self.case = ""
        self._printed: list[str] = []  # the output of each run
        self.check_form()

    def check_form(self) -> None:
        answer, check = self.answer, f"kit.check.{name_of(self.exercise.number)}"
        name, _, parameters = self.form.rstrip(")").partition("(")
        if not callable(answer):
            got = "None" if answer is None else f"a value of type {type(answer).__name__}"
            self.refuse(f"{check}({name}) expects your function or class itself; got {got}")
        with suppress(ValueError):  # some built-in callables have no signature
            signature = inspect.signature(answer)
            try:
                signature.bind(*filter(None, parameters.split(", ")))
            except TypeError:
                given = f"{getattr(answer, '__name__', 'yours')}{signature}"
                self.refuse(
                    f"your answer must accept the call {self.form}, but it is defined as {given}"
                )

    def try_case(self, number: int) -> None:
        """Grade the answer in one case, and note if its part holds."""
        case, names = self.exercise.cases[number], self.exercise.names
        self.exercise.grade(self, *case if isinstance(case, tuple) else (case,))
        self.parts[names[number]] = names[number] not in names[number + 1 :]

    @property
    def result(self) -> Result:
        assert self._result is not None, "there has been a run"
        return self._result

    def run(
        self,
        worker: Callable[..., Any],
        *args: Any,
        world_size: int,
        case: str | None = None,
        failed: Callable[[Exception], str] | None = None,
    ) -> Result:
        """Call `worker(rank, world_size, answer, *args)` on every rank.

        case: the call in this run, for messages, if it is more specific than the form. failed:
        returns the mistake behind an error, or "" to look into the exercise's `on_failure`.

        Raises NotImplementedError for a stub, ExerciseError if the run fails or calls a collective
        that it may not call, PoolError if the answer cannot be sent to the ranks, and BackendError
        if gloo is unavailable.
        """
        ranks = "" if self.exercise.alone else f" on {count(world_size, 'rank')}"
        self.case, self._result = f"{case or self.form}{ranks}", None
        printed = io.StringIO()
        timeout = TIMEOUT if self._end is None else self._end - time.monotonic()
        if timeout <= 0:
            self.fail("there was no time left for it")
        try:
            with redirect_stdout(printed):
                self._result = run(
                    filled,
                    worker,
                    self.answer,
                    *args,
                    world_size=world_size,
                    backend="gloo",  # the tensors are on the CPU
                    timeout=timeout,
                )
        except tuple(FAILURES) as error:
            self._printed.append(printed.getvalue())
            _raise_if_stub(error, self.exercise.number)
            reason = self.exercise.on_failure
            reason = reason if isinstance(reason, str) else reason.get(type(error), "")
            if not isinstance(reason, str):
                reason = next((name for words, name in reason.items() if words in str(error)), "")
            hint = failed(error) if failed else ""
            hint = hint or reason
            hint = hint or next((n for words, n in MISTAKES.items() if words in str(error)), "")
            fact = FAILURES[type(error)]
            if line := _line_of_check(error):
                fact += f" where the check uses it: {line}"
            self.fail(fact, hint=hint, error=error)
        except BaseException:
            print(printed.getvalue(), end="")
            raise
        self._printed.append(printed.getvalue())
        self._check_waits()
        for members in () if self.exercise.collectives else self.result.trace.collectives:
            self.fail(f"{next(iter(members.values())).op} was called", hint="collective")
        return self.result

    def call(self, given: Sequence[tuple], case: str | None = None) -> list[Any]:
        """Call the answer on ranks with these arguments, a tuple each; return what they return."""
        return list(self.run(_call, given, world_size=len(given), case=case))

    def ask(self, *arguments: Any) -> Any:
        """Return what the answer returns for these arguments on one rank."""
        return self.call([arguments], called_with(self.form.partition("(")[0], arguments))[0]

    def compare(
        self,
        wanted: Sequence[Any],
        found: Iterable[Any],
        hints: str | Mistakes,
        verb: str = "hold",
        place: str = "",
    ) -> None:
        """Fail unless each rank's value is what it should be.

        wanted, found: a value for each rank. verb: "hold" or "return". place: where the value
        is, for the message, as in " in weight.grad".
        """
        found = list(found)
        wrong = [
            f"{'it' if self.exercise.alone else f'rank {rank}'} should {verb} "
            f"{format_value(want)}{place} "
            f"but {verb}s {format_value(have, against=want)}"
            for rank, (want, have) in enumerate(zip(wanted, found, strict=True))
            if not same(want, have)
        ]
        if wrong:
            self.fail("wrong result", *wrong, hint=_hint_for(found, hints))

    def check_sent(self, most: int, hint: str) -> None:
        """Fail if a rank sent more bytes, by whatever calls."""
        for rank in range(len(self.result)):
            sent = sum(row.sent for row in self.result.trace.summary(rank=rank).rows)
            self.check_at_most(f" by rank {rank}", round(sent), most, "byte", hint)

    def check_at_most(self, by: str, sent: int, most: int, noun: str, hint: str) -> None:
        """Fail if more was sent than is needed. by: " by rank 2", or "" for all ranks."""
        if sent > most:
            were = "was" if sent == 1 else "were"
            sent_by = f"{count(sent, noun)} {were} sent{by}"
            fact = f"right, but {sent_by} where {most:,} would be enough"
            self.fail(fact, hint=hint, part=SENT if SENT in self.parts else "")

    def fail(
        self,
        fact: str,
        *details: str,
        hint: str = "",
        error: Exception | None = None,
        part: str = "",
    ) -> None:
        """Show what the ranks printed in the latest run, and raise ExerciseError.

        hint: the name of the mistake in the .ini files, "" if it is not known. part: what does not
        hold, if not the part to which the case belongs. `credit` then goes on with this case: only
        with a part, this returns.
        """
        assert not part or part in self.parts, part
        if part and self._wrong is not None and part in self._wrong:
            return
        if self._printed:
            _show(self._printed[-1])
        lines = [f"{self.exercise.title}, {self.case}: {fact}", *details]
        wrong = ExerciseError(
            "\n".join(lines),
            error,
            getattr(error or self._result, "trace", None),
            Credit(self.parts),
        )
        wrong.hint = "\n".join(self._steps.of(hint or ("an error" if error else "")))
        wrong.mistake = find(self.exercise.number, hint).mistake if hint else ""
        if part and self._wrong is not None:
            self._wrong[part] = str(wrong)
            return
        raise wrong from error

    def passed(self) -> Credit:
        """Show what the ranks printed in the first run, and print that the answer is right."""
        for printed in self._printed[:1]:
            _show(printed)
        title = self.exercise.title
        print(f"{title[0].upper()}{title[1:]}: {self.exercise.praise}.")
        return Credit(self.parts)

    def _check_waits(self) -> None:
        left = {
            Wait(event.rank, event.call, event.where)
            for event in self.result.trace
            if event.waited is None and event.end is None and event.op not in ("send", "recv")
        }
        unawaited = format_unawaited(left)
        warning = "\n".join([*unawaited, ""])
        # The run has printed this warning already, unless others look after these operations.
        if left and self._printed[-1].endswith(warning):
            self._printed[-1] = self._printed[-1].removesuffix(warning)
            self.fail("some operations were started but never waited for", *unawaited)

    def refuse(self, reason: str) -> NoReturn:
        """Raise ExerciseError for an answer that cannot be tried."""
        raise ExerciseError(f"{self.exercise.title}: {reason}")


def _show(printed: str) -> None:
    """Print what an answer has printed, without the middle if it is long."""
    half = _MOST_PRINTED // 2
    left_out = len(printed) - _MOST_PRINTED
    if left_out > 0:
        middle = f"\n[{left_out:,} characters left out]\n"
        printed = f"{printed[:half]}{middle}{printed[-half:]}"
    print(printed, end="")


def _raise_if_stub(error: Exception, number: str) -> None:
    """Raise NotImplementedError if a rank reached the missing lines of this exercise."""
    for failure in getattr(error, "failures", {}).values():
        # nbgrader's stubs have no message.
        named = not failure.message or failure.message.startswith(f"Exercise {number}")
        if named and failure.type == "NotImplementedError":  # PyTorch raises that type, too
            raise only_message(NotImplementedError(failure.message)) from None


def _line_of_check(error: Exception) -> str:
    """Return the check's line that raised where no line of the answer did; "" if one did."""
    frames = [frame for one in getattr(error, "failures", {}).values() for frame in one.frames]
    lines = [frame.source for frame in frames if Path(frame.file).parent == Path(__file__).parent]
    return "" if any(frame.own for frame in frames) or not lines else lines[-1].partition("  #")[0]


def only_message(error: E) -> E:
    """Return an error of which a notebook shows the message, and not the kit's internals."""
    # IPython calls this.
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


def called_with(name: str, given: Iterable[Any]) -> str:
    """Return a call as text, with few digits."""
    shown = (f"{each:g}" if isinstance(each, float) else repr(each) for each in given)
    return f"{name}({', '.join(shown)})"


def by_size(sizes: Sequence[int], noun: str = "rank") -> Callable[[int], str]:
    """Return the names of two parts: the first number of ranks, and all others."""
    first, *others = dict.fromkeys(sizes)
    if not others:
        return lambda size: f"on {count(first, noun)}"
    rest = f"on {name_counts(sorted(others))} {noun}s"
    return lambda size: f"on {count(first, noun)}" if size == first else rest


def name_counts(numbers: Sequence[int]) -> str:
    """Return numbers as "1, 2 and 5"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def brought(world_size: int, *shape: int) -> list[torch.Tensor]:
    """Return the tensor each rank starts with: rank 2 has 30, 31, 32... Sums are exact."""
    counted = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return [(10 * (rank + 1) + counted).float() for rank in range(world_size)]


def drawn(world_size: int, *shape: int) -> list[torch.Tensor]:
    """Return a tensor for each rank, of numbers that no answer can know. Sums are exact."""
    return list(torch.randint(1, 1 << 16, (world_size, *shape), generator=unknown()).float())


def unknown() -> torch.Generator:
    """Return a generator whose numbers differ each time."""
    generator = torch.Generator()
    generator.seed()
    return generator


def filled(rank: int, world_size: int, worker: Callable, *args: Any) -> Any:
    """Call a worker while `torch.empty` gives NaN, so that no answer is right by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return worker(rank, world_size, *args)
    finally:
        torch.use_deterministic_algorithms(before)


def _call(rank: int, world_size: int, answer: Callable, given: Sequence[tuple]) -> Any:
    return answer(*given[rank])


def in_place(
    rank: int, world_size: int, answer: Callable, held: list[torch.Tensor], *args: Any
) -> torch.Tensor:
    """Call an answer that changes this rank's tensor, and return that tensor."""
    tensor = held[rank].clone()
    answer(tensor, *args)
    return tensor


class EndlessError(BaseException):
    """Stops an answer that would go on forever; no `except Exception` catches it."""


def ended(call: Callable, *args: Any, errors: tuple = (OSError, RuntimeError)) -> Any:
    """Return what a call returns, or the name of its error if it is one of these."""
    try:
        return call(*args)
    except NotImplementedError:  # of the stub
        raise
    except EndlessError:
        return "goes on forever"
    except errors as error:
        return type(error).__name__


def only(own: slice, tensors: Iterable[torch.Tensor], fill: float) -> list[torch.Tensor]:
    """Return copies of tensors in which all rows but a rank's own are filled with a number."""
    copies = []
    for tensor in tensors:
        copies.append(torch.full_like(tensor, fill))
        copies[-1][own] = tensor[own]
    return copies


def own_group(rank: int, world_size: int) -> dist.ProcessGroup:
    """Return a group of this rank alone. All ranks must call this."""
    return [dist.new_group([member]) for member in range(world_size)][rank]


def open_store(folder: Path, world_size: int) -> dist.Store:
    """Return the store of all ranks in a folder, which must outlive it."""
    store = dist.FileStore(f"{folder}/store", world_size)
    store.set_timeout(STORE_LIMIT)
    return store


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """Yield a new folder, the same on all ranks of this host."""
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    try:
        yield Path(name[0])
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(name[0], ignore_errors=True)


def _hint_for(found: list[Any], hints: str | Mistakes) -> str:
    """Return the name of the first of these mistakes that gives what was found, or ""."""
    if isinstance(hints, str):
        return hints
    made = (hint for hint, wrong in hints.items() if wrong is True or same(wrong, found))
    return next(made, "")


def same(want: Any, have: Any) -> bool:
    """Return whether two values are equal, including tensors and lists of them, up to rounding."""
    if isinstance(want, torch.Tensor):
        alike = isinstance(have, torch.Tensor) and have.shape == want.shape
        return (
            alike
            and have.dtype == want.dtype
            and torch.allclose(have, want, rtol=1e-5, equal_nan=True)
        )
    if isinstance(want, dict):
        alike = isinstance(have, dict) and have.keys() == want.keys()
        return alike and all(same(value, have[key]) for key, value in want.items())
    if isinstance(want, list | tuple):
        alike = type(have) is type(want) and len(have) == len(want)
        return alike and all(map(same, want, have))
    if isinstance(want, float):
        return isinstance(have, float) and math.isclose(want, have, rel_tol=1e-5)
    return type(want) is type(have) and want == have


def format_value(value: Any, against: Any = None) -> str:
    """Return a value in one line; if it is long, with the first number or word that differs."""
    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        alike = isinstance(against, list) and len(against) == len(value)
        others = against if alike else [None] * len(value)
        return f"[{', '.join(map(format_value, value, others))}]"
    if isinstance(value, str) and " " in value:
        return _format_words(value.split(), against.split() if isinstance(against, str) else [])
    if isinstance(value, float) and not isinstance(against, int):
        return f"{value:,.6g}"
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    numbers = [f"{number:g}" for number in value.flatten().tolist()]
    few = len(numbers) <= _MOST_SHOWN
    text = f"[{', '.join(numbers if few else [*numbers[:_MOST_SHOWN], '...'])}]"
    text = text if value.dim() else numbers[0]
    if not isinstance(against, torch.Tensor):
        return text if against is None else f"a tensor of {text}"
    if (against.dtype, against.shape) != (value.dtype, value.shape):
        return f"{text} ({_kind(value)} instead of {_kind(against)})"
    if few:
        return text
    place = int((~torch.isclose(value, against)).flatten().nonzero()[0])
    should = against.flatten()[place].item()
    return f"{text}, where number {place} is {numbers[place]} instead of {should:g}"


def _format_words(words: list[str], against: list[str]) -> str:
    """Return words in one line; of many, the first ones, and the first that differs."""
    if len(words) <= 2 * _MOST_SHOWN:
        return repr(" ".join(words))
    text = repr(" ".join([*words[:_MOST_SHOWN], "..."]))
    for place, pair in enumerate(zip(words, against, strict=False)):
        if pair[0] != pair[1]:
            return f"{text}, where number {place} is {pair[0]} instead of {pair[1]}"
    return f"{text}, {len(words)} instead of {len(against)}" if against else text


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# --- partial credit ------------------------------------------------------------------------


class Credit(float):
    """The share of an exercise's parts that hold, 0.0 to 1.0.

    parts: whether each of them holds, by name. wrong: what is wrong, by the part that it is in.
    """

    parts: dict[str, bool]
    wrong: dict[str, str]
    picture: Any = None  # of the answer to a record

    def __new__(cls, parts: Mapping[str, bool], wrong: Mapping[str, str] | None = None) -> Credit:
        credit = super().__new__(cls, sum(parts.values()) / max(1, len(parts)))
        credit.parts, credit.wrong = dict(parts), dict(wrong or {})
        return credit

    def __getnewargs__(self) -> tuple:
        return self.parts, self.wrong

    def _ipython_display_(self) -> None:
        """Show the picture, or nothing: a check that passes has printed its line."""
        if self.picture is not None:
            from IPython.display import display  # which calls this method, so it is there

            display(self.picture)


@recorded
def credit(check: Any, answer: Any) -> Credit:
    """Try every part of an exercise, print what is wrong, and return which parts hold.

    check: such as `kit.check.exercise_4_1`, which raises at the first mistake instead. Parts about
    right answers, such as the number of messages, hold only if all results are right. A stub and
    an answer that cannot be called have 0. The environment variable DDP_KIT_CHECK_SECONDS limits
    the time for all runs together, 20 s by default; a part for which no time is left does not hold.

    Raises PoolError if the answer cannot be sent to the ranks or these do not start, BackendError
    if gloo is unavailable, and ExerciseError if that variable is not a number above 0.
    """
    limit = _limit()
    # nbgrader gives no points to a cell that writes to stderr, as matplotlib does where it is new.
    with redirect_stderr(sys.stdout):
        found = check.exercise.credit(answer, limit)
    if found < 1:
        parts = [f"{'yes' if holds else 'no':4}{part}" for part, holds in found.parts.items()]
        print(*dict.fromkeys(found.wrong.values()), *parts, sep="\n")
    return found


def _limit() -> float:
    text = os.environ.get("DDP_KIT_CHECK_SECONDS", str(SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise ExerciseError(f"DDP_KIT_CHECK_SECONDS must be a number above 0, got {text!r}")
    return seconds
