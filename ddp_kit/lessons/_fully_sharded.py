"""ZeRO stage 3 by hand: each rank keeps some rows of every weight, and gathers all for a moment.

    rows    what a rank keeps of a weight: equally many on all ranks, the last ones may be zeros
    full    the whole weight, which has memory only while its module computes

Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020); Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.lessons._nested_tensors import cast, with_gradients
from ddp_kit.lessons.collectives import all_gather_single, reduce_scatter_single


def fill_up(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with rows of zeros below, so that all ranks get equally many."""
    tensor = torch.atleast_1d(tensor)
    missing = -len(tensor) % dist.get_world_size()
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def own_rows(filled: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's rows of a tensor that `fill_up` returned."""
    return filled.chunk(dist.get_world_size())[dist.get_rank()]


def cut(filled: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor from `fill_up` without what fills it up, in the shape of `like`."""
    return filled.view(-1)[: like.numel()].view_as(like)


class ShardedGradient:
    """Averages the gradient of a parameter so that each rank gets that of its own rows only.

    full: the parameter; its gradient is freed as soon as it is complete and on its way. rows: this
    rank's, as a parameter for an optimizer. under_way: the parameters of a model whose gradients
    are on their way, two at most; the model's others have the same deque.
    """

    def __init__(self, full: nn.Parameter, rows: nn.Parameter, under_way: deque) -> None:
        self.full, self.rows, self.under_way = full, rows, under_way
        self.reducing = None
        if full.requires_grad:
            full.register_post_accumulate_grad_hook(self.start_reduce)

    def start_reduce(self, full: torch.Tensor) -> None:
        """Begin to average the gradient of `full`, and free it."""
        self.finish_reduce()  # of an earlier backward
        if len(self.under_way) == 2:
            self.under_way.popleft().finish_reduce()
        gradient = fill_up(full.grad.to(self.rows.dtype) / dist.get_world_size())
        full.grad, arriving = None, torch.empty_like(self.rows)
        work = reduce_scatter_single(arriving, gradient, async_op=True)
        self.reducing = gradient, arriving, work
        self.under_way.append(self)

    def finish_reduce(self) -> None:
        """Wait for the mean gradient, and add it to `rows.grad`; free the whole one."""
        if self.reducing is not None:
            (_, arriving, work), self.reducing = self.reducing, None
            work.wait()
            self.rows.grad = arriving if self.rows.grad is None else self.rows.grad + arriving


class FreedParameter(ShardedGradient):
    """A parameter of which this rank keeps its rows, and frees the memory of the others.

    full: all rows, without memory at first.
    """

    def __init__(self, parameter: nn.Parameter, under_way: deque) -> None:
        self.filled = fill_up(parameter.detach())
        self.memory, self.gathering = self.filled.untyped_storage(), None
        self.nbytes = self.memory.nbytes()
        # Autograd counts what is written into a tensor, but not what is written through .data.
        full = nn.Parameter(cut(self.filled.data, parameter), parameter.requires_grad)
        rows = nn.Parameter(own_rows(self.filled).clone(), parameter.requires_grad)
        super().__init__(full, rows, under_way)
        self.free()

    def free(self) -> None:
        """Free the memory of `full`, to which the graph of the forward goes on to refer."""
        self.finish_gather()
        self.memory.resize_(0)

    def finish_gather(self) -> None:
        """Wait for rows that are on their way."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def start_reduce(self, full: torch.Tensor) -> None:
        """Begin to average the gradient of `full`, and free both."""
        super().start_reduce(full)
        self.free()


class ShardedParameter(FreedParameter):
    """A parameter of which this rank keeps its rows, and has all of them while it computes.

    The memory of the others comes with `gather` and goes with `free`.
    """

    def start_gather(self) -> None:
        """Begin to gather the rows of all ranks, unless they are here or on their way."""
        if self.memory.nbytes() == 0:
            self.memory.resize_(self.nbytes)
            mine = self.rows.detach().to(self.filled.dtype)
            self.gathering = all_gather_single(self.filled, mine, async_op=True)

    def gather(self) -> None:
        """Gather the rows of all ranks, so that `full` is complete."""
        self.start_gather()
        self.finish_gather()

    def gather_copy(self) -> torch.Tensor:
        """Return the whole parameter, in the dtype of `rows`."""
        filled = self.rows.new_empty(self.filled.shape)
        all_gather_single(filled, self.rows.detach())
        return cut(filled, self.full)


class WholeParameter(ShardedGradient):
    """A small parameter that every rank keeps whole; its gradient is averaged, too.

    rows: all of them. full: the same memory, or a copy in the dtype in which the module computes.
    """

    def __init__(self, parameter: nn.Parameter, under_way: deque, dtype: torch.dtype) -> None:
        rows = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        self.filled = rows.detach().to(dtype)
        full = nn.Parameter(self.filled.data, parameter.requires_grad)
        super().__init__(full, rows, under_way)

    def start_reduce(self, full: torch.Tensor) -> None:
        """Begin to average the gradient of `full`, and free it."""
        self.finish_reduce()  # of an earlier backward
        if len(self.under_way) == 2:
            self.under_way.popleft().finish_reduce()
        gradient, full.grad = full.grad.to(self.rows.dtype) / dist.get_world_size(), None
        self.reducing = gradient, gradient, dist.all_reduce(gradient, async_op=True)
        self.under_way.append(self)

    def start_gather(self) -> None:
        """Copy what the optimizer has trained into `full`."""
        self.filled.copy_(self.rows.detach())

    gather = start_gather

    def free(self) -> None:
        """Free nothing."""

    def gather_copy(self) -> torch.Tensor:
        """Return a copy of the parameter, in the dtype of `rows`."""
        return self.rows.detach().clone()


class ShardedModule(nn.Module):
    """Replaces the parameters of a module by this rank's rows of them.

    All ranks start with the parameters and buffers of rank 0.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.under_way = module, deque()
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        shards = {parameter: self.shard(parameter) for parameter in module.parameters()}
        self.sharded, self.own = [*shards.values()], {}  # nothing keeps the whole parameters
        for each in module.modules():
            named = [*each.named_parameters(recurse=False, remove_duplicate=False)]
            if named:
                self.own[each] = {name: shards[parameter] for name, parameter in named}
                self.show(each, "rows")

    def shard(self, parameter: nn.Parameter) -> ShardedParameter | WholeParameter:
        """Return what replaces a parameter."""
        return ShardedParameter(parameter, self.under_way)

    def show(self, module: nn.Module, which: str) -> None:
        """Let the parameters of a module be its "rows", or the "full" ones."""
        for name, parameter in self.own[module].items():
            setattr(module, name, getattr(parameter, which))


class UnshardedOnDemand(ShardedModule):
    """Gathers a module's parameters before its forward and its backward, and frees them after."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        for each in self.own:
            each.register_forward_pre_hook(self.before_forward)
            each.register_forward_hook(self.after_forward)

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Let a module have its full parameters."""
        self.gather(module)
        self.show(module, "full")

    def after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Free a module's parameters until its backward begins."""
        self.show(module, "rows")
        for parameter in self.own[module].values():
            parameter.free()
        for tensor in with_gradients(output):
            tensor.register_hook(partial(self.before_backward, module))

    def before_backward(self, module: nn.Module, _: torch.Tensor) -> None:
        """Gather a module's parameters again; they are freed with their gradients."""
        self.gather(module)

    def gather(self, module: nn.Module) -> None:
        """Gather a module's parameters."""
        for parameter in self.own[module].values():
            parameter.gather()


class Prefetching(UnshardedOnDemand):
    """Begins to gather a module's parameters while the module before it computes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.ran, self.next, self.previous = [], {}, {}  # modules, as seen in the forwards

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Let a module have its full parameters, and begin to gather those of the next one."""
        super().before_forward(module, _)
        if self.ran:
            self.next[self.ran[-1]], self.previous[module] = module, self.ran[-1]
        self.ran.append(module)
        self.prefetch(self.next.get(module))

    def before_backward(self, module: nn.Module, _: torch.Tensor) -> None:
        """Gather a module's parameters again, and begin to gather those of the one before."""
        super().before_backward(module, _)
        self.prefetch(self.previous.get(module))

    def prefetch(self, module: nn.Module | None) -> None:
        """Begin to gather a module's parameters."""
        for parameter in self.own.get(module, {}).values():
            parameter.start_gather()


class FullySharded(Prefetching):
    """Trains a module of which every rank keeps only some rows of each weight: ZeRO stage 3.

    A module's own parameters are complete only while its forward or backward runs.

    `parameters()` are the rows: give them to an optimizer. Call `finish_gradient_synchronization`
    after the last backward before its step. All ranks must run the same modules in the same order.
    A module must return a tensor, or tuples, lists or dicts of tensors. A frozen weight that is
    gathered for the backward is freed only by `finish_gradient_synchronization`, because what frees
    a weight in the backward is its gradient.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module."""
        self.ran.clear()
        return self.module(*inputs, **named)

    def finish_gradient_synchronization(self) -> None:
        """Wait until all mean gradients have arrived. Free what a backward did not need."""
        while self.under_way:
            self.under_way.popleft().finish_reduce()
        for parameter in self.sharded:
            parameter.free()

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters under the names that they have in the module."""
        whole = {parameter.rows: parameter for parameter in self.sharded}
        return {name: whole[rows].gather_copy() for name, rows in self.module.named_parameters()}


class FullyShardedDataParallel(FullySharded):
    """Trains as `FullySharded` does, with small parameters whole, and in any precision.

    Parameters of one dimension, such as those of norms and biases, stay whole on every rank: they
    need little memory, and are not worth a gather. compute_dtype: of the forward and the backward,
    such as torch.float16; what the optimizer trains stays in its own dtype, as do the gradients
    that are averaged, and so does the output. None: the dtype of the parameters.

    Raises RuntimeError if a module inside it runs on its own, as in activation checkpointing, which
    runs the forward again during the backward.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        self.compute_dtype, self.is_in_forward = compute_dtype, False
        super().__init__(module)

    def shard(self, parameter: nn.Parameter) -> ShardedParameter | WholeParameter:
        """Return what replaces a parameter."""
        dtype = self.compute_dtype or parameter.dtype
        if parameter.ndim < 2:
            return WholeParameter(parameter, self.under_way, dtype)
        low = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        sharded = super().shard(low)
        if dtype != parameter.dtype:
            whole = fill_up(parameter.detach())
            sharded.rows = nn.Parameter(own_rows(whole).clone(), parameter.requires_grad)
        return sharded

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the module; its output has the dtype of the rows and not `compute_dtype`."""
        self.is_in_forward = True
        try:
            if self.compute_dtype is None:
                return super().forward(*inputs, **named)
            inputs, named = cast((inputs, named), self.compute_dtype)
            return cast(super().forward(*inputs, **named), next(self.parameters()).dtype)
        finally:
            self.is_in_forward = False

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Let a module have its full parameters, within a forward of the whole."""
        if not self.is_in_forward:
            raise RuntimeError(
                "a module inside FullyShardedDataParallel ran outside of its forward: activation "
                "checkpointing is not supported; call the wrapped module itself"
            )
        super().before_forward(module, _)
