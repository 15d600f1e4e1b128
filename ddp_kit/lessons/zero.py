# Made from notebooks/15_zero.ipynb by `make editions`: edit that, not this. b3de0f01451a
"""ZeRO: no rank keeps what another has."""

from collections import deque
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import ddp_kit as kit
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._zero import (
    ADAM,
    BATCH,
    OPTIMIZERS,
    SGD,
    WAYS,
    Training,
    bytes_per_step,
    copies,
    count_bytes,
    expected_bytes,
    expected_memory,
    explore,
    filled_bytes,
    held,
    hold,
    main,
    memory,
    on_gloo,
    starter,
    train_alone,
    watch_layers,
    watch_memory,
    with_gradients,
)
from ddp_kit.lessons.collectives import all_gather_single, reduce_scatter_single


def take_steps(training, data, rank, world_size):
    losses = []
    for batch in data:
        training.optimizer.zero_grad()
        loss = loss_of(training.model, *part_of(batch, rank, world_size))
        loss.backward()
        training.finish()
        training.optimizer.step()
        training.after()
        losses.append(loss.item())
    return losses


def learn(rank, world_size, stage, steps=3):
    training = stage(make_gpt())
    take_steps(training, batches(12, steps), rank, world_size)
    return {"parameters": training.full(), "held": held(training)}


class Owners:
    def __init__(self):
        self.of = {}
        self.load = [0] * dist.get_world_size()

    def assign(self, parameters):
        for parameter in sorted(parameters, key=torch.numel, reverse=True):
            owner = self.load.index(min(self.load))
            self.of[parameter] = owner
            self.load[owner] += parameter.numel()
        return [parameter for parameter in parameters if self.of[parameter] == dist.get_rank()]


def settings(group):
    return {name: value for name, value in group.items() if name != "params"}


class Partition(Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.make = partial(optimizer_cls, **kwargs)
        self.inner = None
        self.owners = Owners()
        super().__init__(params, kwargs)

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        mine = self.owners.assign(group["params"])
        if self.inner is None:
            self.inner = self.make([settings(group) | {"params": mine}])
            self.state = self.inner.state
        else:
            self.inner.add_param_group(settings(group) | {"params": mine})
        group.update(settings(self.inner.param_groups[-1]))


class ShardedStep(Partition):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, mine in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(settings(group))
        self.inner.step()
        sent = [dist.broadcast(p.data, src, async_op=True) for p, src in self.owners.of.items()]
        for work in sent:
            work.wait()
        return loss


def stage_0(model, optimizer_cls=ADAM):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training(wrapped, optimizer_cls(model.parameters()), partial(copies, model))


def stage_1(model, optimizer_cls=ADAM):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ShardedStep(model.parameters(), optimizer_cls)
    return Training(wrapped, optimizer, partial(copies, model))


def fill_up(tensor):
    tensor = torch.atleast_1d(tensor)
    missing = -len(tensor) % dist.get_world_size()
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def own_rows(filled):
    return filled.chunk(dist.get_world_size())[dist.get_rank()]


def cut(filled, like):
    return filled.view(-1)[: like.numel()].view_as(like)


class Reduced:
    def __init__(self, full, rows, under_way):
        self.full, self.rows, self.under_way = (full, rows, under_way)
        self.reducing = None
        if full.requires_grad:
            full.register_post_accumulate_grad_hook(self.start_reduce)

    def finish_reduce(self):
        if self.reducing is not None:
            (_, arriving, work), self.reducing = (self.reducing, None)
            work.wait()
            self.rows.grad = arriving if self.rows.grad is None else self.rows.grad + arriving


class ShardedGradient(Reduced):
    def start_reduce(self, full):
        self.finish_reduce()  # of an earlier backward
        if len(self.under_way) == 2:
            self.under_way.popleft().finish_reduce()
        gradient = full.grad.to(self.rows.dtype)
        gradient = fill_up(gradient / dist.get_world_size())
        arriving = torch.empty_like(self.rows)
        work = reduce_scatter_single(arriving, gradient, async_op=True)
        self.reducing = (gradient, arriving, work)
        self.under_way.append(self)
        full.grad = None


class ReplicatedParameter(ShardedGradient):
    def __init__(self, parameter, under_way):
        self.filled = fill_up(parameter.detach())
        parameter.data = cut(self.filled, parameter)
        super().__init__(parameter, nn.Parameter(own_rows(self.filled)), under_way)

    def gather(self):
        all_gather_single(self.filled, self.rows.detach())


class ShardedGradients:
    def __init__(self, parameters):
        self.under_way, kept = (deque(), [p for p in parameters if p.requires_grad])
        self.sharded = [ReplicatedParameter(parameter, self.under_way) for parameter in kept]
        self.rows = [parameter.rows for parameter in self.sharded]

    def finish_gradient_synchronization(self):
        while self.under_way:
            self.under_way.popleft().finish_reduce()

    def gather(self):
        for parameter in self.sharded:
            parameter.gather()


def stage_2(model, optimizer_cls=ADAM):
    sharded = ShardedGradients(model.parameters())
    full, optimizer = partial(copies, model), optimizer_cls(sharded.rows)
    finish = sharded.finish_gradient_synchronization
    return Training(model, optimizer, full, finish, sharded.gather, sharded.sharded)


class FreedParameter(ShardedGradient):
    def __init__(self, parameter, under_way):
        self.filled = fill_up(parameter.detach())
        self.memory, self.gathering = (self.filled.untyped_storage(), None)
        self.nbytes = self.memory.nbytes()
        # Autograd counts what is written into a tensor, but not what is written through .data.
        full = nn.Parameter(cut(self.filled.data, parameter), parameter.requires_grad)
        rows = nn.Parameter(own_rows(self.filled).clone(), parameter.requires_grad)
        super().__init__(full, rows, under_way)
        self.free()

    def free(self):
        self.finish_gather()
        self.memory.resize_(0)

    def finish_gather(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def start_reduce(self, full):
        super().start_reduce(full)
        self.free()


class ShardedParameter(FreedParameter):
    def start_gather(self):
        if self.memory.nbytes() == 0:
            self.memory.resize_(self.nbytes)
            mine = self.rows.detach().to(self.filled.dtype)
            self.gathering = all_gather_single(self.filled, mine, async_op=True)

    def gather(self):
        self.start_gather()
        self.finish_gather()

    def gather_copy(self):
        filled = self.rows.new_empty(self.filled.shape)
        all_gather_single(filled, self.rows.detach())
        return cut(filled, self.full)


class ShardedModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.under_way = (module, deque())
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        shards = {parameter: self.shard(parameter) for parameter in module.parameters()}
        self.sharded, self.own = ([*shards.values()], {})  # nothing keeps the whole parameters
        for each in module.modules():
            named = [*each.named_parameters(recurse=False, remove_duplicate=False)]
            if named:
                self.own[each] = {name: shards[parameter] for name, parameter in named}
                self.show(each, "rows")

    def shard(self, parameter):
        return ShardedParameter(parameter, self.under_way)

    def show(self, module, which):
        for name, parameter in self.own[module].items():
            setattr(module, name, getattr(parameter, which))


class Hooked(ShardedModule):
    def __init__(self, module):
        super().__init__(module)
        for each in self.own:
            each.register_forward_pre_hook(self.before_forward)
            each.register_forward_hook(self.after_forward)

    def gather(self, module):
        for parameter in self.own[module].values():
            parameter.gather()

    def before_backward(self, module, _):
        self.gather(module)


class UnshardedOnDemand(Hooked):
    def before_forward(self, module, _):
        self.gather(module)
        self.show(module, "full")

    def after_forward(self, module, _, output):
        self.show(module, "rows")
        for parameter in self.own[module].values():
            parameter.free()
        for tensor in with_gradients(output):
            tensor.register_hook(partial(self.before_backward, module))


class Prefetching(UnshardedOnDemand):
    def __init__(self, module):
        super().__init__(module)
        self.ran, self.next, self.previous = ([], {}, {})

    def before_forward(self, module, _):
        super().before_forward(module, _)
        if self.ran:
            self.next[self.ran[-1]], self.previous[module] = (module, self.ran[-1])
        self.ran.append(module)
        self.prefetch(self.next.get(module))

    def before_backward(self, module, _):
        super().before_backward(module, _)
        self.prefetch(self.previous.get(module))

    def prefetch(self, module):
        for parameter in self.own.get(module, {}).values():
            parameter.start_gather()


class FullySharded(Prefetching):
    def forward(self, *inputs, **named):
        self.ran.clear()
        return self.module(*inputs, **named)

    def finish_gradient_synchronization(self):
        while self.under_way:
            self.under_way.popleft().finish_reduce()
        for parameter in self.sharded:
            parameter.free()

    def gather_full_params(self):
        whole = {parameter.rows: parameter for parameter in self.sharded}
        return {name: whole[rows].gather_copy() for name, rows in self.module.named_parameters()}


def stage_3(model, optimizer_cls=ADAM):
    sharded = FullySharded(model)
    full, optimizer = sharded.gather_full_params, optimizer_cls(sharded.parameters())
    finish = sharded.finish_gradient_synchronization
    return Training(sharded, optimizer, full, finish, sharded=sharded.sharded)


def start_zero_redundancy(model, optimizer_cls=ADAM):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_cls)
    return Training(wrapped, optimizer, partial(copies, model))


def start_fully_shard(model, optimizer_cls=ADAM):
    mesh = init_device_mesh(kit.device().type, (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)

    def full():
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    return Training(model, optimizer_cls(model.parameters()), full)


def train_and_save(rank, world_size, folder):
    training = start_fully_shard(make_gpt())
    take_steps(training, batches(BATCH, 2), rank, world_size)
    parameters, states = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)


def load_and_train(rank, world_size, folder):
    training = start_fully_shard(make_gpt())
    parameters, states = get_state_dict(training.model, training.optimizer)
    loaded = {"model": parameters, "optimizer": states}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    take_steps(training, islice(batches(BATCH, 3), 2, None), rank, world_size)
    return training.full()


if __name__ == "__main__":
    run_as_script(main)
