"""Graders of lesson 15: a step of ZeRO's stage 1, the gradients of own rows, and bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_kit.check.grader import SENT, SIZES, Credit, Grader, brought, same
from ddp_kit.check.what_happens_at_1024 import ask, close, expect
from ddp_kit.errors import DeadlockError, MismatchError, RankError

SHAPES = ((2, 3), (4,), (1, 2), (3,), (2,))  # of parameters: at least one for each rank
SECOND, STATES = "the second step", "no more states than needed"
STEPS = 2  # the second one needs the states of the first
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
CASES = ((2, 4), (2, 5), (3, 5), (1, 5), (4, 5), (5, 5))  # ranks, rows
KINDS = ("Adam's states", "the gradients", "the parameters")
BYTES = (8, 4, 4)  # of each kind, for one parameter; stage s shards the first s of them
ROUNDS = (2, 3, 2, 3)  # how many times each stage sends (n-1)/n of a tensor for each parameter

_SAME_CALLS = (
    "All ranks must call the same broadcasts in the same order: go through all parameters on every "
    "rank. `src` is the owner of the parameter, whichever rank calls."
)
_FILL_UP = (
    "reduce_scatter needs parts of equal shape: append rows of zeros, so that every rank has "
    "`rows` of them."
)
_SENT = (
    "DDP sends an all_reduce of the gradients, which counts twice.",
    "Stage 1 sends DDP's all_reduce, which counts twice, and broadcasts of all parameters.",
    "Stage 2 sends a reduce_scatter of the gradients, and an all_gather of the parameters.",
    "Stage 3 gathers the parameters before the forward and again before the backward, and "
    "reduces and scatters the gradients.",
)


def exercise_15_1(make_step: Callable[[dict, Callable], Callable[[], Any]]) -> Credit:
    """Grade `make_step(owners, optimizer_cls)`, which returns stage 1's step, on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints = {MismatchError: _SAME_CALLS, DeadlockError: _SAME_CALLS}
    grader = Grader("15.1", "make_step(owners, optimizer_cls)", make_step, hints, collectives=True)
    start, wanted = [p.detach() for p in _parameters()], _alone(SGD)
    for n in grader.each(SIZES, SECOND, STATES):
        result = grader.run(_take_steps, world_size=n)
        for step, want in enumerate(wanted):
            found = [held[step] for held, _ in result]
            hint = _hint_for_step(start, wanted, found) if step == 0 else _hint_for_states(found)
            for number, parameter in enumerate(want):
                grader.compare(
                    [parameter] * n,
                    [held[number] for held in found],
                    hint,
                    place=f" in parameter {number} after step {step + 1}",
                    part=SECOND if step else "",
                )
        for rank, (_, states) in enumerate(result):
            own = [p.numel() for p, owner in zip(start, _owners(n), strict=True) if owner == rank]
            if states > sum(own):
                grader.fail(
                    f"right, but rank {rank} keeps {states} numbers as the optimizer's states "
                    f"where {sum(own)} would be enough",
                    part=STATES,
                    hint="Give the optimizer only the parameters that this rank owns.",
                )
    return grader.passed(
        "right on 1, 2, 3, 4 and 5 ranks, and each keeps the states of its own share"
    )


def exercise_15_2(own_gradient: Callable[[torch.Tensor], Any]) -> Credit:
    """Grade `own_gradient(gradient)`, the mean of this rank's rows, on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints = {RankError: _hint_for_shapes, MismatchError: _FILL_UP}
    grader = Grader("15.2", "own_gradient(gradient)", own_gradient, hints, collectives=True)
    for n, length in grader.each(CASES, SENT, part=_divides):
        gradients = brought(n, length, 2)
        rows = -(-length // n)
        case = f"own_gradient(gradient of {length} rows)"
        result = grader.run(_call, gradients, world_size=n, case=case)
        mean = sum(gradients) / n
        wanted = [mean[rank * rows : (rank + 1) * rows] for rank in range(n)]
        hint = _hint_for_rows(gradients, wanted, list(result))
        grader.compare(wanted, result, hint, verb="return")
        sent = sum(row.sent for row in result.trace.summary(rank=0).rows)
        enough = (n - 1) * rows * 2 * 4
        hint = (
            "Each rank needs its own rows of the sum only: reduce_scatter adds up and deals out. "
            "An all_reduce sends twice as much."
        )
        grader.check_at_most(" by rank 0", sent, enough, "byte", hint)
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, also where the rows do not divide")


def exercise_15_4(held_and_sent: Callable[[int, int, int], Any]) -> Credit:
    """Grade `held_and_sent(stage, parameters, n)`: the bytes of a rank; stage 0 is DDP.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("15.4", "held_and_sent(stage, parameters, n)", held_and_sent)
    calls = [(stage, 1000, n) for n in (8, 1, 64) for stage in (0, 1, 2, 3)]
    cases = [(call, what) for call in calls for what in ("bytes held", "bytes sent")]
    for call, what in grader.each(cases, part=lambda case: case[1]):
        found = ask(grader, call)
        stage, parameters, n = call
        if not isinstance(found, tuple | list) or len(found) != 2:
            grader.fail(f"it returns {found!r}", hint="Return both: `return held, sent`.")
        if what == "bytes held":
            shares = [n if kind < stage else 1 for kind in range(len(BYTES))]
            held = sum(b * parameters / share for b, share in zip(BYTES, shares, strict=True))
            hint = _hint_for_held(stage, parameters, n, found)
            expect(grader, held, found[0], hint, f" {what}")
        else:
            sent = ROUNDS[stage] * (n - 1) / n * 4 * parameters
            hint = _hint_for_sent(stage, sent, n, found[1])
            expect(grader, sent, found[1], hint, f" {what}")
    return grader.passed("right for DDP and the three stages, on 1, 8 and 64 ranks")


def _divides(case: tuple[int, int]) -> str:
    n, length = case
    return "rows that do not divide" if length % n else "rows that divide by the ranks"


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in _tensors(1.0)]


def _tensors(factor: float) -> list[torch.Tensor]:
    """Return a tensor of each shape; no two numbers of one tensor are the same."""
    return [
        factor * (10 * number + torch.arange(1.0, torch.Size(shape).numel() + 1)).view(shape)
        for number, shape in enumerate(SHAPES)
    ]


def _owners(n: int) -> list[int]:
    """Return the rank of each parameter, the last ranks first."""
    return [n - 1 - number % n for number in range(len(SHAPES))]


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Set the mean gradients of a step, the same on all ranks."""
    for parameter, gradient in zip(parameters, _tensors(0.25 * (step + 1)), strict=True):
        parameter.grad = gradient


def _alone(optimizer_cls: Callable, forget: bool = False) -> list[list[torch.Tensor]]:
    """Return all parameters after each step of one process.

    forget: make the optimizer anew before each step.
    """
    parameters, held = _parameters(), []
    optimizer = optimizer_cls(parameters)
    for step in range(STEPS):
        optimizer = optimizer_cls(parameters) if forget else optimizer
        _give_gradients(parameters, step)
        optimizer.step()
        held.append([parameter.detach().clone() for parameter in parameters])
    return held


def _take_steps(
    rank: int, world_size: int, make_step: Callable
) -> tuple[list[list[torch.Tensor]], int]:
    """Return this rank's parameters after each step, and how many numbers its states have."""
    parameters, held, made = _parameters(), [], []

    def optimizer_cls(params: Any) -> torch.optim.Optimizer:
        made.append(SGD(params))
        return made[-1]

    step_once = make_step(dict(zip(parameters, _owners(world_size), strict=True)), optimizer_cls)
    for step in range(STEPS):
        _give_gradients(parameters, step)
        step_once()
        held.append([parameter.detach().clone() for parameter in parameters])
    states = [state for optimizer in made for state in optimizer.state.values()]
    return held, sum(value.numel() for state in states for value in state.values())


def _hint_for_step(start: list, wanted: list, found: list[list[torch.Tensor]]) -> str:
    n, after = len(found), wanted[0]
    owners, both = _owners(n), partial(zip, strict=True)

    def hold(updates: Callable[[int], list[bool]]) -> bool:
        """Return whether each rank has updated the parameters that it would by a mistake."""
        return all(
            same([new if done else old for old, new, done in both(start, after, updates(r))], held)
            for r, held in enumerate(found)
        )

    if hold(lambda rank: [False] * len(start)):
        return "Nothing has changed: call the optimizer's step()."
    if hold(lambda rank: [owner == rank for owner in owners]):
        return (
            "Each rank has updated its own parameters and lacks the others': after the "
            "optimizer's step, broadcast each parameter from its owner."
        )
    if hold(lambda rank: [owner == 0 for owner in owners]):
        return (
            "All ranks have what rank 0 has, which has updated its own parameters only. Each "
            "parameter comes from its owner: src=owners[parameter]."
        )
    summed = [(n - 1) * old + new for old, new in zip(start, after, strict=True)]
    if all(same(summed, held) for held in found):
        return "That is the sum over the ranks. A broadcast copies what the owner has."
    return (
        "Let the optimizer update this rank's own parameters, with the gradients as they are: "
        "they are means already. Then broadcast each parameter from its owner."
    )


def _hint_for_states(found: list[list[torch.Tensor]]) -> str:
    if all(same(_alone(SGD, forget=True)[1], held) for held in found):
        return (
            "The second step began without the states of the first one. Make the optimizer once, "
            "before `def step`."
        )
    return "The first step is right. The second needs the same optimizer, with its states."


def _call(rank: int, world_size: int, answer: Callable, held: list[torch.Tensor]) -> Any:
    return answer(held[rank].clone())


def _hint_for_shapes(error: RankError) -> str:
    words = ("size", "shape", "tensor")
    return _FILL_UP if any(word in str(error).lower() for word in words) else ""


def _hint_for_rows(gradients: list, wanted: list, found: list) -> str:
    n, length = len(gradients), len(gradients[0])
    rows = -(-length // n)
    total = sum(gradients)

    def hold(values: Callable[[int], torch.Tensor]) -> bool:
        return all(same(values(rank), have) for rank, have in enumerate(found))

    if hold(lambda rank: own_rows(total, rank, n)):
        return "That is the sum over the ranks: divide by the number of ranks."
    if hold(lambda rank: own_rows(total, rank, n) / n**2):
        return "That is divided by the number of ranks twice."
    if hold(lambda rank: total / rows / n) or hold(lambda rank: own_rows(total, rank, n) / rows):
        return "Divide by the number of ranks, not of rows."
    if hold(lambda rank: own_rows(gradients[rank], rank, n)) or hold(
        lambda rank: own_rows(gradients[rank], rank, n) / n
    ):
        return "Those are rows of this rank's own gradient: add up over the ranks, too."
    if hold(lambda rank: total / n):
        return "That is the whole mean on every rank. Each should return its own rows."
    filled = torch.cat([total / n, total.new_zeros(n * rows - length, 2)])
    if hold(lambda rank: filled[rank * rows : (rank + 1) * rows]):
        return (
            "The rows of zeros that fill up the last parts are no rows of the gradient: cut them "
            "off before you return."
        )
    if all(_in(have, total / n) or _in(have, total) for have in found):
        return (
            f"These are rows, but not the right ones. Rank r has {rows} of them, from row {rows}r "
            "on, and the last ranks may have fewer."
        )
    return (
        "Fill up with zeros, divide by the number of ranks, pass this to reduce_scatter, and "
        "return the rows that are not filled up."
    )


def _in(have: Any, whole: torch.Tensor) -> bool:
    """Return whether each row of a tensor is somewhere in the whole, or zero."""
    if not isinstance(have, torch.Tensor) or have.shape[1:] != whole.shape[1:]:
        return False
    return all(not row.any() or any(map(partial(same, row), whole)) for row in have)


def own_rows(whole: torch.Tensor, rank: int, n: int) -> torch.Tensor:
    """Return the rows of a tensor that a rank has; the last ranks may have fewer, or none."""
    rows = -(-len(whole) // n)
    return whole[rank * rows : (rank + 1) * rows]


def _hint_for_held(stage: int, parameters: int, n: int, found: Any) -> str:
    if close(16 * parameters, found[0]) and stage:
        return f"That is all of it. Stage {stage} shards {', '.join(KINDS[:stage])}: divide by n."
    if close(16 * parameters / n, found[0]) and stage < 3:
        kept = ", ".join(KINDS[stage:])
        return f"Not everything is sharded: in stage {stage}, every rank keeps {kept}."
    if close(16 / 4 * parameters, found[0]) and stage == 0:
        return "That counts numbers, and float32 has 4 bytes."
    return (
        "Adam needs 8 bytes for each parameter; the gradient and the parameter take 4 each. Stage "
        f"{stage} divides {', '.join(KINDS[:stage]) or 'nothing'} by n."
    )


def _hint_for_sent(stage: int, sent: float, n: int, found: Any) -> str:
    if close(sent / 4, found):
        return "That counts numbers, and float32 has 4 bytes."
    if n > 1 and close(sent * n / (n - 1), found):
        return "A rank sends (n-1)/n of a tensor in a ring: its own part stays where it is."
    if n > 1 and close(sent * n, found):
        return "A rank sends (n-1)/n of a tensor in a ring, not n-1 times the tensor."
    return _SENT[stage]
