"""The proof of the lesson on tensor parallelism, what ranks can share, and what a rank holds.

In all functions, `group` is a process group, by default that of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_kit import compare, device
from ddp_kit.lessons import zero
from ddp_kit.lessons._gpt import Attention, Config, batches, loss_of, make_gpt
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.device_mesh import pieces, shard_to_replicate
from ddp_kit.lessons.zero import ADAM, SGD, bytes_by_kind, gradients_of, keeping, states_of

CONFIG = Config()
BATCH = 4  # sequences; every rank has all of them


class LlamaAttention(Attention):
    """Causal attention in which several heads of queries share one of keys and values."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__(Config(width=width, heads=heads))
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class SwiGLU(nn.Module):
    """The other half of a block: a gate decides what comes through."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """A block as in Llama 3."""

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = LlamaAttention(width, heads, groups)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def check_shares(model: nn.Module, n: int) -> None:
    """Raise ValueError unless n ranks can share the heads of a GPT, or of a block, evenly."""
    attention = next(module for module in model.modules() if isinstance(module, Attention))
    heads = attention.query.out_features // attention.head_width
    if heads % n:
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        raise ValueError(
            f"{n} ranks cannot share {heads} attention heads evenly: "
            f"use a number of ranks that divides {heads}: {fitting}"
        )


def own_places(length: int, group: Any = None) -> torch.Tensor:
    """Return this rank's part of the positions, with sequence parallelism."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return pieces(torch.arange(length, device=device()), 0, n)[rank]


def uncut(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank holds whole."""
    return [p for name, p in model.named_parameters() if _cut_along(model, name) is None]


def gather_parameters(model: nn.Module, group: Any = None) -> dict[str, torch.Tensor]:
    """Return the whole parameters by name, on every rank."""
    n, found = dist.get_world_size(group), {}
    for name, parameter in model.named_parameters():
        value, dim = parameter.detach().clone(), _cut_along(model, name)
        if dim is not None:
            value = shard_to_replicate(value, dim, value.shape[dim] * n, group)
        found[name] = value
    return found


def _cut_along(model: nn.Module, name: str) -> int | None:
    """Return the dimension along which a parameter is cut; None if every rank has it whole."""
    module, _, own_name = name.rpartition(".")
    return getattr(model.get_submodule(module), "cut", {}).get(own_name)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, also if it is a DTensor; then all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_alone(
    optimizer_cls: Callable = SGD,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    config: Config = CONFIG,
) -> dict[str, Any]:
    """Train the whole GPT in this one process; return as `learn` does."""
    return zero.train_alone(optimizer_cls, steps, BATCH, dtype, config)


def held(rank, world_size, cut: Callable, loss_function: Callable, places=lambda: None):
    """Return the bytes that a rank holds for a training step with Adam, by kind.

    cut, places: as for `learn`. Activations are what the forward keeps for the backward.
    """
    model = make_gpt()
    cut(model)
    optimizer = ADAM(model.parameters())
    ((inputs, targets),) = batches(BATCH, 1)
    with keeping() as kept:
        loss = loss_function(model(inputs, places()).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return bytes_by_kind(
        {
            "parameters": model.parameters(),
            "gradients": gradients_of(model.parameters()),
            "optimizer states": states_of(optimizer),
            "activations": kept,
        }
    )


def draw_block(result: Any, title: str) -> Any:
    """Draw where rank 0 communicates in a block that is cut, forward and backward."""
    from ddp_kit import plot  # ranks do not need it

    calls = [f"{e.op} of {e.nbytes:,} bytes" for e in result.trace if e.rank == 0]
    half = len(calls) // 2
    forward, backward = ["identity"] * 4, ["identity"] * 4
    forward[1 if half == 2 else 0 :: 4 // half] = calls[:half]
    backward[:: 4 // half] = reversed(calls[half:])
    names = ("f", "g") if half == 2 else ("gather", "scatter")  # those of sequence parallelism
    text = [f"{names[i % 2]}: forward {forward[i]}, backward {backward[i]}" for i in range(4)]
    picture = plot.Picture(9, 3.1, "\n".join([title, *text]))
    ax = picture.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 10), ylim=(3.5, 0))
    ax.set_axis_off()
    ax.text(0.1, 0.25, title, fontsize=11.5, fontweight="bold")
    ax.annotate("", (9.9, 1.8), (0.1, 1.8), arrowprops={"arrowstyle": "->"})
    look = {"ha": "center", "va": "center", "fontsize": 8}
    high = 1.2 / len(result)
    for left, name in ((1.6, "its heads"), (6.4, "its part of the MLP")):
        for rank in range(len(result)):
            y, color = 1.2 + (rank + 0.45) * high, plot.rank_color(rank)
            ax.barh(y, 2.2, 0.9 * high, left, color=color, alpha=0.5)
            ax.text(left + 1.1, y, f"rank {rank}: {name}", **look)
    for i, x in enumerate((0.8, 4.5, 5.7, 9.2)):
        ax.text(x, 1.8, names[i % 2], bbox={"boxstyle": "round", "facecolor": "w"}, **look)
        there, back = (name.replace(" of ", "\n") for name in (forward[i], backward[i]))
        ax.text(x, 0.85, f"forward \N{RIGHTWARDS ARROW}\n{there}", **look)
        ax.text(x, 2.8, f"\N{LEFTWARDS ARROW} backward\n{back}", **look)
    if half == 4:
        ax.text(5, 3.3, "Before, between and after, each rank has its own positions.", **look)
    return picture


@lesson_main("tensor_parallel")
def main(ranks: Ranks) -> str:
    """Train in each way, compare with one process, and print one line."""
    n, config = ranks.world_size, CONFIG
    if config.heads % n:  # the next sizes that n ranks can share
        context, vocabulary = (-(-size // n) * n for size in (config.context, config.vocabulary))
        config = Config(heads=n, width=16 * n, context=context, vocabulary=vocabulary)
    settings = ADAM, 3, torch.float32, config
    alone = train_alone(*settings)
    in_sequence = partial(lesson.cut_gpt, regions=lesson.SEQUENCE)
    places = partial(own_places, config.context)
    ways = {
        "by hand": (lesson.learn, lesson.cut_gpt, *settings),
        "by hand, sequence": (lesson.learn, in_sequence, *settings, places, lesson.finish),
        "parallelize_module": (lesson.learn_with_plan, False, *settings),
        "parallelize_module, sequence": (lesson.learn_with_plan, True, *settings),
    }
    for way, worker in ways.items():
        result = ranks(*worker)
        terms = 1024 * n  # the ranks' partial sums are added as well
        prove(f"{way} trains as one process does", compare(result, alone, terms=terms))
    return "by hand and PyTorch's own train as one process does"


from ddp_kit.lessons import tensor_parallel as lesson
