"""Graders of lesson 13: a GPT, what it costs on one rank, and what makes it cost less."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ddp_kit.check.compared import alone, asked, hunt
from ddp_kit.lessons._gpt import Config, batches, make_gpt
from ddp_kit.lessons.one_rank_first import Kept


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _parameters(*shape: int, seed: int = 1) -> nn.Parameter:
    return nn.Parameter(_numbers(*shape, seed=seed) / 4)


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@alone("13.a", "Attention(config)", "for two sequences and four heads")
def _attention(attention_cls: Callable) -> torch.Tensor:
    attention = attention_cls(Config())
    for seed, name in enumerate(("query", "key", "value", "out")):
        getattr(attention, name).weight = _parameters(64, 64, seed=seed)
    # Other kernels round differently: in float64, that does not show.
    return attention.double()(_numbers(2, 5, 64).double()).detach()


asked(
    "13.b",
    "flops_per_token(layers, width, context, vocabulary)",
    [(2, 64, 64, 128), (12, 768, 1024, 50_257), (4, 128, 65_536, 256)],
    where="for three models",
)
asked(
    "13.c",
    "layer_keeps(tokens, width, heads, size)",
    [(384, 64, 4, 4), (1, 32, 2, 4), (100, 4096, 32, 2)],
    where="for three blocks",
)


@alone("13.d", "accumulate(model, inputs, targets, micro_batches)", "with 2 and 6 micro-batches")
def _accumulated(accumulate: Callable) -> dict:
    found = {}
    for count in (2, 6):
        model = make_gpt()
        forwards = _noted_forwards(model)
        found[f"the loss of {count} micro-batches"] = accumulate(model, *next(batches(6, 1)), count)
        found[f"the gradients of {count} micro-batches"] = _gradients(model)
        found[f"the sequences of {count} forwards, and whether there were gradients"] = forwards
    return found


def _noted_forwards(model: nn.Module) -> list[tuple[int, bool]]:
    """Return a list to which each forward adds: its sequences, and whether gradients are there."""
    first, forwards = next(model.parameters()), []
    model.register_forward_pre_hook(
        lambda _, given: forwards.append((len(given[0]), first.grad is not None))
    )
    return forwards


@alone("13.1", "loss_in_pieces(head, x, targets, pieces)", "in 8 pieces")
def _loss_in_pieces(loss_in_pieces: Callable) -> dict:
    head, x = nn.Linear(16, 512, bias=False), _parameters(256, 16, seed=0)
    head.weight = _parameters(512, 16)
    with Kept() as kept:
        loss = loss_in_pieces(head, x, torch.arange(256), 8)
    most = 4 * 256 * 512 // 4  # a quarter of all logits
    found = {"the loss": loss.item(), f"'kept at most {most:,} bytes'": kept.nbytes <= most}
    loss.backward()
    return found | {"the gradients": [x.grad, head.weight.grad]}


@alone("13.2", "recomputed(function)", "for a function of two tensors")
def _recomputed(recomputed: Callable) -> dict:
    x, weight = _parameters(64, 16, seed=0), _parameters(16, 16)
    out = recomputed(lambda x, weight: F.gelu(F.gelu(x @ weight) @ weight))(x, weight)
    out.backward(_numbers(64, 16, seed=2))
    return {"the result": out.detach(), "the gradients": [x.grad, weight.grad]}


hunt("13.8")


@alone(
    "13.9",
    "train_step(model, optimizer, inputs, targets, micro_batches, max_norm)",
    "in three steps, one with a loss that is not a number",
    kind="function",
)
def _train_step(train_step: Callable) -> dict:
    model = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = _numbers(*parameter.shape, seed=seed) / 4
    optimizer, factor, seen = torch.optim.SGD(model.parameters(), lr=0.5), 1.0, []
    model[0].register_forward_hook(lambda *_: seen.append(kept.nbytes))
    model.register_forward_hook(lambda module, args, logits: factor * logits)
    tokens, found = torch.arange(4 * 2 * 8).view(8, 8) % 16, {}
    for step, (max_norm, factor) in enumerate(((100.0, 1.0), (0.1, 1.0), (0.1, float("nan"))), 1):
        seen.clear()
        with Kept() as kept:
            loss, norm = train_step(model, optimizer, tokens, tokens.roll(1, 1), 4, max_norm)
        if factor == 1:
            found |= {f"the loss of step {step}": loss, f"the norm of step {step}": norm}
        found[f"the parameters after step {step}"] = [
            p.detach().clone() for p in model.parameters()
        ]
        found[f"the gradients after step {step}"] = _gradients(model)
        # The second micro-batch finds the gradients of the first one, and so does the last one.
        held = seen[-1] - seen[1] if len(seen) == 4 else None
        found[f"'step {step} frees activations'"] = held is not None and held < 1000
    return found
