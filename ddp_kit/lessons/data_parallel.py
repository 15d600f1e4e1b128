# Made from notebooks/07_data_parallel.ipynb by `make editions`: edit that, not this.
"""DataParallel: eight steps around device 0."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit.lessons._data_parallel import (
    are_real,
    devices,
    held_after_each_step,
    held_by_net,
    main,
    rank_gradient,
    virtual,
)
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons.partitioned_sgd import SEED, Net, first_digits, flat


def scatter(batch, places):
    chunks = batch.chunk(len(places))
    others = [chunks[i].to(places[i], copy=True) for i in range(1, len(chunks))]
    return [chunks[0], *others]


def replicate(model, places):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    first = {name: tensor.view_as(tensor) for name, tensor in tensors.items()}
    return [first] + [
        {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}
        for place in places[1:]
    ]


def parallel_apply(model, replicas, shards):
    both = zip(replicas, shards, strict=True)
    return [functional_call(model, replica, shard) for replica, shard in both]


def gather(outputs, place):
    return torch.cat([output.to(place) for output in outputs])


class ByHand(nn.Module):
    def __init__(self, module, places):
        super().__init__()
        self.module, self.places = module, places

    def forward(self, batch):
        shards = scatter(batch, self.places)
        replicas = replicate(self.module, self.places[: len(shards)])
        outputs = parallel_apply(self.module, replicas, shards)
        return gather(outputs, self.places[0])


def start(place=None):
    torch.manual_seed(SEED)
    model = Net().to(place or kit.device()).eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def train(places=None, steps=3, count=30):
    place = places[0] if places else kit.device()
    model, optimizer = start(place)
    wrapped = ByHand(model, places) if places else model
    images, labels = (tensor.to(place).split(count) for tensor in first_digits(steps * count))
    gradients = []
    for x, y in zip(images, labels, strict=True):
        optimizer.zero_grad()
        F.nll_loss(wrapped(x), y).backward()
        gradients.append(flat(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return {"gradient": gradients[0], "parameters": flat(model.parameters())}


def eight_steps(model, optimizer, images, labels, places, loss_of=F.nll_loss):
    optimizer.zero_grad()
    shards = scatter(images, places)
    yield "scatter", "shard", [[shard] for shard in shards]
    replicas = replicate(model, places[: len(shards)])
    names = [name for name, _ in model.named_parameters()]
    copies = [[replica[name] for name in names] for replica in replicas]
    yield "replicate", "replica", copies[:]
    outputs = parallel_apply(model, replicas, shards)
    yield "parallel apply", "outputs", [[output] for output in outputs]
    gathered = gather(outputs, places[0])
    del shards, replicas, outputs  # what backward needs of them stays, as on GPUs
    yield "gather", "gathered, loss", [[gathered]]
    loss = loss_of(gathered, labels)
    yield "loss", "gathered, loss", [[loss]]
    yield from way_back(model, loss, copies)
    optimizer.step()
    yield "update", "parameters", [list(model.parameters())]


def way_back(model, loss, copies):
    every_copy = [tensor for copy in copies for tensor in copy]
    gradients, width = torch.autograd.grad(loss, every_copy), len(copies[0])
    starts = range(0, len(gradients), width)
    yield "backward", "gradients", [list(gradients[i : i + width]) for i in starts]
    torch.autograd.backward(every_copy, gradients)
    copies.clear()
    del every_copy, gradients  # nothing holds the copies any longer
    yield "reduce", "gradients", [[parameter.grad for parameter in model.parameters()]]


def seconds_a_step(models, images, labels, rounds=30):
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values()]
    seconds = {name: [] for name in models}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in each process
    try:
        for step in range(-3, rounds):  # the first three warm up
            for (name, model), optimizer in zip(models.items(), optimizers, strict=True):
                begin = time.perf_counter()
                optimizer.zero_grad()
                F.nll_loss(model(images), labels).backward()
                optimizer.step()
                if images.is_cuda:
                    torch.cuda.synchronize(images.device)
                if step >= 0:
                    seconds[name].append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return seconds


def ddp_seconds(rank, world_size, count=256):
    images, labels = first_digits(count)
    model = DistributedDataParallel(start()[0])
    mine = images[rank::world_size], labels[rank::world_size]
    return seconds_a_step({"DDP, two ranks": model}, *mine)


if __name__ == "__main__":
    run_as_script(main)
