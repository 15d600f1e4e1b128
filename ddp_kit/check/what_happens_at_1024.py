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

_TWICE = "A ring goes round twice: n-1 messages until every chunk is summed, and n-1 to spread it."
_CHUNKS = "Each message of the ring carries a chunk, 1/n of the tensor."
_LEVELS = "There are log2(core) swaps on the way down, and as many on the way back."
_HALVES = (
    "The swaps carry a half of the tensor, a quarter, and so on down to 1/core: (core-1)/core of "
    "it in all, once on the way down and once on the way back."
)
_SURPLUS = (
    "Where core < n, the other ranks send their whole tensor first, and receive the whole sum at "
    "the end: two more messages."
)


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
    n, _, alpha, beta = call
    if not isinstance(found, tuple | list) or len(found) != 2:
        grader.fail(f"it returns {found!r}", hint="Return both: `return ring, halving`.")
    surplus, place = n & (n - 1) != 0, NAMES.index(name)
    hint = (
        _TWICE if beta == 0 else _CHUNKS,
        _SURPLUS if surplus else _LEVELS if beta == 0 else _HALVES,
    )[place]
    if alpha and beta:
        hint = "A message costs alpha, and beta for each of its bytes. Add up both."
    wanted = model.chunked_ring(*call), model.halving_doubling(*call)
    grader.expect(wanted[place], found[place], hint, f" for the seconds {name}")


_RULE = f"The rule: {RATE:g} for a batch of {REFERENCE}, and k times that for k times the batch."
_BETWEEN = (
    "During the warm-up the rate grows by the same amount in each step, so after half of the "
    "steps it is half-way between the two rates."
)


@exercise(
    "12.2",
    "learning_rate(step, batch, warmup)",
    where="in the first step, during the warm-up and after it",
    cases=[
        (5000, 8192, 1000, _RULE),
        (5000, 64, 1000, f"{_RULE} That holds for k below 1, too."),
        (0, 8192, 1000, f"The warm-up begins with {RATE:g}, whatever the batch."),
        (500, 8192, 1000, _BETWEEN),
        (999, 8192, 1000, f"{_BETWEEN} Step 1000 is the first one with the whole rate."),
        (1000, 8192, 1000, "After `warmup` steps the warm-up is over, and the rate stays."),
        (250, 512, 1000, _BETWEEN),
        (700, 256, 1000, f"With a batch of {REFERENCE} there is nothing to scale."),
        (0, 8192, 0, "Without a warm-up the rate is the whole one from step 0 on."),
    ],
    part=lambda case: "during the warm-up" if case[0] < case[2] else "after the warm-up",
)
def _learning_rate(grader: Grader, step: int, batch: int, warmup: int, hint: str) -> None:
    found = grader.ask(step, batch, warmup)
    whole = RATE * batch / REFERENCE
    want = RATE + (whole - RATE) * step / warmup if step < warmup else whole
    grader.expect(want, found, hint)


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
        never = (
            "What every rank holds, 16, 4, 2 or 0 bytes of each parameter, does not get less with "
            "more ranks. If it does not fit, return None."
        )
        hint = never if want is None else "It fits: return the number of ranks."
        if found is not want:
            grader.fail(f"it should return {want} but returns {found!r}", hint=hint)
        return
    hints = {
        "The whole model fits on one rank, and DDP shards nothing: one is enough.": stage == 0,
        "Round up: with one rank less, the model does not fit.": (
            found in (exact, math.floor(exact), round(exact))
        ),
        f"Stage {stage} shards {16 - kept} of the 16 bytes of a parameter, and every rank "
        f"holds the other {kept}. So a rank has room for memory / parameters - {kept} bytes of "
        "the sharded ones.": True,
    }
    grader.expect(want, found, hints)


@exercise(
    "12.4",
    "mfu(tokens_per_second, gpus, parameters, layers, width, length, peak)",
    where="with and without attention, on 1 and 8 GPUs",
    cases=[
        (
            "without attention",
            (3200.0, 1, 6.7e9, 32, 4096, 0, 312e12),
            "With sequences of length 0 only 6P operations for each token are left: 2P forward, 4P "
            "backward.",
        ),
        (
            "with attention",
            (3200.0, 1, 6.7e9, 32, 4096, 4096, 312e12),
            "Attention adds 12 * layers * width * length operations for each token.",
        ),
        (
            "on 8 GPUs",
            (25600.0, 8, 6.7e9, 32, 4096, 4096, 312e12),
            "The tokens are those of all GPUs together, so divide by the peak of all of them.",
        ),
    ],
    part=lambda case: case[0],
)
def _mfu(grader: Grader, part: str, call: tuple, hint: str) -> None:
    found = grader.ask(*call)
    tokens, gpus, parameters, layers, width, length, peak = call
    want = (6 * parameters + 12 * layers * width * length) * tokens / (gpus * peak)
    hints = {"Return a fraction, not a percentage.": 100 * want, hint: True}
    grader.expect(want, found, hints)
