"""The proof of the lesson on ZeRO, and what a rank sends and holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ddp_kit import compare
from ddp_kit.lessons._gpt import Config, batches, loss_of, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.trace import Trace
from ddp_kit.trace.collectives import bytes_sent

BATCH = 12  # sequences of all ranks together: 1, 2, 3 and 4 divide it
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# With its usual eps of 1e-8, Adam makes rounding errors of tiny gradients as large as its steps.
ADAM = partial(torch.optim.Adam, lr=1e-3, eps=1e-5)
WAYS = (  # the classes of the lesson, each of which trains in another way
    *("Replicated", "Stage1", "Stage2", "Stage3", "Prefetching"),
    *("ZeroRedundancy", "FullySharded"),
)


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def fit(
    model: nn.Module,
    optimizer_cls: Callable,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable = loss_of,
    exchange: Callable[[torch.Tensor], None] = lambda loss: None,
) -> dict[str, Any]:
    """Train on batches, and return "losses" and "parameters".

    exchange: is called with the loss after each backward, and may add up what ranks have.
    """
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        exchange(loss.detach())
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": copies(model)}


def train_alone(
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    size: int = BATCH,
    dtype: torch.dtype = torch.float32,
    config: Config | None = None,
) -> dict[str, Any]:
    """Train the GPT on whole batches in this one process; return "losses" and "parameters"."""
    config = config or Config()
    model = make_gpt(config).to(dtype)
    return fit(model, optimizer_cls, batches(size, steps, config.context))


def bytes_per_step(run: Callable, worker: Callable, *args: Any) -> list[Counter[str]]:
    """Return the bytes that each rank sends in a training step, by call, as the trace counts them.

    run: calls a worker on all ranks, such as `kit.run`. worker: takes args and a number of steps.
    A step is what three send minus what two send.
    """
    fewer, more = (run(worker, *args, steps) for steps in (2, 3))
    return [
        count_bytes(more.trace, rank) - count_bytes(fewer.trace, rank) for rank in range(len(more))
    ]


def count_bytes(trace: Trace, rank: int) -> Counter[str]:
    """Return the bytes that a rank sent, by call."""
    sent: Counter[str] = Counter()
    for event in trace:
        if event.rank == rank:
            sent[event.op] += round(bytes_sent(event))
    return sent


def filled_bytes(tensors: Iterable[torch.Tensor], world_size: int) -> int:
    """Return the bytes of tensors with the rows that fill them up."""
    return sum(-(-len(t) // world_size) * world_size * (t.nbytes // len(t)) for t in tensors)


def memory(tensor: torch.Tensor, seen: set[int]) -> int:
    """Return the bytes of a tensor's memory, or 0 if it was seen before."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def bytes_by_kind(kinds: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, int]:
    """Return the bytes of memory behind tensors; memory that two kinds share counts once."""
    seen: set[int] = set()
    return {kind: sum(memory(tensor, seen) for tensor in kinds[kind]) for kind in kinds}


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def states_of(optimizer: Any) -> list[torch.Tensor]:
    """Return what an optimizer keeps, but not the step counts, which are tiny."""
    states = getattr(optimizer, "optim", optimizer).state.values()
    return [value for state in states for value in state.values() if value.ndim]


@contextmanager
def keeping() -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets what autograd keeps for the backward in this block."""
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def held(training: Any) -> dict[str, int]:
    """Return the bytes of a rank by kind. training: an object of one of the classes in WAYS."""
    trained = [p for group in training.optimizer.param_groups for p in group["params"]]
    return bytes_by_kind(
        {
            "parameters": trained,
            "gathered parameters": [flat.flat for flat in getattr(training, "flats", ())],
            "gradients": gradients_of({*training.model.parameters(), *trained}),
            "optimizer states": states_of(training.optimizer),
        }
    )


@lesson_main("zero")
def main(ranks: Ranks) -> str:
    """Train in each way, compare with one process, and print one line."""
    alone = train_alone(ADAM)["parameters"]
    for name in WAYS:
        found = [each["parameters"] for each in ranks(lesson.learn, getattr(lesson, name))]
        prove(f"{name} trains as one process does", compare(found, alone))
    return "3 stages and PyTorch's own train as one process does"


from ddp_kit.lessons import zero as lesson
