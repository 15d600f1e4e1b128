"""The proof of the lesson on ZeRO, and what a rank sends and holds: measured, by formula, drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddp_kit import compare
from ddp_kit.error_text import count
from ddp_kit.lessons._gpt import GPT, Config, batches, check_parts, loss_of, make_gpt
from ddp_kit.lessons._launch import Ranks, choose, lesson_main, prove
from ddp_kit.notebook.controls import Explorer
from ddp_kit.trace import Trace
from ddp_kit.trace.bytes_sent import bytes_sent

BATCH = 12  # sequences of all ranks together: 1, 2, 3 and 4 divide it
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# With its usual eps of 1e-8, Adam makes rounding errors of tiny gradients as large as its steps.
ADAM = partial(torch.optim.Adam, lr=1e-3, eps=1e-5)
# With the bytes of their states for each parameter.
OPTIMIZERS = {
    "SGD": (partial(torch.optim.SGD, lr=0.1), 0),
    "SGD with momentum": (SGD, 4),
    "Adam": (ADAM, 8),
}
# The function of the lesson that sets each way up, and the stage of ZeRO that it is.
WAYS = {
    "DDP": ("stage_0", 0),
    "stage 1": ("stage_1", 1),
    "stage 2": ("stage_2", 2),
    "stage 3": ("stage_3", 3),
    "ZeroRedundancyOptimizer": ("start_zero_redundancy", 1),
    "fully_shard": ("start_fully_shard", 3),
}


@dataclass
class Training:
    """A model that is trained in one of the `WAYS`.

    full: returns all parameters by name. finish: called after backward. after: called after the
    optimizer's step. sharded: the parameters whose gradients stages 2 and 3 shard.
    """

    model: nn.Module
    optimizer: Optimizer
    full: Callable[[], dict[str, torch.Tensor]]
    finish: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    sharded: Sequence[Any] = ()


def starter(way: str) -> Callable[..., Training]:
    """Return the function that sets a way up. Raises PoolError for another way."""
    return getattr(lesson, choose("way", way, WAYS)[0])


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def with_gradients(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output that get gradients.

    It may be a tensor, or tuples, lists and dicts of tensors. Raises TypeError for other objects,
    in which tensors might be missed, unless gradients are off.
    """
    if not torch.is_grad_enabled() or isinstance(output, (int, float, str, type(None))):
        return []
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if not isinstance(output, (tuple, list, dict)):
        raise TypeError(
            "a sharded module must return a tensor, or a tuple, list or dict of tensors, "
            f"got a value of type {type(output).__name__}"
        )
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in with_gradients(part)]


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
    optimizer, losses = optimizer_cls(model.parameters()), []
    for batch in batches(size, steps, config.context):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "parameters": copies(model)}


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


def on_gloo(sent: Counter[str]) -> int:
    """Return how many bytes gloo sends in these calls: its reduce_scatter is an all_reduce."""
    return sum(count * (2 if "reduce_scatter" in call else 1) for call, count in sent.items())


def filled_bytes(tensors: Iterable[torch.Tensor], world_size: int) -> int:
    """Return the bytes of tensors with the rows that fill them up."""
    return sum(-(-len(t) // world_size) * world_size * (t.nbytes // len(t)) for t in tensors)


def expected_bytes(way: str, world_size: int, model: GPT) -> float:
    """Return the bytes that a rank sends in a step, by the formula: the mean of all ranks.

    way: "DDP" or a stage. A reduce_scatter or an all_gather sends (n-1)/n of its tensors, an
    all_reduce twice that.
    """
    twice = [model.tokens.weight] if model.head.weight is model.tokens.weight else []
    exact = sum(parameter.nbytes for parameter in model.parameters())
    filled = filled_bytes(model.parameters(), world_size)
    sent = {
        "DDP": 2 * exact,  # all_reduce
        "stage 1": 2 * exact + exact,  # all_reduce; a broadcast of each parameter from its owner
        "stage 2": filled + filled,  # reduce_scatter, all_gather
        # reduce_scatter; all_gather before forward and backward, once more for a weight that two
        # modules use
        "stage 3": filled + 2 * filled + filled_bytes(twice, world_size),
    }
    return (world_size - 1) / world_size * sent[way]


def memory(tensor: torch.Tensor, seen: set[int]) -> int:
    """Return the bytes of a tensor's memory, or 0 if it was seen before."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    if storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def held(training: Training) -> dict[str, int]:
    """Return the bytes of memory behind a rank's tensors, by kind.

    Several views of one memory count once, and so does memory that two kinds share.
    """
    optimizer = training.optimizer
    inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optim", None) or optimizer
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    under_way = [p.reducing for p in training.sharded if p.reducing is not None]
    states = [value for state in inner.state.values() for value in state.values()]
    kinds = {
        "parameters": trained,
        "gathered parameters": [parameter.filled for parameter in training.sharded],
        "gradients": [p.grad for p in trained if p.grad is not None],
        "gradients on their way": [t for whole, mean, _ in under_way for t in (whole, mean)],
        # Step counts are tiny.
        "optimizer states": [s for s in states if isinstance(s, torch.Tensor) and s.ndim],
    }
    seen: set[int] = set()
    return {kind: sum(memory(tensor, seen) for tensor in kinds[kind]) for kind in kinds}


def watch_memory(rank, world_size, start: Callable[[nn.Module], Training]) -> dict[str, dict]:
    """Return what this rank holds at four moments of its second training step.

    start: sets the training of a model up. In the forward and the backward, the moment is the one
    of all beginnings of a module's forward, or backward, at which the rank holds most. The result
    maps a moment to bytes by kind, as `held` does; `kit.plot.memory` draws a list of these for each
    moment.
    """
    moments: dict[str, dict] = {}

    def note(training: Training, moment: str, _: str) -> None:
        if moment in ("forward", "backward"):
            moment = f"at most, in the {moment}"
        now = held(training)
        moments[moment] = max(moments.get(moment, now), now, key=lambda kinds: sum(kinds.values()))

    _take_two_steps(rank, world_size, start, note)
    return moments


def watch_layers(rank, world_size, start: Callable[[nn.Module], Training]) -> list[tuple]:
    """Return which layers have what when a layer begins, in the second training step of stage 3.

    start: sets the training of a model up, as stage 3. For the forward and the backward of each
    layer there are: "forward" or "backward"; its name; and the names of the layers whose weight is
    complete, whose weight is on its way, and whose gradient is.
    """
    found = []

    def note(training: Training, what: str, layer: str) -> None:
        own, modules = training.model.own, training.model.module.named_modules()
        weights = {name: own[module]["weight"] for name, module in modules if module in own}
        if layer in weights:
            here = {name for name, weight in weights.items() if weight.memory.nbytes()}
            coming = {name for name in here if weights[name].gathering is not None}
            leaving = {name for name, weight in weights.items() if weight.reducing is not None}
            found.append((what, layer, *map(sorted, (here - coming, coming, leaving))))

    _take_two_steps(rank, world_size, start, note)
    return found


def _take_two_steps(rank: int, world_size: int, start: Callable, note: Callable) -> None:
    """Train for two steps; in the second one, call `note` before, when a module begins, and after.

    note: takes the training, "before", "forward", "backward" or "after the step", and a name.
    """
    model, data = make_gpt(), batches(BATCH, 2)
    training = start(model)

    def note_in_backward(name: str, _: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: note(training, "backward", name))

    lesson.take_steps(training, islice(data, 1), rank, world_size)
    training.optimizer.zero_grad()
    note(training, "before", "")
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: note(training, "forward", name))
        module.register_forward_hook(partial(note_in_backward, name))
    lesson.take_steps(training, data, rank, world_size)
    note(training, "after the step", "")


def hold(rank, world_size, way: str = "stage 3", optimizer: str = "Adam", width: int = 64):
    """Train a GPT of this width for a step; return the bytes that this rank holds, by kind."""
    optimizer_cls, _ = choose("optimizer", optimizer, OPTIMIZERS)
    training = starter(way)(make_gpt(Config(width=width)), optimizer_cls)
    lesson.take_steps(training, batches(BATCH, 1), rank, world_size)
    return held(training)


def expected_memory(way: str, optimizer: str, parameters: int, n: int) -> dict[str, int]:
    """Return the bytes that each of n ranks holds, by kind: 4, 4 and those of the states.

    A stage divides the last ones by n: first the states, then the gradients, then the parameters.
    """
    _, stage = WAYS[way]
    nbytes = {"parameters": 4, "gradients": 4, "optimizer states": OPTIMIZERS[optimizer][1]}
    shares = [n if place >= 3 - stage else 1 for place in range(3)]
    return {
        kind: round(each * parameters / share)
        for (kind, each), share in zip(nbytes.items(), shares, strict=True)
    }


def explore(
    way: str = "stage 3", optimizer: str = "Adam", world_size: int = 4, width: int = 64
) -> Explorer:
    """Train a GPT for a step, and draw what each rank holds, beside the formulas of way and DDP.

    way: one of WAYS. optimizer: one of OPTIMIZERS. width: of the GPT, which makes it larger. In
    JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    sizes = [n for n in range(1, 7) if BATCH % n == 0]
    options = {"way": tuple(WAYS), "optimizer": tuple(OPTIMIZERS)}
    options |= {"world_size": sizes, "width": (32, 64, 128, 256)}
    return Explorer(
        "zero",
        {"way": way, "optimizer": optimizer, "world_size": world_size, "width": width},
        choices=lambda settings: options,
        ask=lambda settings: (hold, *(settings[name] for name in ("way", "optimizer", "width"))),
        draw=_draw,
    )


def _draw(result, settings: dict):
    from ddp_kit import plot  # ranks do not need it

    way, optimizer, n = (settings[name] for name in ("way", "optimizer", "world_size"))
    size = sum(p.numel() for p in make_gpt(Config(width=settings["width"])).parameters())
    bars = {f"{way}, measured": list(result)}
    for name in (way, "DDP"):
        bars[f"{name}, formula"] = [expected_memory(name, optimizer, size, n)] * n
    title = f"Memory after a step with {way} and {optimizer}: "
    title += f"{size:,} parameters, {count(n, 'rank')}"
    return plot.memory(bars, title, "rank")


@lesson_main("zero")
def main(ranks: Ranks) -> str:
    """Train in each way, compare with one process, count bytes, and print one line.

    Raises PoolError for a world size that does not divide the batch.
    """
    check_parts(BATCH, ranks.world_size)
    for optimizer_cls in (SGD, ADAM):
        alone = train_alone(optimizer_cls)["parameters"]
        for way in WAYS:
            stage = partial(starter(way), optimizer_cls=optimizer_cls)
            mine = [each["parameters"] for each in ranks(lesson.learn, stage)]
            prove(f"{way} trains as one process does", compare(mine, alone))
    for way in ("DDP", "stage 1", "stage 2", "stage 3"):
        sent = [sum(s.values()) for s in bytes_per_step(ranks, lesson.learn, starter(way))]
        expected = expected_bytes(way, ranks.world_size, make_gpt())
        prove(f"{way} sends what the formula says", compare(sum(sent) / len(sent), expected))
    return "3 stages and PyTorch's own train as one process does"


from ddp_kit.lessons import zero as lesson
