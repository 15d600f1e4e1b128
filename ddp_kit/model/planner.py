"""All plans for a number of accelerators: those that fit, fastest first, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ddp_kit.errors import ModelError
from ddp_kit.model.communication import check_count
from ddp_kit.model.hardware import Cluster
from ddp_kit.model.plan import MIXED, Plan, Precision, objection
from ddp_kit.model.plan_cost import Estimate, estimate, memory
from ddp_kit.model.transformer import Transformer

_LEAST_PART = 2_048  # tokens of a sequence that a rank should have, or its kernels are inefficient


@dataclass(frozen=True)
class Plans:
    """What `plans` found. As text: a table of the first eight, and why the others do not fit.

    fitting: estimates, the fastest first, and of equally fast ones that with the least memory.
    refused: what is in the way, such as "memory" or "heads", to plans and a sentence about each;
    those that need too much memory are sorted by how much.
    """

    gpus: int
    fitting: list[Estimate]
    refused: dict[str, list[tuple[Plan, str]]]

    def __str__(self) -> str:
        lines = [f"{self.gpus:,} GPUs: {len(self.fitting):,} plans fit"]
        if self.fitting:
            lines += ["step     MFU      memory     plan"]
        for each in self.fitting[:8]:
            cost = f"{each.seconds:<8.3g} {100 * each.mfu:4.1f} % {each.nbytes / 1e9:8.1f} GB"
            lines.append(f"{cost}   {each.plan}")
        for kind, refused in self.refused.items():
            plan, why = refused[0]
            lines.append(f"{len(refused):,} refused for {kind}; the first is {plan}: {why}")
        return "\n".join(lines)

    __repr__ = __str__


def plans(
    transformer: Transformer,
    cluster: Cluster,
    gpus: int,
    batch: int,
    precision: Precision = MIXED,
    micro_batch: Sequence[int] = (1, 2, 4),
    recompute: Sequence[str] = ("none", "selective", "full"),
    chunks: Sequence[int] = (1,),
    cp: Sequence[int] = (1,),
) -> Plans:
    """Return all plans for a number of accelerators and a batch, and which of them fit.

    gpus: all of them are used. batch: sequences in a step. micro_batch, recompute, chunks, cp:
    those to try. cp is for sequences that are too long for a rank: `step` does not know that
    kernels become less efficient when each rank has a smaller part of a sequence, so a plan that
    leaves fewer than 2,048 tokens of it to a rank is refused. A plan fits if
    its rank with most memory has at most 90 percent of an accelerator's: the rest is for what
    `memory` does not count. Raises ModelError if gpus fill more than one host, and not a whole
    number of them.
    """
    check_count("gpus", gpus)
    check_count("batch", batch)
    if gpus > cluster.per_host and gpus % cluster.per_host:
        raise ModelError(f"gpus must be a multiple of per_host={cluster.per_host}, got {gpus}")
    fitting: list[Estimate] = []
    refused: dict[str, list[tuple[Plan, str]]] = {}
    room = 0.9 * cluster.accelerator.memory
    too_large: list[tuple[float, Plan, str]] = []
    for plan in _candidates(transformer, gpus, batch, micro_batch, recompute, chunks, cp):
        problem = objection(transformer, plan)
        if problem is None and plan.batch != batch:
            shared = f"dp={plan.dp} times micro-batches of {plan.micro_batch}"
            problem = "batch", f"{shared} do not divide a batch of {batch:,} sequences"
        part = transformer.context // plan.cp
        if problem is None and plan.cp > 1 and part < _LEAST_PART:
            left = f"cp={plan.cp} leaves {part:,} tokens of a sequence to a rank"
            problem = "cp", f"{left}, fewer than {_LEAST_PART:,}"
        if problem is None:
            held = sum(memory(transformer, plan, precision).values())
            if held <= room:
                fitting.append(estimate(transformer, plan, cluster, precision))
                continue
            needed = f"{held / 1e9:,.1f} GB are needed, and {room / 1e9:,.1f} GB may be used"
            too_large.append((held, plan, needed))
            continue
        refused.setdefault(problem[0], []).append((plan, problem[1]))
    fitting.sort(key=lambda each: (each.seconds, each.nbytes))
    too_large.sort(key=lambda each: each[0])
    if too_large:
        refused["memory"] = [(plan, needed) for _, plan, needed in too_large]
    return Plans(gpus, fitting, refused)


def _candidates(
    transformer: Transformer,
    gpus: int,
    batch: int,
    micro_batch: Sequence[int],
    recompute: Sequence[str],
    chunks: Sequence[int],
    context_parallel: Sequence[int],
) -> Iterator[Plan]:
    """Yield the plans to look at: sizes that divide the number of ranks, in reasonable limits."""
    for tp in _divisors(gpus, transformer.heads):
        for pp in _divisors(gpus // tp, transformer.layers):
            for cp in context_parallel:
                if gpus // tp // pp % cp:
                    continue
                dp = gpus // tp // pp // cp
                options = product(range(4 if dp * cp > 1 else 1), micro_batch, recompute, chunks)
                for zero, size, again, parts in options:
                    # With a pipeline, stage 2 of ZeRO holds and sends what stage 1 does.
                    if (parts == 1 or pp > 1) and (zero != 2 or pp == 1):
                        many = max(1, batch // (dp * size))
                        yield Plan(dp, zero, tp, pp, cp, many, size, parts, again)


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]
