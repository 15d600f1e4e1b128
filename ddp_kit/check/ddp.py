"""Graders of lesson 08: gradients in buckets, of several batches, and DDP by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.check.grader import SENT, SIZES, Credit, Grader
from ddp_kit.check.partitioned_sgd import hint_for_mean, small_layers
from ddp_kit.error_text import count
from ddp_kit.errors import RankError
from ddp_kit.trace import Event

BUCKETS = 3
BATCHES = 4
SECOND, OVERLAP = "a second backward", "all_reduces begin during backward, and do not stop it"
_PLACE = " in weight.grad"
_ONCE = "Call all_reduce once per bucket in each backward, and do not convert the gradients."
_START = (
    "Call all_reduce with async_op=True in the hook, as soon as the bucket's last gradient is "
    "ready. Keep the Work object, and wait for it only in `finish`."
)


def exercise_8_1(average_in_backward: Callable[[list[list[nn.Parameter]]], Any]) -> Credit:
    """Grade `average_in_backward(buckets)` on 1 to 5 ranks, in two backwards of one model.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("8.1", "average_in_backward(buckets)", average_in_backward, collectives=True)
    numbers = sum(parameter.numel() for parameter in _model().parameters())
    for world_size in grader.each(SIZES, SECOND, SENT, OVERLAP):
        result = grader.run(_backwards, world_size=world_size)
        for step in range(2):
            _check_gradients(grader, step)
        calls = grader.collectives()
        if len(calls) != 2 * BUCKETS and (calls or world_size > 1):
            grader.fail(
                f"right, but two backwards with {BUCKETS} buckets made "
                f"{count(len(calls), 'collective call')}",
                hint=_ONCE,
                part=SENT,
            )
        sent, needed = sum(event.nbytes for event in calls), 2 * 4 * numbers
        grader.check_at_most(" in collectives by rank 0", sent, needed, "byte", _ONCE)
        for step in range(2):
            for number, event in enumerate(calls[step * BUCKETS : (step + 1) * BUCKETS]):
                last_ready, done = result[0]["moments"][step]
                if number < BUCKETS - 1 and event.start > last_ready:
                    grader.fail(
                        f"right, but bucket {number} waited for the gradients of all buckets",
                        hint=_START,
                        part=OVERLAP,
                    )
                if event.waited is not None and event.waited < done:
                    grader.fail(
                        f"right, but backward waited until bucket {number} was reduced",
                        hint=_START,
                        part=OVERLAP,
                    )
    return grader.passed(
        "right on 1, 2, 3, 4 and 5 ranks, all buckets but the last leave during backward"
    )


_FROZEN = (
    "A frozen parameter gets no gradient, and PyTorch refuses to set a hook on it: set one only "
    "where parameter.requires_grad is true."
)
_TIED = (
    "A weight that two layers share has one gradient. module.parameters() names it once; set one "
    "hook on each parameter that is trained."
)


def exercise_8_3(accumulate: Callable[[nn.Module, list[torch.Tensor]], Any]) -> Credit:
    """Grade `accumulate(model, batches)` on 1 to 5 ranks.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    grader = Grader("8.3", "accumulate(model, batches)", accumulate, collectives=True)
    for world_size in grader.each(SIZES, SENT):
        result = grader.run(_accumulate, world_size=world_size)
        own = [
            torch.stack([x.mean(0, True) for x in _batches(r)]).mean(0) for r in range(len(result))
        ]
        mean = sum(own[1:], own[0]) / world_size
        found = list(result)
        grader.compare(
            [mean] * world_size, found, _hint_for_batches(mean, found, own), place=_PLACE
        )
        calls = [event for event in grader.collectives() if event.op == "DDP all_reduce"]
        if len(calls) > 1:
            grader.fail(
                f"right, but DDP called all_reduce {len(calls)} times where once would be enough",
                part=SENT,
                hint="Call the model and backward under no_sync() for all batches but the last. "
                "DDP decides in the forward.",
            )
    return grader.passed("right on 1, 2, 3, 4 and 5 ranks, with one all_reduce for four batches")


def exercise_8_6(own_ddp: Callable[[nn.Module], Any]) -> Credit:
    """Grade the class `OwnDDP(module)` on 1 to 5 ranks, in two backwards of one model.

    The model has a weight that two layers share, a frozen layer and a buffer.

    Raises ExerciseError if it is not right yet, NotImplementedError for the stub.
    """
    hints = {RankError: _hint_for_frozen}
    grader = Grader("8.6", "OwnDDP(module)", own_ddp, hints, collectives=True)
    tensors, trained = _tensors(_Tied()), list(_trained(_Tied()))
    for world_size in grader.each(SIZES, OVERLAP):
        result = grader.run(_train_own, world_size=world_size)
        for name, tensor in tensors.items():
            found = [value["start"][name] for value in result]
            hint = "All ranks must start with rank 0's: broadcast each parameter and buffer."
            place = f" in {name} after OwnDDP(module)"
            grader.compare([tensor] * world_size, found, hint, place=place)
        calls = [event for event in grader.collectives() if event.op == "all_reduce"]
        if len(calls) > 2 * len(trained):
            grader.fail(
                f"two backwards called all_reduce {len(calls)} times for {len(trained)} gradients",
                hint=_TIED,
            )
        for step in range(2):
            for name in trained:
                own = [_own_shared_gradients(rank, step)[name] for rank in range(world_size)]
                mean = sum(own[1:], own[0]) / world_size
                found = [value["gradients"][step][name] for value in result]
                place = f" in {name}.grad after backward {step + 1}"
                grader.compare(
                    [mean] * world_size, found, hint_for_mean(mean, found, own), place=place
                )
        _check_overlap(grader, calls)
    return grader.passed(
        "right on 1, 2, 3, 4 and 5 ranks, with tied and frozen weights, during backward"
    )


def _check_overlap(grader: Grader, calls: list[Event]) -> None:
    """Fail unless some gradients left before the last one was ready, and nobody waited for them."""
    began = 0
    for step, (last_ready, done) in enumerate(grader.result[0]["moments"]):
        sent = [event for event in calls if began <= event.start]
        if sent and sent[0].start > last_ready:
            grader.fail(
                f"right, but no all_reduce of backward {step + 1} began before the last gradient "
                "was ready",
                part=OVERLAP,
                hint="Start the all_reduce in the hook: it is called when its gradient is ready.",
            )
        if any(event.waited is not None and event.waited < done for event in sent):
            grader.fail(
                f"right, but backward {step + 1} waited for an all_reduce",
                part=OVERLAP,
                hint="Call all_reduce with async_op=True, and put the Work object into self.works: "
                "`finish_gradient_synchronization` waits for it.",
            )
        began = done


def _hint_for_frozen(error: RankError) -> str:
    messages = [failure.message for failure in error.failures.values()]
    return _FROZEN if any("doesn't require gradient" in message for message in messages) else ""


class _Tied(nn.Module):
    """Linear layers of whole numbers: the last one has the first one's weight, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        layers = small_layers(2, 2, 2, 2)
        self.first, self.frozen, self.last = layers
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.ones(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)) + self.shift)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers by name; a shared weight has one name."""
    both = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in both.items()}


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _loss(model: Callable[[torch.Tensor], torch.Tensor], rank: int, step: int) -> torch.Tensor:
    """Return a loss whose gradients differ between ranks, those of biases, too."""
    return (rank + 1 + 10 * step) * model(torch.ones(1, 2)).sum()


def _own_shared_gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    module = _Tied()
    _loss(module, rank, step).backward()
    return {name: parameter.grad for name, parameter in _trained(module).items()}


def _train_own(rank: int, world_size: int, own_ddp: Callable) -> dict:
    """Wrap a module that starts differently on each rank, and run backward twice."""
    module = _Tied()
    ready: list[int] = []
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor += rank
    for parameter in _trained(module).values():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
    model = own_ddp(module)
    start, gradients, moments = _tensors(module), [], []
    for step in range(2):
        module.zero_grad()
        _loss(model, rank, step).backward()
        moments.append((ready[-1], time.monotonic_ns()))
        model.finish_gradient_synchronization()
        named = _trained(module).items()
        gradients.append({name: parameter.grad.clone() for name, parameter in named})
    return {"start": start, "gradients": gradients, "moments": moments}


def _hint_for_batches(mean: torch.Tensor, found: list, own: list[torch.Tensor]) -> str:
    if all(torch.equal(mean * BATCHES, have) for have in found):
        return "That is the sum over the batches. Divide each loss by the number of batches."
    if len(own) > 1 and all(map(torch.equal, own, found)):
        return "Each rank still has its own gradient: the last batch must not be under no_sync()."
    return "It is the mean over all batches of all ranks, of the gradient of model(x).mean()."


def _batches(rank: int) -> list[torch.Tensor]:
    """Return batches of shape (2, 3), whose means are divisible by all world sizes."""
    start = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    return [960 * (rank + 1) * (number + start) for number in range(BATCHES)]


def _accumulate(rank: int, world_size: int, accumulate: Callable) -> torch.Tensor:
    layer = nn.Linear(3, 1, bias=False)
    accumulate(DistributedDataParallel(layer), _batches(rank))
    return layer.weight.grad if layer.weight.grad is not None else torch.zeros(1, 3)


def _check_gradients(grader: Grader, step: int) -> None:
    result = grader.result
    n = len(result)
    for number, name in enumerate(result[0]["names"]):
        own = [_own_gradients(rank, step)[number] for rank in range(n)]
        mean = sum(own[1:], own[0]) / n
        found = [value["gradients"][step][number] for value in result]
        grader.compare(
            [mean] * n,
            found,
            hint_for_mean(mean, found, own)
            if step == 0
            else "The first backward was right. Reset your counts for the next one.",
            place=f" in {name}.grad after backward {step + 1}",
            part=SECOND if step else "",
        )


def _model() -> nn.Sequential:
    """Return three layers of whole numbers, so that gradients are exact."""
    layers = small_layers(2, 3, 2, 1)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 3 + 1)
    return layers


def _backward(layers: nn.Module, rank: int, step: int) -> None:
    layers.zero_grad()
    given = torch.full((1, 2), rank + 1 + 10 * step, dtype=torch.float32)
    layers(given).sum().backward()


def _own_gradients(rank: int, step: int) -> list[torch.Tensor]:
    layers = _model()
    _backward(layers, rank, step)
    return [parameter.grad for parameter in layers.parameters()]


def _backwards(rank: int, world_size: int, average_in_backward: Callable) -> dict:
    """Run backward twice; note when the last gradient was ready and when backward ended."""
    layers = _model()
    ready: list[int] = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic_ns()))
    finish = average_in_backward([list(layer.parameters()) for layer in reversed(layers)])
    gradients, moments = [], []
    for step in range(2):
        _backward(layers, rank, step)
        moments.append((ready[-1], time.monotonic_ns()))
        finish()
        gradients.append([parameter.grad.clone() for parameter in layers.parameters()])
    names = [name for name, _ in layers.named_parameters()]
    return {"names": names, "gradients": gradients, "moments": moments}
