"""ZeRO stages 1 and 2 by hand: shard the states of the optimizer, then the gradients, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_kit.lessons._fully_sharded import ShardedGradient, cut, fill_up, own_rows
from ddp_kit.lessons.collectives import all_gather_single


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group of parameters without the parameters: lr, betas and so on."""
    return {name: value for name, value in group.items() if name != "params"}


class Owners:
    """Which rank updates which parameter.

    of: the rank of each parameter. load: how many elements each rank has.
    """

    def __init__(self) -> None:
        self.of: dict[torch.Tensor, int] = {}
        self.load = [0] * dist.get_world_size()

    def assign(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Give each parameter, large ones first, to the rank that has least; return own ones."""
        for parameter in sorted(parameters, key=torch.numel, reverse=True):
            owner = self.load.index(min(self.load))
            self.of[parameter] = owner
            self.load[owner] += parameter.numel()
        return [parameter for parameter in parameters if self.of[parameter] == dist.get_rank()]


class Partition(Optimizer):
    """An optimizer that is split among the ranks: `inner` updates the share of this one."""

    def __init__(self, params: Iterable, optimizer_cls: type[Optimizer], **kwargs: Any) -> None:
        self.make = partial(optimizer_cls, **kwargs)
        self.inner: Optimizer | None = None
        self.owners = Owners()
        super().__init__(params, kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Divide the parameters of a new group among the ranks."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        mine = self.owners.assign(group["params"])
        if self.inner is None:
            self.inner = self.make([settings(group) | {"params": mine}])
            self.state = self.inner.state
        else:
            self.inner.add_param_group(settings(group) | {"params": mine})
        group.update(settings(self.inner.param_groups[-1]))  # with the optimizer's defaults


class ShardedStep(Partition):
    """Updates this rank's share of the parameters, and gets the others' shares."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update own parameters, then broadcast each from its owner; return closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, mine in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(settings(group))  # a scheduler may have changed them
        self.inner.step()
        sent = [dist.broadcast(p.data, src, async_op=True) for p, src in self.owners.of.items()]
        for work in sent:
            work.wait()
        return loss


class ShardedOptimizer(ShardedStep):
    """Updates this rank's share of the parameters, and gets the others' shares: ZeRO stage 1.

    params: as for any optimizer; every rank must have the same, with the same mean gradients.
    optimizer_cls, kwargs: the optimizer that updates a share, such as torch.optim.Adam, lr=1e-3.
    `state_dict()` has the states of this rank's share; `full_state_dict()` those of all.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any number of ranks, and keep what belongs to this rank's share."""
        super().load_state_dict(state_dict)
        rank = dist.get_rank()
        kept = {p: state for p, state in self.state.items() if self.owners.of.get(p) == rank}
        self.inner.state.clear()
        self.inner.state.update(kept)
        self.state = self.inner.state

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, as one optimizer would have it. All must call this."""
        parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, self.state_dict())
        states = {key: state for part in parts for key, state in part["state"].items()}
        return parts[0] | {"state": dict(sorted(states.items()))}


class ReplicatedParameter(ShardedGradient):
    """A parameter that every rank keeps whole, with a gradient for its own rows only.

    rows: a view of the parameter's own memory.
    """

    def __init__(self, parameter: nn.Parameter, under_way: deque) -> None:
        self.filled = fill_up(parameter.detach())
        parameter.data = cut(self.filled, parameter)
        super().__init__(parameter, nn.Parameter(own_rows(self.filled)), under_way)

    def gather(self) -> None:
        """Gather the rows that each rank has updated."""
        all_gather_single(self.filled, self.rows.detach())


class ShardedGradients:
    """Averages gradients so that each rank gets those of its own rows only: ZeRO stage 2.

    rows: this rank's of each parameter, for an optimizer. Call `finish_gradient_synchronization`
    before its step, and `gather` after it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.under_way, kept = deque(), [p for p in parameters if p.requires_grad]
        self.sharded = [ReplicatedParameter(parameter, self.under_way) for parameter in kept]
        self.rows = [parameter.rows for parameter in self.sharded]

    def finish_gradient_synchronization(self) -> None:
        """Wait until all mean gradients have arrived."""
        while self.under_way:
            self.under_way.popleft().finish_reduce()

    def gather(self) -> None:
        """Gather the rows that each rank has updated."""
        for parameter in self.sharded:
            parameter.gather()
