"""Experts on several ranks: each token travels to the rank of its expert, and back.

A part of lesson 18.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit import device
from ddp_kit.lessons._all_to_all import AllToAll
from ddp_kit.lessons._ring_attention import cut

WIDTH = 8  # of a token


def route(router: nn.Linear, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the number of the expert that each token goes to."""
    weight, choice = torch.softmax(router(tokens), -1).max(-1)
    return weight, choice


def counts_of(choice: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return how many tokens go to each rank, and how many come from each."""
    going = torch.bincount(choice, minlength=dist.get_world_size())
    coming = torch.empty_like(going)
    dist.all_to_all_single(coming, going)
    return going.tolist(), coming.tolist()


class Experts(nn.Module):
    """A layer of experts, one on each rank: a token goes to the one that its router chooses.

    Every rank has the whole router, and tokens of its own. Sources: Lepikhin et al., "GShard"
    (2020), https://arxiv.org/abs/2006.16668; Fedus et al., "Switch Transformers" (2021),
    https://arxiv.org/abs/2101.03961.
    """

    def __init__(self, router: nn.Linear, expert: nn.Module) -> None:
        super().__init__()
        self.router, self.expert = router, expert

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens of shape (count, width)."""
        weight, choice = route(self.router, tokens)
        order = choice.argsort(stable=True)
        going, coming = counts_of(choice)
        arrived = AllToAll.apply(tokens[order], going, coming)
        back = AllToAll.apply(self.expert(arrived), coming, going)
        return weight[:, None] * back[order.argsort()]


class AllExperts(nn.Module):
    """The same layer in one process that has all experts."""

    def __init__(self, router: nn.Linear, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = router, nn.ModuleList(experts)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens of shape (count, width)."""
        weight, choice = route(self.router, tokens)
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            output[choice == number] = expert(tokens[choice == number])
        return weight[:, None] * output


def make_experts(n: int, skew: float = 0.0) -> tuple[nn.Linear, list[nn.Module]]:
    """Return a router and n experts, the same in every process.

    skew: is added to the router's scores of expert 0.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        router = nn.Linear(WIDTH, n)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(n)
        ]
    router.bias.data[0] += skew
    return router.to(device()), [expert.to(device()) for expert in experts]


def some_tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of shape (count, WIDTH), and a gradient of what becomes of them."""
    generator = torch.Generator().manual_seed(1)
    tokens, gradient = torch.randn(2, count, WIDTH, generator=generator).to(device())
    return tokens, gradient


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of all parameters."""
    return [parameter.grad for parameter in module.parameters()]


def use_experts(rank: int, world_size: int, count: int = 64, skew: float = 0.0) -> dict[str, Any]:
    """Send this rank's part of `count` tokens through the expert of each, forward and backward.

    Returns "output" and "tokens" (the gradient), of this rank's tokens; "router" and "expert",
    lists of gradients; "received": how many tokens came from each rank.
    """
    router, experts = make_experts(world_size, skew)
    own = cut(count, world_size)[rank]
    tokens, gradient = (x[own.start : own.stop] for x in some_tokens(count))
    output = Experts(router, experts[rank])(tokens.requires_grad_())
    output.backward(gradient)
    for summand in gradients(router):
        dist.all_reduce(summand)
    received = counts_of(route(router, tokens)[1])[1]
    return {
        "output": output.detach(),
        "tokens": tokens.grad,
        "router": gradients(router),
        "expert": gradients(experts[rank]),
        "received": received,
    }


def use_experts_alone(n: int, count: int = 64, skew: float = 0.0) -> list[dict[str, Any]]:
    """Return what each rank should, without "received", from one process with all experts."""
    router, experts = make_experts(n, skew)
    tokens, gradient = some_tokens(count)
    output = AllExperts(router, experts)(tokens.requires_grad_())
    output.backward(gradient)
    return [
        {
            "output": output.detach()[own.start : own.stop],
            "tokens": tokens.grad[own.start : own.stop],
            "router": gradients(router),
            "expert": gradients(experts[rank]),
        }
        for rank, own in enumerate(cut(count, n))
    ]
