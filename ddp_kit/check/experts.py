"""Graders of lesson 19: routing, tokens that travel to experts and back, capacity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ddp_kit.check.compared import alone, compared, hunt
from ddp_kit.check.grader import SIZES, own_group
from ddp_kit.lessons import experts as lesson

SCORES = torch.tensor(
    [[0.6, 0.3, 0.5, 0.2], [0.1, 0.9, 0.4, 0.8], [0.7, 0.6, 0.2, 0.3], [0.2, 0.4, 0.9, 0.5]]
)


@alone("19.a", "route(scores, bias, k)", "with a bias and without")
def _route(route: Callable) -> dict:
    found = {}
    for name, bias in (("without a bias", 0.0), ("with a bias for expert 3", 0.4)):
        scores = SCORES.clone().requires_grad_()
        weights, choice = route(scores, torch.tensor([0.0, 0.0, 0.0, bias]), 2)
        choice, order = choice.sort(-1)  # the best first, or in another order
        weights = weights.gather(-1, order)
        (weights * torch.tensor([1.0, 3.0])).sum().backward()
        found |= {f"choice {name}": choice, f"weights {name}": weights.detach()}
        found[f"scores.grad {name}"] = scores.grad
    return found | {"the choice of one": route(SCORES, torch.zeros(4), 1)[1]}


def _tokens(rank: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and choices, as many as the rank needs; nobody chooses expert 1."""
    count = torch.arange(3.0 + 2 * rank)
    choice = torch.stack([5 * torch.arange(len(count)) + rank, torch.arange(len(count))], 1) % (
        2 * n
    )
    return torch.stack([100 * (rank + 1) + count, count], 1), choice.where(choice != 1, 0)


@compared("19.b", "dispatch(tokens, choice, count, group)")
def _dispatch(rank: int, n: int, dispatch: Callable) -> dict:
    tokens, choice = _tokens(rank, n)
    arrived, counts, (_, *splits) = dispatch(tokens.requires_grad_(), choice, 2 * n)
    (arrived * (rank + torch.arange(1.0, 1 + len(arrived)))[:, None]).sum().backward()
    found = {"the rows that arrive": arrived.detach(), "counts": counts, "splits": [*splits]}
    found["the rows with one expert for each"] = dispatch(tokens, choice[:, :1], 2 * n)[0].detach()
    alone = dispatch(tokens, choice, 2 * n, own_group(rank, n))[0]
    found["the rows in a group of one rank"] = alone.detach()
    return found | {"tokens.grad": tokens.grad}


@compared("19.c", "combine(done, weights, plan, group)")
def _combine(rank: int, n: int, combine: Callable) -> dict:
    tokens, both = _tokens(rank, n)
    found = {}
    for name, choice, group in (
        ("", both, None),
        (" with one expert for each", both[:, :1], None),
        (" in a group of one rank", both, own_group(rank, n)),
    ):
        arrived, _, plan = lesson.dispatch(tokens, choice, 2 * n, group)
        done = (2 * arrived + 1000 * (rank + 1)).detach().requires_grad_()
        weights = torch.linspace(0.1, 0.9, choice.numel()).view_as(choice).requires_grad_()
        output = combine(done, weights, plan, group)
        (output * tokens).sum().backward()
        found |= {f"the output{name}": output.detach(), f"done.grad{name}": done.grad}
        found[f"weights.grad{name}"] = weights.grad
    return found


@compared("19.1", "violation(choice, count)", sizes=SIZES, spare=None)
def _violation(rank: int, n: int, violation: Callable) -> dict:
    cases = {
        "with tokens as in 19.b": _tokens(rank, n)[1],
        "with one expert for all": torch.ones(3, 2).long(),
    }
    return {name: torch.as_tensor(violation(choice, 2 * n)) for name, choice in cases.items()}


@alone("19.2", "route_within(scores, hosts, most)", "for 1, 2 and 4 hosts")
def _route_within(route_within: Callable) -> dict:
    scores = torch.rand(6, 12, generator=torch.Generator().manual_seed(2))
    return {
        f"at most {m} of 4 hosts": route_within(scores, 4, m).sort(-1).values for m in (1, 2, 4)
    }


hunt("19.8")


@compared("19.9", "with_capacity(tokens, scores, experts, capacity)", kind="function", spare=1.25)
def _with_capacity(rank: int, n: int, with_capacity: Callable) -> dict:
    found = {}
    generator = torch.Generator().manual_seed(rank)
    for capacity in (2, 5):
        tokens = torch.randn(6, 4, generator=generator, dtype=torch.double).requires_grad_()
        scores = torch.rand(6, 2 * n, generator=generator, dtype=torch.double).requires_grad_()
        experts = [nn.Linear(4, 4).double() for _ in range(2)]
        for number, expert in enumerate(experts):
            for parameter in expert.parameters():
                nn.init.constant_(parameter, 0.1 * (2 * rank + number + 1))
        output = with_capacity(tokens, scores, experts, capacity)
        (output * torch.arange(1.0, 5)).sum().backward()
        found |= {f"the output with capacity {capacity}": output.detach()}
        found |= {f"tokens.grad with capacity {capacity}": tokens.grad}
        found |= {f"scores.grad with capacity {capacity}": scores.grad}
        found |= {f"expert {i}, capacity {capacity}": e.weight.grad for i, e in enumerate(experts)}
    return found
