"""Graders of lesson 12: costs of an all_reduce, a rate with warm-up, memory of a rank, MFU.

These answers are arithmetic. They run on one rank, where they are bounded as all answers are.
"""

from __future__ import annotations

import math

from ddp_kit import model
from ddp_kit.check.grader import Grader, exercise

RATE, REFERENCE = 0.1, 256  # a learning rate, and the global batch that it is for
SHARDED = (16, 4, 2, 0)  # bytes of a parameter that every rank holds, by the stage of ZeRO
GIGABYTE = 10**9
SIZES = (8, 2, 1024, 1, 6, 1000)
# First the messages in a row alone, then the bytes in a row, then both.
PRICES = ((1.0, 0.0), (0.0, 1.0), (20e-6, 1 / 5e9))
NAMES = ("of the ring", "of halving-doubling")


@exercise(
    "12.1",
    "two_costs(n, nbytes, alpha, beta)",
    where="for 1, 2, 6, 8, 1,000 and 1,024 ranks",
    cases=[((n, 4000.0, *price), name) for price in PRICES for n in SIZES for name in NAMES],
    part=lambda case: f"the seconds {case[1]}",
)
def _two_costs(grader: Grader, call: tuple, name: str) -> None:
    found = grader.ask(*call)
    if not isinstance(found, tuple | list) or len(found) != 2:
        grader.fail(f"it returns {found!r}", hint="one time only")
    wanted = model.chunked_ring(*call), model.halving_doubling(*call)
    place, mistake = NAMES.index(name), _mistake_in_cost(*call, name)
    grader.expect(wanted[place], found[place], mistake, f" for the seconds {name}")


def _mistake_in_cost(n: int, nbytes: float, alpha: float, beta: float, name: str) -> str:
    if alpha and beta:
        return "price left out"
    if name == NAMES[0]:
        return "once round" if alpha else "whole tensors"
    if n & (n - 1):
        return "others left out"
    return "one way only" if alpha else "whole swaps"


@exercise(
    "12.2",
    "learning_rate(step, batch, warmup)",
    where="in the first step, during the warm-up and after it",
    cases=[
        (5000, 8192, 1000, "not scaled"),
        (5000, 64, 1000, "small batch"),
        (0, 8192, 1000, "wrong beginning"),
        (500, 8192, 1000, "uneven steps"),
        (999, 8192, 1000, "too early"),
        (1000, 8192, 1000, "grows on"),
        (250, 512, 1000, "uneven steps"),
        (700, 256, 1000, "nothing to scale"),
        (0, 8192, 0, "no warm-up"),
    ],
    part=lambda case: "during the warm-up" if case[0] < case[2] else "after the warm-up",
)
def _learning_rate(grader: Grader, step: int, batch: int, warmup: int, mistake: str) -> None:
    found = grader.ask(step, batch, warmup)
    whole = RATE * batch / REFERENCE
    warming = RATE + (whole - RATE) * step / max(1, warmup)
    want = warming if step < warmup else whole
    grader.expect(want, found, {"grows on": step > warmup and warming, mistake: True})


@exercise(
    "12.3",
    "ranks_needed(parameters, memory, stage)",
    where="for DDP and the three stages of ZeRO",
    cases=[
        *((6.7e9, 30.0 * GIGABYTE, stage) for stage in (3, 2, 1, 0)),
        *((6.7e9, 20.0 * GIGABYTE, 1), (70e9, 80.0 * GIGABYTE, 3), (1e9, 80.0 * GIGABYTE, 0)),
    ],
    part=lambda case: {0: "DDP", 3: "stage 3 of ZeRO"}.get(case[2], "stages 1 and 2 of ZeRO"),
)
def _ranks_needed(grader: Grader, parameters: float, memory: float, stage: int) -> None:
    found = grader.ask(parameters, memory, stage)
    kept = SHARDED[stage]
    room = memory / parameters - kept
    exact = (16 - kept) / room if room > 0 else math.inf
    want = max(1, math.ceil(exact)) if room > 0 else None
    if want is None or found is None:
        if found is not want:
            fact = f"it should return {want} but returns {found!r}"
            grader.fail(fact, hint="never fits" if want is None else "none though it fits")
        return
    mistakes = {
        "stage 0 divided": stage == 0,
        "not rounded up": found in (exact, math.floor(exact), round(exact)),
        "wrong bytes": True,
    }
    grader.expect(want, found, mistakes)


@exercise(
    "12.4",
    "mfu(tokens_per_second, gpus, parameters, layers, width, length, peak)",
    where="with and without attention, on 1 and 8 GPUs",
    cases=[
        ("without attention", (3200.0, 1, 6.7e9, 32, 4096, 0, 312e12), "wrong operations"),
        ("with attention", (3200.0, 1, 6.7e9, 32, 4096, 4096, 312e12), "no attention"),
        ("on 8 GPUs", (25600.0, 8, 6.7e9, 32, 4096, 4096, 312e12), "one peak"),
    ],
    part=lambda case: case[0],
)
def _mfu(grader: Grader, part: str, call: tuple, mistake: str) -> None:
    found = grader.ask(*call)
    tokens, gpus, parameters, layers, width, length, peak = call
    want = (6 * parameters + 12 * layers * width * length) * tokens / (gpus * peak)
    grader.expect(want, found, {"percentage": 100 * want, mistake: True})
