"""Graders of lesson 08: gradients in buckets, of several batches, and DDP by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.compared import hunt
from ddp_kit.check.grader import SENT, Grader, exercise
from ddp_kit.check.partitioned_sgd import averaged_wrongly, small_layers
from ddp_kit.error_text import count
from ddp_kit.errors import RankError
from ddp_kit.trace import Event

BUCKETS = 3
BATCHES = 4
SECOND, OVERLAP = "a second backward", "all_reduces begin during backward, and do not stop it"


@exercise(
    "8.1",
    "average_in_backward(buckets)",
    "all buckets but the last leave during backward",
    others=(SECOND, SENT, OVERLAP),
)
def _average_in_backward(grader: Grader, world_size: int) -> None:
    numbers = sum(parameter.numel() for parameter in _model().parameters())
    result = grader.run(_average_buckets, world_size=world_size)
    _check_gradients(grader, _model, 0)
    _check_gradients(grader, _model, 1, "count not reset", SECOND)
    calls = grader.collectives()
    if len(calls) != 2 * BUCKETS and (calls or world_size > 1):
        made = count(len(calls), "collective call")
        fact = f"right, but two backwards with {BUCKETS} buckets made {made}"
        grader.fail(fact, hint="not once per bucket", part=SENT)
    grader.check_collectives(2 * 4 * numbers, "not once per bucket")
    for place, event in enumerate(calls[: 2 * BUCKETS]):
        step, number = divmod(place, BUCKETS)
        last_ready, done = result[0]["moments"][step]
        if number < BUCKETS - 1 and event.start > last_ready:
            fact = f"right, but bucket {number} waited for the gradients of all buckets"
            grader.fail(fact, hint="starts late", part=OVERLAP)
        if event.waited is not None and event.waited < done:
            fact = f"right, but backward waited until bucket {number} was reduced"
            grader.fail(fact, hint="hook waits", part=OVERLAP)


def _model() -> nn.Sequential:
    """Return three layers of whole numbers, so that gradients are exact."""
    return _with_whole_numbers(small_layers(2, 3, 2, 1))


def _with_whole_numbers(module: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + 1)
    return module


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _loss(model: Callable[[torch.Tensor], torch.Tensor], rank: int, step: int) -> torch.Tensor:
    """Return a loss whose gradients differ between ranks, those of biases, too."""
    return (rank + 1 + 10 * step) * model(torch.ones(1, 2, dtype=torch.float32)).sum()


def _own_gradients(module: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor]:
    _loss(module, rank, step).backward()
    return {name: parameter.grad for name, parameter in _trained(module).items()}


def _average_buckets(rank: int, world_size: int, average_in_backward: Callable) -> dict:
    layers = _model()
    ready = _note_when_ready(layers)
    finish = average_in_backward([list(layer.parameters()) for layer in reversed(layers)])
    return _two_backwards(layers, layers, rank, ready, finish)


def _note_when_ready(module: nn.Module) -> list[int]:
    """Return a list that gets the moments at which gradients are ready."""
    ready: list[int] = []
    for parameter in _trained(module).values():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
    return ready


def _two_backwards(
    module: nn.Module, model: Callable, rank: int, ready: list[int], finish: Callable
) -> dict:
    """Note for each backward when its last gradient was ready and when it ended, and gradients."""
    gradients, moments = [], []
    for step in range(2):
        module.zero_grad()
        _loss(model, rank, step).backward()
        moments.append((ready[-1], time.monotonic_ns()))
        finish()
        named = _trained(module).items()
        gradients.append({name: parameter.grad.clone() for name, parameter in named})
    return {"gradients": gradients, "moments": moments}


def _check_gradients(
    grader: Grader, module: Callable[[], nn.Module], step: int, mistake: str = "", part: str = ""
) -> None:
    """Fail unless each gradient is the mean over the ranks. mistake: if it is always the same."""
    n = len(grader.result)
    each = [_own_gradients(module(), rank, step) for rank in range(n)]
    for name in each[0]:
        own = [gradients[name] for gradients in each]
        mean = sum(own[1:], own[0]) / n
        found = [value["gradients"][step][name] for value in grader.result]
        place = f" in {name}.grad after backward {step + 1}"
        mistakes = mistake or averaged_wrongly(mean, own)
        grader.compare([mean] * n, found, mistakes, place=place, part=part)


@exercise(
    "8.3", "accumulate(model, batches)", "with one all_reduce for four batches", others=(SENT,)
)
def _accumulate(grader: Grader, world_size: int) -> None:
    result = grader.run(_accumulate_batches, world_size=world_size)
    own = [torch.stack([x.mean(0, True) for x in _batches(r)]).mean(0) for r in range(len(result))]
    mean = sum(own[1:], own[0]) / world_size
    mistakes = {
        "not divided": mean * BATCHES,
        "never exchanged": world_size > 1 and own,
        "other gradient": True,
    }
    grader.compare([mean] * world_size, result, mistakes, place=" in weight.grad")
    calls = [event for event in grader.collectives() if event.op == "DDP all_reduce"]
    if len(calls) > 1:
        fact = f"DDP called all_reduce {len(calls)} times where once would be enough"
        grader.fail(f"right, but {fact}", hint="exchanged too often", part=SENT)


def _batches(rank: int) -> list[torch.Tensor]:
    """Return batches of shape (2, 3), whose means are divisible by all world sizes."""
    start = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    return [960 * (rank + 1) * (number + start) for number in range(BATCHES)]


def _accumulate_batches(rank: int, world_size: int, accumulate: Callable) -> torch.Tensor:
    layer = nn.Linear(3, 1, bias=False)
    accumulate(DistributedDataParallel(layer), _batches(rank))
    return layer.weight.grad if layer.weight.grad is not None else torch.zeros(1, 3)


def _hook_refused(error: RankError) -> str:
    messages = [failure.message for failure in error.failures.values()]
    refused = any("doesn't require gradient" in message for message in messages)
    return "frozen hooked" if refused else ""


@exercise(
    "8.6",
    "OwnDDP(module)",
    "with tied and frozen weights, during backward",
    on_failure={RankError: _hook_refused},
    others=(OVERLAP,),
)
def _own_ddp(grader: Grader, world_size: int) -> None:
    tensors, trained = _tensors(_Tied()), len(_trained(_Tied()))
    result = grader.run(_train_own, world_size=world_size)
    for name, tensor in tensors.items():
        found = [value["start"][name] for value in result]
        place = f" in {name} after OwnDDP(module)"
        grader.compare([tensor] * world_size, found, "not broadcast", place=place)
    calls = [event for event in grader.collectives() if event.op == "all_reduce"]
    if len(calls) > 2 * trained:
        fact = f"two backwards called all_reduce {len(calls)} times for {trained} gradients"
        grader.fail(fact, hint="tied weight twice")
    for step in range(2):
        _check_gradients(grader, _Tied, step)
    _check_overlap(grader, calls)


def _check_overlap(grader: Grader, calls: list[Event]) -> None:
    """Fail unless some gradients left before the last one was ready, and nobody waited for them."""
    began = 0
    for step, (last_ready, done) in enumerate(grader.result[0]["moments"]):
        sent = [event for event in calls if began <= event.start]
        if sent and sent[0].start > last_ready:
            fact = f"no all_reduce of backward {step + 1} began before the last gradient was ready"
            grader.fail(f"right, but {fact}", hint="starts late", part=OVERLAP)
        if any(event.waited is not None and event.waited < done for event in sent):
            fact = f"right, but backward {step + 1} waited for an all_reduce"
            grader.fail(fact, hint="hook waits", part=OVERLAP)
        began = done


class _Tied(nn.Module):
    """Linear layers of whole numbers: the last one has the first one's weight, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        layers = small_layers(2, 2, 2, 2)
        self.first, self.frozen, self.last = layers
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.ones(2))
        _with_whole_numbers(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)) + self.shift)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers by name; a shared weight has one name."""
    both = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in both.items()}


def _train_own(rank: int, world_size: int, own_ddp: Callable) -> dict:
    """Wrap a module that starts differently on each rank, and run backward twice."""
    module = _Tied()
    ready = _note_when_ready(module)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor += rank
    model = own_ddp(module)
    start = _tensors(module)
    finish = model.finish_gradient_synchronization
    return {"start": start, **_two_backwards(module, model, rank, ready, finish)}


for _number in ("8.7", "8.8", "8.9"):
    hunt(_number)
