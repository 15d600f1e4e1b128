"""Graders of lesson 08: gradients in buckets, of several batches, and DDP by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_kit.check.compared import alone, compared, hunt, in_collectives
from ddp_kit.check.grader import SIZES, Grader
from ddp_kit.check.partitioned_sgd import small_layers
from ddp_kit.check.record import Score, Span, record
from ddp_kit.model import chunked_ring

BATCHES = 4


@compared("8.1", "order_of_gradients(module, loss)")
def _order_of_gradients(rank: int, world_size: int, order_of_gradients: Callable) -> dict:
    module = nn.ModuleDict(dict(zip("abcd", small_layers(2, 2, 2, 2, 2), strict=True)))
    module["d"].requires_grad_(False)
    found = []
    for used in ("cabd", "abdc") if rank == 0 else ("bcad", "bcad"):
        x = torch.ones(1, 2, dtype=torch.float32)
        for name in used:
            x = module[name](x)
        found.append(order_of_gradients(module, x.sum()))
    # Only now: a hook that is still set would go on adding to the first list.
    lists = {f"the order of backward {number}": list(one) for number, one in enumerate(found, 1)}
    parameters = module.parameters()
    return lists | {"how many gradients there are": sum(p.grad is not None for p in parameters)}


@compared(
    "8.3",
    "accumulate(model, batches)",
    "with one all_reduce for four batches",
    sizes=SIZES,
    used=in_collectives,
)
def _accumulate(rank: int, world_size: int, accumulate: Callable) -> dict:
    layer = nn.Linear(3, 1, bias=False)
    accumulate(DistributedDataParallel(layer), _batches(rank))
    return {"weight.grad": layer.weight.grad}


def _batches(rank: int) -> list[torch.Tensor]:
    """Return batches of shape (2, 3), whose means are divisible by all world sizes."""
    start = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    return [960 * (rank + 1) * (number + start) for number in range(BATCHES)]


CAP = 28  # bytes: seven numbers


class _Heads(nn.Module):
    """Layers of whole numbers, one of them frozen, and two heads of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_layers(2, 2, 2, 2)
        self.body[1].requires_grad_(False)
        self.heads = nn.ModuleList(small_layers(2, width)[0] for width in (1, 2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + 1)

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        return sum(self.heads[head](self.body(x)).sum() for head in used)


def _gradients(module: nn.Module, place: str) -> dict[str, torch.Tensor]:
    """Return copies of the gradients of what is trained; zeros where there is none."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {
        f"{name}.grad {place}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in trained.items()
    }


WRITTEN = "written to before its all_reduce was waited for"


class _Noted:
    """A Work that notes when somebody waits for it, and whether its tensor was written before."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, notes: list, op: Any) -> None:
        self._work, self._tensor, self._notes = work, tensor, notes
        self._version = tensor._version
        self._is_average = op is dist.ReduceOp.AVG  # gloo itself writes into the tensor once more

    def wait(self, *args: Any) -> Any:
        self._notes.append("wait")
        if self._tensor._version != self._version and not self._is_average:
            self._notes.append(WRITTEN)
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def noting(notes: list) -> Iterator[None]:
    """Note the numbers in each all_reduce, and each wait for one."""
    all_reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        notes.append(tensor.numel())
        work = all_reduce(tensor, *args, **named)
        if work is None:
            notes.append("wait")
        return work and _Noted(work, tensor, notes, args[0] if args else named.get("op"))

    with patch.object(dist, "all_reduce", noted):
        yield


def _note_when_ready(module: nn.Module, notes: list) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: notes.append("ready"))


def _overlap(notes: list) -> dict[str, int]:
    """Return what shows in the notes of one backward whether it goes on meanwhile."""
    last = len(notes) - notes[::-1].index("ready")
    early = [note for note in notes[:last] if isinstance(note, int)]
    return {
        "all_reduces before the last gradient is ready": len(early),
        "waits during backward": notes.count("wait"),
    }


def _backward(model: Callable, rank: int, *used: int) -> None:
    x = torch.tensor([[1.0, 2.0 + rank]], dtype=torch.float32)
    ((rank + 1) * model(x, *used)).backward()


@compared("8.6", "OwnDDP(module, cap)", "while backward goes on", kind="function")
def _own_ddp(rank: int, world_size: int, own_ddp: Callable) -> dict:
    module, notes = _Heads(), []
    _note_when_ready(module, notes)
    model = own_ddp(module, CAP)
    found = {}
    with noting(notes):
        _backward(model, rank, 1, 0)  # not in the order of the parameters
        found |= _overlap(notes)
        model.synchronize()
        found |= _gradients(module, "after a step")
        found["numbers in each all_reduce"] = [n for n in notes if isinstance(n, int)]
        module.zero_grad()
        _backward(model, rank, rank % 2)
        model.synchronize()
        found |= _gradients(module, "where ranks use different heads")
        module.zero_grad()
        notes.clear()
        for model.accumulating, used in ((True, (0, 1)), (False, (1,))):
            _backward(model, rank, *used)
        model.synchronize()
        found |= _gradients(module, "after two backwards")
    found["all_reduces in two backwards"] = len([n for n in notes if isinstance(n, int)])
    return found


# In the order in which they are ready: megabytes, and milliseconds after the start of backward.
MEGABYTES = (2, 2, 3, 1, 8, 3, 8, 1, 6, 2, 8, 2, 4, 1, 3, 3, 3, 2, 2, 2, 6, 3, 6, 3)
READY = (
    *(3, 4, 6, 9, 13, 14, 18, 19, 22, 24, 26, 29),
    *(33, 34, 37, 38, 42, 45, 49, 51, 53, 55, 56, 57),
)


@record(
    "8.10", "cut_into_buckets(sizes, ready, cost)", "ms", (88, 82, 78.7), along="ms", rows=["link"]
)
def _cut_into_buckets(grader: Grader) -> Score:
    sizes, ready = [1_000_000 * size for size in MEGABYTES], [moment / 1000 for moment in READY]
    cost = partial(chunked_ring, 8, alpha=200e-6, beta=0.4e-9)
    counts = grader.call([(sizes, ready, cost)], grader.form)[0]
    try:
        counts = list(map(operator.index, counts))
    except TypeError:
        fact = f"it should return a list of whole numbers, and returns {counts!r}"
        grader.fail(fact, hint="no numbers")
    if any(count < 1 for count in counts):
        grader.fail(f"bucket {counts.index(min(counts))} is empty in {counts}", hint="empty bucket")
    if sum(counts) != len(sizes):
        fact = f"the buckets hold {sum(counts)} gradients in all, and there are {len(sizes)}"
        grader.fail(fact, hint="other total")
    spans, free = [], 0.0
    for count, end in zip(counts, accumulate(counts), strict=True):
        start = max(free, ready[end - 1])
        free = start + cost(sum(sizes[end - count : end]))
        spans.append(Span(0, 1000 * start, 1000 * free, str(count)))
    return Score(1000 * free, spans)


hunt("8.7", "8.8", "8.9")


@compared("8.a", "DistributedDataParallel(module)", "while backward goes on")
def _hooked(rank: int, world_size: int, ddp: Callable) -> dict:
    module, notes = _Heads(), []
    _note_when_ready(module, notes)
    model = ddp(module)
    with noting(notes):
        _backward(model, rank, 0, 1)
        found = _overlap(notes)
        trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
        kept = set(model.sending) == trained
        model.finish_gradient_synchronization()
    found |= _gradients(module, "after finish_gradient_synchronization()")
    found |= {name: parameter.detach() for name, parameter in module.named_parameters()}
    if WRITTEN in notes:  # then the numbers depend on luck
        found = dict.fromkeys(found, f"a gradient that was {WRITTEN}")
    found["whether `sending` has every trained parameter"] = kept
    travels = module.heads[0].bias
    before = travels.grad.clone()
    model.sending[travels] = SimpleNamespace(wait=lambda: None)
    try:
        model.start_average(travels)
        found["a gradient that travels"] = "is sent again"
    except RuntimeError:
        same = torch.equal(travels.grad, before)
        found["a gradient that travels"] = f"raises a RuntimeError{'' if same else ', and changes'}"
    model.finish_gradient_synchronization()
    return found


@alone("8.b", "buckets_by_hand(sizes, cap, first_cap)")
def _buckets_by_hand(buckets_by_hand: Callable) -> dict:
    cases = (
        ([1, 1, 1, 1, 1, 1], 2, 2),
        ([2, 2, 2, 2, 2], 3, 3),
        ([1, 9, 1, 1, 1, 1], 4, 2),
        ([1, 1, 1, 1, 1, 1, 1, 1], 4, 2),
        ([1, 1], 100, 100),
    )
    return {f"buckets_by_hand{given}": buckets_by_hand(*given) for given in cases}


@compared("8.c", "train_epoch(model, loader, optimizer, epoch, every)")
def _train_epoch(rank: int, world_size: int, train_epoch: Callable) -> dict:
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(14 * world_size, 2), torch.arange(14 * world_size) % 3)
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, seed=1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.LogSoftmax(dim=1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    found = {}
    for epoch in range(2):
        train_epoch(model, loader, optimizer, epoch, 3)
        for name, parameter in model.module.named_parameters():
            found[f"{name} after epoch {epoch}"] = parameter.detach().clone()
    return found
