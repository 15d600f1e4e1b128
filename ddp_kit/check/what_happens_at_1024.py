"""Graders of lesson 12: costs of an all_reduce, a rate with warm-up, memory of a rank, MFU.

Most answers are arithmetic. They run on one rank, where they are bounded as all answers are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_kit import model
from ddp_kit.check.compared import Used, alone, as_float, asked, compared
from ddp_kit.check.grader import Grader, called_with
from ddp_kit.check.record import Score, Span, record
from ddp_kit.errors import ModelError
from ddp_kit.model.transformer import LLAMA_70B
from ddp_kit.trace import Trace

STAGES = "stages 1 and 2 of ZeRO"
GIGABYTE = 10**9
SIZES = (8, 2, 1024, 1, 6, 1000)
# First the messages in a row alone, then the bytes in a row, then both.
PRICES = ((1.0, 0.0), (0.0, 1.0), (20e-6, 1 / 5e9))
NAMES = ("of the ring", "of halving-doubling")


def _mistake_in_cost(name: str, n: int, nbytes: float, alpha: float, beta: float) -> str:
    if alpha and beta:
        return "price left out"
    if name == NAMES[0]:
        return "once round" if alpha else "whole tensors"
    if n & (n - 1):
        return "others left out"
    return "one way only" if alpha else "whole swaps"


@compared(
    "12.1",
    "two_costs(n, nbytes, alpha, beta)",
    sizes=(1,),
    where="for 1, 2, 6, 8, 1,000 and 1,024 ranks",
    cases=[(1, name, n, 4000.0, *price) for price in PRICES for n in SIZES for name in NAMES],
    part=lambda case: f"the seconds {case[1]}",
    call=lambda _, name, *given: called_with("two_costs", given),
    otherwise=lambda _, *case: _mistake_in_cost(*case),
)
def _two_costs(rank: int, _: int, two_costs: Callable, name: str, *given: float) -> dict:
    found = two_costs(*given)
    if not isinstance(found, tuple | list) or len(found) != 2:
        return found
    return {f"the seconds {name}": as_float(found[NAMES.index(name)])}


MISTAKES = {  # of a learning rate, by what is asked
    (5000, 8192, 1000): "not scaled",
    (5000, 64, 1000): "small batch",
    (0, 8192, 1000): "wrong beginning",
    (500, 8192, 1000): "uneven steps",
    (999, 8192, 1000): "too early",
    (1000, 8192, 1000): "grows on",
    (250, 512, 2000): "uneven steps",
    (500, 64, 1000): "small batch",
    (700, 256, 1000): "nothing to scale",
    (0, 8192, 0): "no warm-up",
}

asked(
    "12.2",
    "learning_rate(step, batch, warmup)",
    MISTAKES,
    lambda step, batch, warmup: f"{'during' if step < warmup else 'after'} the warm-up",
    where="in the first step, during the warm-up and after it",
    otherwise=lambda _, *given: MISTAKES[given],
)
asked(
    "12.3",
    "ranks_needed(parameters, memory, stage)",
    [
        *((6.7e9, 30.0 * GIGABYTE, stage) for stage in (3, 2, 1, 0)),
        *((6.7e9, 20.0 * GIGABYTE, 1), (5e9, 20.0 * GIGABYTE, 1)),  # the last has no room left
        *((70e9, 80.0 * GIGABYTE, 3), (1e9, 80.0 * GIGABYTE, 0)),
    ],
    lambda _, memory, stage: {0: "DDP", 3: "stage 3 of ZeRO"}.get(stage, STAGES),
    where="for DDP and the three stages of ZeRO",
)
UTILIZATIONS = {  # by what is asked: its part, and the mistake in it
    (3200.0, 1, 6.7e9, 32, 4096, 0, 312e12): ("without attention", "wrong operations"),
    (3200.0, 1, 6.7e9, 40, 4096, 2048, 312e12): ("with attention", "no attention"),
    (25600.0, 8, 6.7e9, 32, 4096, 4096, 312e12): ("on 8 GPUs", "one peak"),
}
asked(
    "12.4",
    "mfu(tokens_per_second, gpus, parameters, layers, width, length, peak)",
    UTILIZATIONS,
    lambda *given: UTILIZATIONS[given][0],
    where="with and without attention, on 1 and 8 GPUs",
    otherwise=lambda _, *given: UTILIZATIONS[given][1],
)


def _own(rank: int) -> torch.Tensor:
    return torch.arange(7.0) + 10.0**rank


@compared("12.a", "tree(tensor)", sizes=(3, 6), collectives=False)
def _tree(rank: int, world_size: int, tree: Callable) -> torch.Tensor:
    tensor = _own(rank)
    tree(tensor)
    return tensor


def _to_other_hosts(trace: Trace, world_size: int, per_host: int) -> list[Used]:
    sent = [0] * world_size
    for message in trace.messages():
        sent[message.src] += message.nbytes * (message.src // per_host != message.dst // per_host)
    return [Used(f"rank {rank} sent {{}} to other hosts", each) for rank, each in enumerate(sent)]


@compared(
    "12.b",
    "two_level(tensor, per_host)",
    sizes=(4, 6),
    cases=[(4, 2), (6, 2), (6, 3)],  # ranks, and how many of them a host has
    part=lambda case: f"on {case[0]} ranks",
    spare=1.0,
    used=_to_other_hosts,
    call=lambda ranks, per_host: f"two_level(tensor, {per_host})",
    collectives=False,
)
def _two_level(rank: int, world_size: int, two_level: Callable, per_host: int) -> torch.Tensor:
    tensor = torch.arange(12.0) + 10.0**rank
    two_level(tensor, per_host)
    return tensor


STEPS = {  # ranks, buckets, forward, backward, bytes per second
    "with one bucket": (8, [100.0], 1.0, 2.0, 200.0),
    "with four buckets on a fast network": (8, [10.0, 30.0, 40.0, 20.0], 1.0, 2.0, 100.0),
    "with four buckets on a slow network": (15, [10.0, 30.0, 40.0, 20.0], 1.0, 3.0, 40.0),
    "on a network that costs nothing": (8, [10.0, 30.0, 40.0, 20.0], 1.0, 2.0, 1e300),
}


@alone("12.c", "step(n, buckets, forward, backward, cost)")
def _step(step: Callable) -> dict[str, float]:
    def seconds(
        ranks: int, buckets: list[float], forward: float, backward: float, speed: float
    ) -> float:
        return step(ranks, buckets, forward, backward, lambda n, size: (n - 1) / 7 * size / speed)

    found = {}
    for name, each in STEPS.items():
        cost = f"lambda n, size: (n - 1) / 7 * size / {each[-1]:g}"
        found[f"{called_with('step', each[:-1])[:-1]}, {cost}), {name}"] = as_float(seconds(*each))
    return found


FAILURES = {  # their moments, in a training of 20 steps of 10 s, with a save every 4 of 3 s
    "without failures": [],
    "with a failure in a step": [97.0],
    "with a failure in the first step": [4.0],
    "with a failure in a save": [84.5],
    "with a failure in a restart": [97.0, 101.0],
    "with many failures": [31.0, 84.0, 86.0, 95.5, 211.0, 218.5, 300.25, 301.75, 390.5],
}


@alone("12.10", "goodput(steps, seconds, every, save, restart, failures)", kind="function")
def _goodput(goodput: Callable) -> dict[str, float]:
    cases = {name: (20, 10.0, 4, 3.0, 5.5, failures) for name, failures in FAILURES.items()}
    cases["with other steps"] = 22, 7.0, 5, 2.0, 4.0, [31.0]
    return {
        f"{called_with('goodput', given)}, {name}": as_float(goodput(*given[:-1], list(given[-1])))
        for name, given in cases.items()
    }


CLUSTER, GPUS = model.DGX_H100, 1024
# By its name, a model and the sequences of a step.
TRAININGS = {
    "Llama 3 70B": (LLAMA_70B, 1024),
    "GPT-3 175B": (model.Transformer(96, 12_288, 96, 51_200, 2048), 2048),
}


@record(
    "12.11",
    "choose_plan(transformer, cluster, gpus, batch)",
    "s",
    (21.5, 18.8, 17.2),
    along="seconds",
    rows=list(TRAININGS),
)
def _choose_plan(grader: Grader) -> Score:
    now, spans = 0.0, []
    for row, (name, (transformer, batch)) in enumerate(TRAININGS.items()):
        given = (transformer, CLUSTER, GPUS, batch)
        plan = grader.call([given], f"choose_plan(...) for {name} with {batch:,} sequences")[0]
        for part, seconds in _checked_step(grader, transformer, batch, plan).items():
            if seconds:
                spans.append(Span(row, now, now + seconds, part))
                now += seconds
    return Score(now, spans)


def _checked_step(
    grader: Grader, transformer: model.Transformer, batch: int, plan: object
) -> dict[str, float]:
    """Return the seconds of a step by part; fail if there is no such plan, or it does not fit."""
    if not isinstance(plan, model.Plan):
        grader.fail(f"it returns {plan!r}, and not a model.Plan", hint="no plan")
    if plan.ranks != GPUS:
        grader.fail(f"{plan} has {plan.ranks:,} ranks, and not {GPUS:,}", hint="other ranks")
    if plan.batch != batch:
        fact = f"{plan} has {plan.batch:,} sequences in a step, and not {batch:,}"
        grader.fail(fact, hint="other batch")
    try:
        seconds, held = model.step(transformer, plan, CLUSTER), model.memory(transformer, plan)
    except ModelError as error:
        grader.fail(f"{plan} cannot be carried out: {error}", hint="cannot be shared so")
    needed, room = sum(held.values()) / 1e9, 0.9 * CLUSTER.accelerator.memory / 1e9
    if needed > room:
        fact = f"{plan} needs {needed:,.1f} GB on a rank, and {room:,.1f} GB may be used"
        grader.fail(fact, hint="too much memory")
    return seconds
