"""The milestones of project 2, and what it gives: a model, a limit that is enforced, and a link.

The program under check trains a GPT in float64 on 8 ranks. `MemoryLimit` counts the bytes of every
tensor that it makes, and raises as soon as they are too many. The time of a step is never measured:
`replay` takes the calls of a run from its trace, and lets each of them last as long as on `LINK`.
"""

from __future__ import annotations

import math
import os
import runpy
import weakref
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit import model
from ddp_kit.check.grader import only_message
from ddp_kit.check.project import ProgramGrader, project
from ddp_kit.errors import ModelError, RankError
from ddp_kit.model import Accelerator, Cluster, Link, Plan, Precision, Transformer
from ddp_kit.trace import Event, Trace
from ddp_kit.trace.collectives import bytes_sent

RANKS = 8
BATCH = 8  # sequences of a step, of all ranks together
STEPS = 3
MODEL = Transformer(4, 32, 4, 128, 128, tied=False, linear_bias=False)
FLOAT64 = Precision(8, 8, 16, 8)  # with Adam
LIMIT = 2_500_000  # bytes of all tensors that a rank may hold at any moment
LINK = Link(alpha=3e-3, beta=1e-6)  # 3 ms for a message, and 1 MB/s: the link of a rank
# Computing takes no time beside such a link.
CLUSTER = Cluster(Accelerator(LIMIT, 1e30, 1e30), per_host=1, inside=LINK, between=LINK)

ROOM = 0.8  # of the limit: `model.memory` does not count temporary tensors
SLOWER = 1.1  # times the seconds of the fastest plan that fits
LOSSES = (4.858523188674917, 4.791008808984107, 4.724579976484591)  # of one process
CLOSE = 1e-12  # more than rounding explains, less than any mistake makes
SMALL = 1e-6  # less than all mistakes make but rounding to float32
SENT, TIME = 0.01, 0.04  # how far off predictions may be
MESSAGE = "message"


class MemoryLimit(TorchDispatchMode):
    """Raises MemoryError when the tensors that were made inside it hold more than `most` bytes.

    What several tensors share counts once. rank: for the message. peak: the most bytes so far.
    """

    def __init__(self, most: float, rank: int = 0) -> None:
        super().__init__()
        self.most, self.rank, self.held, self.peak = most, rank, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__name__ == "DTensor" for one in types):
            return NotImplemented  # then the tensors that it consists of come here
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # not one without data
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = id(storage), storage.nbytes()
        if place in self._known:
            return
        self._known.add(place)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._remove, place, nbytes)
        if self.held > self.most:
            raise MemoryError(
                f"rank {self.rank} would hold {self.held:,} bytes of tensors, and its limit is "
                f"{self.most:,}"
            )

    def _remove(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self.held -= nbytes


class Replay(NamedTuple):
    """When each rank is done, and for how many of these seconds it sends, on a modelled link."""

    done: list[float]
    busy: list[float]


def replay(trace: Trace, link: Link) -> Replay:
    """Return how long a run takes if computing takes no time, and each call as long as on `link`.

    A rank makes one call after the other: at its wait, if it has one. A message occupies its sender
    for alpha + bytes * beta, and is there when that is over. A collective begins when all its ranks
    are there, and lasts for 2(n-1) messages if it is an all_reduce and n-1 if it is another one,
    and for the bytes of the rank that sends most.
    """
    senders = {_key(each.recv): _key(each.send) for each in trace.messages() if each.recv}
    members = {_key(one): [*each.values()] for each in trace.collectives for one in each.values()}
    calls = {_key(event): event for event in sorted(trace, key=_when) if event.op != "new_group"}
    before: dict[tuple[int, int], tuple[int, int] | None] = {}
    last: list[tuple[int, int] | None] = [None] * trace.world_size
    for key in calls:
        before[key], last[key[0]] = last[key[0]], key

    def lasts(event: Event) -> float:
        if event.kind == "collective":
            together = members[_key(event)]
            messages = (2 if "all_reduce" in event.op else 1) * (len(together) - 1)
            return messages * link.alpha + max(map(bytes_sent, together)) * link.beta
        return link.alpha + event.nbytes * link.beta if event.kind == "send" else 0.0

    @cache
    def done(key: tuple[int, int]) -> float:
        needed = [before[_key(one)] for one in members.get(key, [calls[key]])]
        needed.append(senders.get(key))
        return max((done(each) for each in needed if each), default=0.0) + lasts(calls[key])

    found = Replay([0.0] * trace.world_size, [0.0] * trace.world_size)
    try:
        for (rank, _), event in calls.items():
            found.done[rank] = done(_key(event))
            found.busy[rank] += lasts(event)
    except RecursionError:
        raise ModelError("the calls of this run cannot be replayed in their order") from None
    return found


def _own(trace: Trace, rank: int) -> Iterator[Event]:
    return (event for event in trace if event.rank == rank)


def _key(event: Event) -> tuple[int, int]:
    return event.rank, event.index


def _when(event: Event) -> int:
    return event.start if event.kind == "send" or event.waited is None else event.waited


def fitting() -> dict[tuple[int, int, int, int], float]:
    """Return the seconds of a step of each plan that fits, by dp, tp, pp and micro_batch."""
    found = {}
    for dp, tp, pp, size in product((1, 2, 4, 8), repeat=4):
        if dp * tp * pp == RANKS and BATCH % (dp * size) == 0:
            many = BATCH // dp // size
            plan = Plan(dp, 0, tp, pp, 1, many, size, sequence_parallel=False)
            try:
                if held(plan) <= ROOM * LIMIT:
                    found[dp, tp, pp, size] = seconds(plan)
            except ModelError:  # the model cannot be shared so
                continue
    return found


def held(plan: Plan) -> float:
    """Return the bytes of the rank that holds most, by the formula."""
    return sum(model.memory(MODEL, plan, FLOAT64).values())


def seconds(plan: Plan) -> float:
    """Return how long a step takes on the link, by the formula."""
    return sum(model.step(MODEL, plan, CLUSTER, FLOAT64).values())


class Runs(NamedTuple):
    """What two trainings did: with one step, and with STEPS.

    losses: of each rank. peaks: the most bytes that each rank held.
    """

    losses: list[Any]
    peaks: list[int]
    one: Trace
    all: Trace

    def per_step(self, value: Callable[[Trace], float]) -> float:
        """Return a value of a step: what steps add after the first, in which much is set up."""
        return (value(self.all) - value(self.one)) / (STEPS - 1)


class PlanGrader(ProgramGrader):
    """Grades a program by what it defines."""

    def check_form(self) -> None:
        super().check_form()
        self._name = Path(self.answer).name
        self.program = self._loaded(os.fspath(self.answer))
        self.answer = self.program["train"]

    def _loaded(self, path: str) -> dict[str, Any]:
        try:
            found = runpy.run_path(path, run_name="project_2")
        except Exception as error:
            self.refuse(f"{path} cannot be loaded: {type(error).__name__}: {error}")
        for name in ("PLAN", "train", "sent", "seconds"):
            if name not in found:
                self.refuse(f"{path} should define {name}, as the start does")
        return found

    @property
    def plan(self) -> Plan:
        return self.program["PLAN"]

    def fail(self, fact: str, *details: str, error: Exception | None = None, **about: Any) -> None:
        """Raise ExerciseError; of ranks that are over the limit, one is enough."""
        for _, failure in sorted(getattr(error, "failures", {}).items()):
            if failure.type == "MemoryError":
                fact, details, error = failure.message, (), None
                own = [one for one in failure.frames if Path(one.file).name == self._name]
                details = (f"    {own[-1]}",) if own else ()
                break
        super().fail(fact, *details, error=error, **about)

    @cached_property
    def runs(self) -> Runs:
        """Two trainings under the limit."""
        one, whole = (self._trained(steps) for steps in (1, STEPS))
        return Runs(*(list(each) for each in zip(*whole, strict=True)), one.trace, whole.trace)

    def _trained(self, steps: int) -> Any:
        case = f"train(rank, world_size, {steps})"
        result = self.run(_train, steps, world_size=RANKS, case=case, failed=_why)
        if any(result.trace.dropped):
            self.fail("it makes more calls than a trace keeps", hint="too many calls")
        return result

    def predicted(self, name: str, *arguments: Any) -> float:
        """Return a prediction of the program. Raises NotImplementedError for the stub."""
        self.case = f"{name}({', '.join(map(str, arguments))})"
        try:
            found = self.program[name](*arguments)
        except NotImplementedError as error:
            raise only_message(error) from None
        except Exception as error:
            self.fail(f"it raised {type(error).__name__}: {error}")
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.fail(f"it should return a number, and returns {found!r}")
        return found


def _train(rank: int, world_size: int, train: Callable, steps: int) -> tuple[Any, int]:
    with MemoryLimit(LIMIT, rank) as memory:
        losses = train(rank, world_size, steps)
    return losses, memory.peak


def _why(error: Exception) -> str:
    over = {
        rank
        for rank, failure in getattr(error, "failures", {}).items()
        if failure.type == "MemoryError"
    }
    if not over or not isinstance(error, RankError):
        return ""
    for rank in over:
        calls = [event for event in _own(error.trace, rank) if event.op != "new_group"]
        if not calls:
            return "whole at first"
        directions = [event.kind for event in calls if event.kind != "collective"]
        if len(directions) > 1 and len(set(directions)) == 1:  # forwards only
            return "all forwards first"
    return "over the limit"


def _fits(grader: PlanGrader) -> None:
    plan = grader.plan
    grader.case = "PLAN"
    if not isinstance(plan, Plan):
        grader.fail(f"it should be a kit.model.Plan, and is {plan!r}", hint="no such plan")
    if (plan.ranks, plan.batch) != (RANKS, BATCH):
        shared = f"it is for {plan.ranks} ranks and {plan.batch} sequences"
        grader.fail(f"{shared}, where there are {RANKS} and {BATCH}", hint="no such plan")
    if plan != Plan(
        plan.dp, 0, plan.tp, plan.pp, 1, plan.micro_batches, plan.micro_batch,
        sequence_parallel=False,
    ):  # fmt: skip
        only = "it should have dp, tp, pp, micro_batches and micro_batch, sequence_parallel=False,"
        grader.fail(f"{only} and nothing else; it is {plan!r}", hint="no such plan")
    try:
        needed, takes = held(plan), seconds(plan)
    except ModelError as error:
        grader.fail(str(error), hint="no such plan")
    if needed > ROOM * LIMIT:
        most = f"of {LIMIT:,} at most {ROOM * LIMIT:,.0f} should be planned"
        grader.fail(f"{plan} needs {needed:,.0f} bytes, and {most}", hint="does not fit")
    best = min(fitting().values())
    if takes > SLOWER * best:
        fact = f"{plan} fits, but takes {takes:.2f} s for a step, where another plan"
        grader.fail(f"{fact} that fits takes {best:.2f} s", hint="slow")
    print(f"{plan}: {needed:,.0f} bytes, {takes:.2f} s a step, by the formulas.")


def _trains(grader: PlanGrader) -> None:
    peaks = grader.runs.peaks
    # In float64: each parameter, its gradient, and the two states of Adam.
    if sum(peaks) < 4 * 8 * MODEL.parameters:
        fact = f"together the ranks hold {sum(peaks):,} bytes, less than the model and Adam need"
        grader.fail(fact, hint="no training")
    print(f"A rank holds at most {max(peaks):,} of {LIMIT:,} bytes.")


def _equals(grader: PlanGrader) -> None:
    known = {rank: one for rank, one in enumerate(grader.runs.losses) if one}
    if not known:
        grader.fail("no rank returned losses", hint="no losses")
    for rank, losses in known.items():
        numbers = isinstance(losses, list) and all(isinstance(one, float) for one in losses)
        if not numbers or len(losses) != STEPS:
            want = f"rank {rank} should return a list of {STEPS} floats, or []"
            grader.fail(f"{want}; it returns {losses!r}", hint="no losses")
        errors = [abs(want - have) for want, have in zip(LOSSES, losses, strict=True)]
        wrong = [step for step, error in enumerate(errors) if not error <= CLOSE]
        for step in wrong[:1]:
            fact = f"step {step} should have the loss {LOSSES[step]:.14f}, as one process has"
            mistake = "other gradient" if step else "other loss"
            if all(error <= SMALL for error in errors):
                mistake = "float32"
            grader.fail(f"{fact}, but has {losses[step]:.14f} on rank {rank}", hint=mistake)


def _predicts_bytes(grader: PlanGrader) -> None:
    runs = grader.runs
    wanted = [runs.per_step(lambda trace, r=rank: _sent(trace, r)) for rank in range(RANKS)]
    found = [grader.predicted("sent", rank) for rank in range(RANKS)]
    for rank, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if abs(want - have) > SENT * want:
            grader.case = f"sent({rank})"
            fact = f"{want:,.0f} bytes travelled in a step, and {have:,.0f} were predicted"
            grader.fail(fact, hint=_wrong_bytes(runs, rank, have, found))
    print(f"In a step, a rank sends {min(wanted):,.0f} to {max(wanted):,.0f} bytes.")


def _wrong_bytes(runs: Runs, rank: int, have: float, found: list[float]) -> str:
    kinds = {
        kind: runs.per_step(lambda trace, kind=kind: _sent(trace, rank, kind))
        for kind in {_kind(event) for event in _own(runs.all, rank)}
    }
    total = sum(kinds.values())
    more = {kind: (len(kind) - 1) * each for kind, each in kinds.items() if kind != MESSAGE}

    def close(*numbers: float) -> bool:
        return any(math.isclose(have, number, rel_tol=SENT) for number in numbers)

    if close(*(total - each for each in kinds.values() if each)):
        return "one dimension left out"
    if close(total + sum(more.values()), *(total + each for each in more.values() if each)):
        return "whole tensor in each round"
    return "all ranks alike" if rank and len(set(found)) == 1 else "other bytes"


def _kind(event: Event) -> Any:
    return event.group.ranks if event.kind == "collective" else MESSAGE


def _sent(trace: Trace, rank: int, kind: Any = None) -> float:
    events = (event for event in _own(trace, rank) if kind in (None, _kind(event)))
    return sum(map(bytes_sent, events))


def _predicts_time(grader: PlanGrader) -> None:
    want = grader.runs.per_step(lambda trace: max(replay(trace, LINK).done))
    have = grader.predicted("seconds")
    if abs(want - have) > TIME * want:
        fact = f"the calls of a step take {want:.3f} s on the link, and {have:.3f} were predicted"
        grader.fail(fact, hint=_wrong_time(grader.runs, have))
    print(f"On the link, a step takes {want:.3f} s, and {have:.3f} were predicted.")


def _wrong_time(runs: Runs, have: float) -> str:
    free = Link(0, LINK.beta)
    times = {
        "no bubble": runs.per_step(lambda trace: max(replay(trace, LINK).busy)),
        "no latency": runs.per_step(lambda trace: max(replay(trace, free).done)),
        "neither": runs.per_step(lambda trace: max(replay(trace, free).busy)),
    }
    near = min(times, key=lambda name: abs(times[name] - have))
    if math.isclose(times[near], have, rel_tol=0.03):
        return "no bubble" if near == "neither" else near
    return "other time"


project(
    "P2",
    "program",
    {
        "a plan that fits and is fast": _fits,
        "trains under the limit": _trains,
        "losses as on one process": _equals,
        "predicts the bytes that travel": _predicts_bytes,
        "predicts the time of a step": _predicts_time,
    },
    graded_by=PlanGrader,
)
