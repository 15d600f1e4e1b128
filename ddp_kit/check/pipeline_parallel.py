"""Graders of lesson 17: two orders, a backward that computes its forward again, a bubble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import Grader, by_size, exercise, hint_for, same
from ddp_kit.errors import DeadlockError, RankError

CASES = ((3, 4), (2, 3), (1, 2), (4, 8), (4, 2))  # ranks and micro-batches
INTERLEAVED = ((2, 2, 4), (3, 2, 6), (1, 2, 2), (4, 3, 8), (4, 2, 4))  # ranks, stages, as above
BUBBLES = ((4, 0.1), (8, 0.1), (4, 0.25), (2, 0.05), (16, 0.5), (5, 0.3), (2, 0.3), (1, 0.1))
WIDTH, SEQUENCES = 3, 2


def _micro_batches_of(case: tuple[int, int]) -> str:
    p, m = case
    return f"{'fewer' if m < p else 'no fewer'} micro-batches than ranks"


@exercise(
    "17.1",
    "one_f_one_b(rank, p, m)",
    "also with fewer micro-batches than ranks",
    where="on 1, 2, 3 and 4 ranks",
    cases=CASES,
    part=_micro_batches_of,
)
def _one_f_one_b(grader: Grader, p: int, m: int) -> None:
    given = [(rank, p, m) for rank in range(p)]
    found = list(map(_text, grader.call(given, f"one_f_one_b(rank, {p}, {m})")))
    warm_ups = [p - rank - 1 for rank in range(p)]
    mistakes = {
        "all forwards first": [_order(m, m)] * p,
        "one forward too many": [_order(w + 1, m) for w in warm_ups],
        "one forward too few": [_order(w - 1, m) for w in warm_ups],
        "backward before forward": [_order(w, m, ("B", "F")) for w in warm_ups],
        "wrong end": [_order(w, m) for w in reversed(warm_ups)],
        "steps missing": _short(found, 2 * m),
        "other order": True,
    }
    wanted = [_order(w, m) for w in warm_ups]
    grader.compare(wanted, found, mistakes, verb="return", place=' (B3: ("B", 3))')


def _text(order: Any) -> Any:
    """Return an order as "F0 F1 B0 B1", or with stages as "0F0 2F0", or as it is if it is none."""
    try:
        return " ".join(f"{''.join(map(str, stage))}{kind}{int(i)}" for kind, i, *stage in order)
    except (TypeError, ValueError):
        return order


def _short(found: list, length: int) -> bool:
    return any(len(str(order).split()) < length for order in found)


def _order(warm_up: int, m: int, pair: tuple[str, str] = ("F", "B")) -> str:
    """Return 1F1B after so many forwards, with each pair of the middle in this order."""
    warm_up = max(0, min(warm_up, m))
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(m - warm_up):
        number = {"F": warm_up + i, "B": i}
        order += [f"{kind}{number[kind]}" for kind in pair]
    return " ".join([*order, *(f"B{i}" for i in range(m - warm_up, m))])


RAISED = {
    "does not require grad": "no graph",
    "implicitly created only for scalar": "no gradient passed",
    "NoneType": "nothing to send",
    "torch.Tensor": "nothing to send",
}


def _mistake_that_raised(error: RankError) -> str:
    said = " ".join(failure.message for failure in error.failures.values())
    return next((name for words, name in RAISED.items() if words in said), "")


@exercise(
    "17.2",
    "backward(stage, x, target, m)",
    where="on 1, 2, 3 and 4 ranks",
    on_failure={RankError: _mistake_that_raised, DeadlockError: "not sent"},
    collectives=False,
    cases=((2, 2), (3, 4), (1, 2), (4, 3)),  # ranks and micro-batches
    part=lambda case: by_size([2, 3, 1, 4])(case[0]),
)
def _backward(grader: Grader, p: int, m: int) -> None:
    found = list(grader.run(_train, m, world_size=p, case=f"backward(stage, x, target, {m})"))
    wanted = _alone(p, m)
    mistakes = {
        "not divided": _scaled(wanted, [m] * p),
        "divided on every rank": _scaled(wanted, [m ** -(p - 1.0 - rank) for rank in range(p)]),
        "gradients cleared": _scaled(_alone(p, m, first=m - 1), [1 / m] * p),
        "no backward": not any(gradient.any() for of in found for gradient in of),
        "wrong gradient sent": p > 1 and same(wanted[-1], found[-1]),
        "other loss": True,
    }
    grader.compare(wanted, found, mistakes, place=" in the gradients of its stage")


def _stage(rank: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def _data(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of m micro-batches."""
    numbers = torch.arange(2.0 * m * SEQUENCES * WIDTH).sin()
    inputs, targets = numbers.view(2, m, SEQUENCES, WIDTH)
    return inputs, targets


def _train(rank: int, world_size: int, backward: Callable, m: int) -> list[torch.Tensor]:
    """Run GPipe: the forwards keep the inputs, and the answer does each backward."""
    stage, kept = _stage(rank), []
    inputs, targets = _data(m)
    for x in inputs:
        x = x.clone()
        if rank > 0:
            dist.recv(x, src=rank - 1)
        kept.append(x)
        with torch.no_grad():
            y = stage(x)
        if rank < world_size - 1:
            dist.send(y, dst=rank + 1)
    for x, target in zip(kept, targets, strict=True):
        backward(stage, x, target, m)
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in stage.parameters()]


def _alone(p: int, m: int, first: int = 0) -> list[list[torch.Tensor]]:
    """Return the gradients of each stage, computed in one process.

    first: the micro-batches before this one are left out.
    """
    stages = [_stage(rank) for rank in range(p)]
    inputs, targets = (each[first:] for each in _data(m))
    (nn.Sequential(*stages)(inputs) - targets).square().mean().backward()
    return [[q.grad for q in stage.parameters()] for stage in stages]


def _scaled(stages: list[list[torch.Tensor]], factors: list) -> list[list[torch.Tensor]]:
    pairs = zip(stages, factors, strict=True)
    return [[factor * gradient for gradient in of] for of, factor in pairs]


def _rounding(case: tuple[int, float]) -> str:
    p, most = case
    exact = (p - 1) / most - (p - 1)
    needed = p == 1 or abs(exact - round(exact)) > 1e-9
    return "rounded up, and one rank" if needed else "where nothing is rounded"


@exercise(
    "17.3", "micro_batches(p, most)", where="for 1 to 16 ranks", cases=BUBBLES, part=_rounding
)
def _micro_batches(grader: Grader, p: int, most: float) -> None:
    (found,) = grader.call([(p, most)], f"micro_batches({p}, {most:g}), called")
    want = _fewest(lambda m: (p - 1) / (m + p - 1), most)
    mistakes = {
        "one rank": p == 1,
        "idle by busy time": _fewest(lambda m: (p - 1) / m, most),
        "p ranks": _fewest(lambda m: p / (m + p), most),
        "one too many": want + 1,
        "one too few": want - 1,
        "no whole number": isinstance(found, float),
        "other number": True,
    }
    if not isinstance(found, int | float) or isinstance(found, bool) or found != want:
        fact = f"it should return {want} but returns {found!r}"
        grader.fail(fact, hint=hint_for(found, mistakes))


def _fewest(bubble: Callable[[int], float], most: float) -> int:
    return next(m for m in range(1, 10_000) if bubble(m) <= most + 1e-12)


def _ranks(case: tuple[int, int, int]) -> str:
    return by_size([p for p, *_ in INTERLEAVED])(case[0])


@exercise(
    "17.4",
    "interleaved(rank, p, v, m)",
    "with 2 and 3 stages each",
    where="on 1, 2, 3 and 4 ranks",
    cases=INTERLEAVED,
    part=_ranks,
)
def _interleaved(grader: Grader, p: int, v: int, m: int) -> None:
    given = [(rank, p, v, m) for rank in range(p)]
    found = list(map(_text, grader.call(given, f"interleaved(rank, {p}, {v}, {m})")))

    def orders(**wrong: int) -> list[str]:
        return [interleaved_order(rank, p, v, m, **wrong) for rank in range(p)]

    mistakes = {
        "same order of stages": orders(back=1),
        "one forward per rank": orders(stride=1),
        "one forward too many": orders(more=1),
        "one forward too few": orders(more=-1),
        "steps missing": _short(found, 2 * v * m),
        "other order": True,
    }
    grader.compare(orders(), found, mistakes, verb="return", place=' (2B3: ("B", 3, 2))')


def interleaved_order(
    rank: int, p: int, v: int, m: int, more: int = 0, stride: int = 2, back: int = -1
) -> str:
    """Return interleaved 1F1B; `more`, `stride` and `back` can make it wrong."""
    stages = range(rank, v * p, p)
    groups = [range(first, first + p) for first in range(0, m, p)]
    forwards = [f"{stage}F{i}" for group in groups for stage in stages for i in group]
    backwards = [f"{stage}B{i}" for group in groups for stage in stages[::back] for i in group]
    warm_up = max(0, min(stride * (p - 1 - rank) + (v - 1) * p + more, v * m))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    order = [*forwards[:warm_up], *(step for pair in pairs for step in pair)]
    return " ".join([*order, *backwards[v * m - warm_up :]])


hunt("17.10")
