# Made from notebooks/15_zero.ipynb by `make editions`: edit that, not this.
"""ZeRO: no rank keeps what another has."""

from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit.lessons._gpt import batches, loss_of, make_gpt, part_of
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._zero import (
    ADAM,
    BATCH,
    SGD,
    WAYS,
    bytes_by_kind,
    bytes_per_step,
    copies,
    count_bytes,
    filled_bytes,
    fit,
    gradients_of,
    held,
    keeping,
    main,
    memory,
    states_of,
    train_alone,
)
from ddp_kit.lessons.collectives import all_gather_single, reduce_scatter_single


class Replicated:
    def __init__(self, model, optimizer_cls=ADAM):
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = optimizer_cls(model.parameters())

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self):
        return copies(self.model.module)


def train(training, data, rank, world_size):
    for batch in data:
        loss = loss_of(training.model, *part_of(batch, rank, world_size))
        loss.backward()
        kinds = held(training)
        training.step()
    return {"parameters": training.full(), "held": kinds, "loss": loss.item()}


def learn(rank, world_size, way, steps=3):
    return train(way(make_gpt()), batches(BATCH, steps), rank, world_size)


def parts(model):
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {p for block in blocks for p in block}
    return [[p for p in model.parameters() if p not in inside], *blocks]


def flatten(tensors):
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % dist.get_world_size()))


class Flat:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.flat, start = flatten(self.parameters), 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            parameter.data = self.flat[start:stop].view_as(parameter)
            start = stop
        self.shard = nn.Parameter(self.flat.chunk(dist.get_world_size())[dist.get_rank()])


class FlatParameter(Flat):
    def reduce(self):
        whole = flatten([p.grad for p in self.parameters]) / dist.get_world_size()
        self.shard.grad = torch.empty_like(self.shard)
        reduce_scatter_single(self.shard.grad, whole)
        for p in self.parameters:
            p.grad = None

    def gather(self):
        all_gather_single(self.flat, self.shard.detach())


class Stage1:
    flat_cls = FlatParameter

    def __init__(self, model, optimizer_cls=ADAM):
        self.model, self.flats = model, [self.flat_cls(part) for part in parts(model)]
        self.optimizer = optimizer_cls([flat.shard for flat in self.flats])

    def step(self):
        for flat in self.flats:
            flat.reduce()
        self.update()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.gather()

    def full(self):
        return copies(self.model)


class Stage2(Stage1):
    def __init__(self, model, optimizer_cls=ADAM):
        super().__init__(model, optimizer_cls)
        for flat in self.flats:
            for p in flat.parameters:
                p.register_post_accumulate_grad_hook(partial(self.on_gradient, flat))

    def on_gradient(self, flat, parameter):
        if all(p.grad is not None for p in flat.parameters):
            flat.reduce()

    def step(self):
        self.update()


class FreedParameter(FlatParameter):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.shard = nn.Parameter(self.shard.detach().clone())  # with memory of its own
        self.free()

    def free(self):
        self.flat.untyped_storage().resize_(0)

    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        super().gather()


class Hooked(Stage2):
    flat_cls = FreedParameter

    def __init__(self, model, optimizer_cls=ADAM):
        super().__init__(model, optimizer_cls)
        for module, flat in zip([model, *model.blocks], self.flats):
            module.register_forward_pre_hook(partial(self.before_forward, flat))
            module.register_forward_hook(partial(self.after_forward, flat))

    def before_backward(self, flat, gradient):
        flat.gather()

    def on_gradient(self, flat, parameter):
        super().on_gradient(flat, parameter)
        if all(p.grad is None for p in flat.parameters):  # they have been reduced
            flat.free()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self):
        for flat in self.flats:
            flat.gather()
        return copies(self.model)


class Stage3(Hooked):
    def before_forward(self, flat, module, inputs):
        flat.gather()

    def after_forward(self, flat, module, inputs, output):
        flat.free()
        output.register_hook(partial(self.before_backward, flat))


class PrefetchedParameter(FreedParameter):
    work = None

    def start_gather(self):
        if self.flat.untyped_storage().nbytes() == 0:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self.work = all_gather_single(self.flat, self.shard.detach(), async_op=True)

    def gather(self):
        self.start_gather()
        if self.work is not None:
            self.work.wait()
            self.work = None


class Prefetching(Stage3):
    flat_cls = PrefetchedParameter

    def start(self, number):
        self.flats[number % len(self.flats)].start_gather()

    def before_forward(self, flat, module, inputs):
        super().before_forward(flat, module, inputs)
        self.start(self.flats.index(flat) + 1)

    def before_backward(self, flat, gradient):
        super().before_backward(flat, gradient)
        self.start(self.flats.index(flat) - 1)


def watch(rank, world_size, way):
    notes, names = [], ("rest", "block 0", "block 1")

    class Watched(way):
        def note(self, moment, flat):
            there = {n: f for n, f in zip(names, self.flats) if f.flat.untyped_storage().nbytes()}
            coming = [n for n, f in there.items() if getattr(f, "work", None)]
            here = ", ".join(n for n in there if n not in coming)
            moment = f"{moment} {names[self.flats.index(flat)]}"
            notes.append((moment, here, ", ".join(coming), held(self)))

        def before_forward(self, flat, *given):
            super().before_forward(flat, *given)
            self.note("forward", flat)

        def before_backward(self, flat, *given):
            super().before_backward(flat, *given)
            self.note("backward", flat)

    learn(rank, world_size, Watched, 2)
    return notes[len(notes) // 2 :]  # of the second step


class ZeroRedundancy(Replicated):
    def __init__(self, model, optimizer_cls=ADAM):
        super().__init__(model)
        self.optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_cls)


class FullySharded(Replicated):
    def __init__(self, model, optimizer_cls=ADAM, mesh_shape=None, **options):
        shape = mesh_shape or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        options["mesh"] = init_device_mesh(kit.device().type, shape, mesh_dim_names=names)
        for part in (*model.blocks, model):
            fully_shard(part, **options)
        self.model, self.optimizer = model, optimizer_cls(model.parameters())

    def full(self):
        return {name: p.full_tensor().detach() for name, p in self.model.named_parameters()}


def train_and_save(rank, world_size, folder):
    training = FullySharded(make_gpt())
    train(training, batches(BATCH, 2), rank, world_size)
    parameters, states = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=folder)


def load_and_train(rank, world_size, folder):
    training = FullySharded(make_gpt())
    parameters, states = get_state_dict(training.model, training.optimizer)
    loaded = {"model": parameters, "optimizer": states}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    data = islice(batches(BATCH, 3), 2, None)  # the third batch
    return train(training, data, rank, world_size)["parameters"]


if __name__ == "__main__":
    run_as_script(main)
