"""Runs a learner's answer on real ranks, and says what is wrong with it."""

from __future__ import annotations

import inspect
import io
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any, NoReturn

import torch

from ddp_kit.errors import (
    DeadlockError,
    ExerciseError,
    MismatchError,
    RankDiedError,
    RankError,
    RunTimeoutError,
)
from ddp_kit.failures import Wait, count, format_unawaited, name_ranks
from ddp_kit.pool import Result, run
from ddp_kit.trace import Event

SIZES = (2, 3, 1, 4, 5)  # most mistakes show on two or three ranks, which start first
TIMEOUT = 60.0  # seconds for one run; a deadlock is found without it
IN_PLACE = (
    "The tensor is to change in place: `a += b` and `a.copy_(b)` write into it, and `a = a + b` "
    "makes another one."
)
_MOST_SHOWN = 8  # numbers of a tensor
_FAILED: dict[type[Exception], str] = {
    RankError: "an error came up",
    DeadlockError: "it never ends",
    MismatchError: "the ranks do not agree",
    RankDiedError: "a rank died",
    RunTimeoutError: "it takes too long",
}


class Grader:
    """One exercise with one answer: runs it, case by case, and fails with what would help.

    number: of the exercise, "4.1". form: how the answer is called, "broadcast(tensor, src)".
    answer: what the learner gave, a function or a class. hints: what most often makes a run fail
    with such an error.

    Raises ExerciseError if the answer cannot be called so.
    """

    def __init__(
        self,
        number: str,
        form: str,
        answer: Callable[..., Any],
        hints: dict[type[Exception], str] | None = None,
    ) -> None:
        self.number, self.form, self.answer = number, form, answer
        self._hints = hints or {}
        self._result: Result | None = None  # of the latest run
        self._case = ""
        self._printed: list[str] = []  # what came out of each run
        check = f"kit.check.exercise_{number.replace('.', '_')}"
        name, _, parameters = form.rstrip(")").partition("(")
        if not callable(answer):
            got = "None" if answer is None else f"a value of type {type(answer).__name__}"
            self._refuse(f"{check}({name}) takes what you wrote, uncalled; got {got}")
        if not _takes(answer, [part for part in parameters.split(", ") if part]):
            given = f"{getattr(answer, '__name__', 'yours')}{inspect.signature(answer)}"
            self._refuse(f"what you write is called as {form}, and {given} cannot be")

    @property
    def result(self) -> Result:
        """What came of the latest run."""
        assert self._result is not None, "asked after a run"
        return self._result

    def run(
        self, worker: Callable[..., Any], *args: Any, world_size: int, case: str | None = None
    ) -> Result:
        """Call `worker(rank, world_size, answer, *args)` on every rank.

        case: the call in this run, for messages, where it says more than the form.

        Raises NotImplementedError for a stub, ExerciseError if the run fails, PoolError if the
        answer cannot be sent to the ranks, and BackendError if gloo is not here.
        """
        self._case, self._result = f"{case or self.form} on {count(world_size, 'rank')}", None
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                self._result = run(
                    worker,
                    self.answer,
                    *args,
                    world_size=world_size,
                    backend="gloo",  # the tensors are on the CPU
                    timeout=TIMEOUT,
                )
        except tuple(_FAILED) as error:
            self._printed.append(printed.getvalue())
            _pass_on_what_is_missing(error, self.number)
            self.fail(_FAILED[type(error)], hint=self._hints.get(type(error), ""), error=error)
        except BaseException:
            print(printed.getvalue(), end="")
            raise
        self._printed.append(printed.getvalue())
        self._all_waited_for()
        return self.result

    def compare(
        self,
        wanted: Sequence[Any],
        found: Iterable[Any],
        verb: str,
        hint: str,
        place: str = "",
    ) -> None:
        """Fail unless each rank's value is what it should be.

        wanted, found: a value for each rank. verb: "hold" or "return". place: where the value
        stands, for the message, as in " in weight.grad".
        """
        told = [
            f"rank {rank} should {verb} {say(want)}{place}, and {verb}s {say(have, against=want)}"
            for rank, (want, have) in enumerate(zip(wanted, found, strict=True))
            if not same(want, have)
        ]
        if told:
            self.fail("wrong", *told, hint=hint)

    def collectives(self) -> list[Event]:
        """Return the collectives that rank 0 has called in the latest run."""
        events = self.result.trace
        return [event for event in events if event.rank == 0 and event.kind == "collective"]

    def only_messages(self) -> None:
        """Fail if the latest run called a collective."""
        for members in self.result.trace.collectives:
            op = next(iter(members.values())).op
            self.fail(
                f"{op} was called",
                hint="This one is to be made of send and recv, or of isend and irecv.",
            )

    def sends(self, messages: int, nbytes: int, hint: str) -> None:
        """Fail if all ranks together have sent more messages or bytes than these."""
        sent = self.result.trace.messages()
        self.enough("", sum(message.nbytes for message in sent), nbytes, "byte", hint)
        self.enough("", len(sent), messages, "message", hint)

    def each_sends(self, nbytes: int, hint: str) -> None:
        """Fail if one rank has sent more bytes than these."""
        for rank in range(len(self.result)):
            sent = self.result.trace.bytes_sent(rank)
            self.enough(f" by {name_ranks([rank])}", sent, nbytes, "byte", hint)

    def enough(self, whose: str, sent: int, most: int, noun: str, hint: str) -> None:
        """Fail if more was sent than is needed. whose: " by rank 2", or "" for all ranks."""
        if sent > most:
            were = "was" if sent == 1 else "were"
            fact = f"right, but {count(sent, noun)} {were} sent{whose}, where {most:,} would do"
            self.fail(fact, hint=hint)

    def fail(
        self, fact: str, *told: str, hint: str = "", error: Exception | None = None
    ) -> NoReturn:
        """Show what the ranks printed in the latest run, and raise ExerciseError."""
        if self._printed:
            print(self._printed[-1], end="")
        lines = [f"exercise {self.number}, {self._case}: {fact}", *told]
        raise ExerciseError(
            "\n".join([*lines, hint] if hint else lines),
            error,
            getattr(error or self._result, "trace", None),
        ) from error

    def passed(self, praise: str) -> None:
        """Show what the ranks printed in the first run, and print the line of success."""
        print(self._printed[0], end="")
        print(f"Exercise {self.number}: {praise}.")

    def _all_waited_for(self) -> None:
        left = {
            Wait(event.rank, event.call, event.where)
            for event in self.result.trace
            if event.waited is None and event.end is None and event.op not in ("send", "recv")
        }
        if left:
            told = format_unawaited(left)
            # The run has said so, below what the ranks printed. Once is enough.
            self._printed[-1] = self._printed[-1].removesuffix("\n".join([*told, ""]))
            self.fail("not all that was started was waited for", *told)

    def _refuse(self, said: str) -> NoReturn:
        raise ExerciseError(f"exercise {self.number}: {said}")


def _takes(answer: Callable[..., Any], parameters: list[str]) -> bool:
    try:
        inspect.signature(answer).bind(*parameters)
    except TypeError:
        return False
    except ValueError:  # some built-in callables do not tell
        return True
    return True


def _pass_on_what_is_missing(error: Exception, number: str) -> None:
    """Raise NotImplementedError if a rank has come to the missing lines of this exercise."""
    for failure in getattr(error, "failures", {}).values():
        named = failure.message.startswith(f"Exercise {number}")
        if named and failure.type == "NotImplementedError":  # PyTorch raises that type, too
            missing = NotImplementedError(failure.message)
            # IPython calls this, and would show the kit's inside without it.
            missing._render_traceback_ = partial(_told, missing)  # type: ignore[attr-defined]
            raise missing from None


def _told(error: Exception) -> list[str]:
    return [f"{type(error).__name__}: {error}"]


def brought(world_size: int, *shape: int) -> list[torch.Tensor]:
    """Return what each rank brings: rank 2 has 30, 31, 32 and so on. Sums of them are exact."""
    counted = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return [(10 * (rank + 1) + counted).float() for rank in range(world_size)]


def in_place(
    rank: int, world_size: int, answer: Callable, held: list[torch.Tensor], *args: Any
) -> torch.Tensor:
    """Call an answer that changes this rank's tensor, and return the tensor."""
    tensor = held[rank].clone()
    answer(tensor, *args)
    return tensor


def hint_if_unchanged(held: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> str:
    """Say what most often leaves every rank with what it brought; "" if one has changed."""
    changed = not all(map(torch.equal, held, found))
    return "" if changed else f"Every rank has what it brought. {IN_PLACE}"


def same(want: Any, have: Any) -> bool:
    """Tell whether two values are equal, tensors and lists of tensors included."""
    if isinstance(want, torch.Tensor):
        alike = isinstance(have, torch.Tensor) and have.shape == want.shape
        return alike and have.dtype == want.dtype and torch.allclose(have, want, rtol=1e-5)
    if isinstance(want, list):
        alike = isinstance(have, list) and len(have) == len(want)
        return alike and all(map(same, want, have))
    return type(want) is type(have) and want == have


def say(value: Any, against: Any = None) -> str:
    """Write a value in a line; of a long tensor, the place where it first differs."""
    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        return f"[{', '.join(map(say, value))}]"
    if not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    numbers = [_number(number) for number in value.flatten().tolist()]
    few = len(numbers) <= _MOST_SHOWN
    said = f"[{', '.join(numbers if few else [*numbers[:_MOST_SHOWN], '...'])}]"
    if not isinstance(against, torch.Tensor):
        return said
    if (against.dtype, against.shape) != (value.dtype, value.shape):
        return f"{said} ({_kind(value)}, not {_kind(against)})"
    if few:
        return said
    place = int((~torch.isclose(value, against)).flatten().nonzero()[0])
    should = _number(against.flatten()[place].item())
    return f"{said}, where number {place} is {numbers[place]} and not {should}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _number(value: float) -> str:
    return f"{value:g}"
