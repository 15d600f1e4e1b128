# Made from notebooks/08_ddp.ipynb by `make editions`: edit that, not this.
"""DistributedDataParallel: what it sends, and when."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DistributedSampler

import ddp_kit as kit
from ddp_kit.lessons._ddp import count_calls, main, on_one_axis, typical
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons.partitioned_sgd import SEED, Net, average_gradients, first_digits, flat


class Replicated(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)


FINISH_FIRST = "gradients are still being averaged: call finish_gradient_synchronization() first"


class DistributedDataParallel(Replicated):
    def __init__(self, module):
        super().__init__(module)
        self.sending = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start_average)

    def finish_gradient_synchronization(self):
        for work in self.sending.values():
            work.wait()
        self.sending.clear()

    def start_average(self, parameter):
        if parameter in self.sending:
            raise RuntimeError(FINISH_FIRST)
        parameter.grad /= dist.get_world_size()
        self.sending[parameter] = dist.all_reduce(parameter.grad, async_op=True)


def tied_and_frozen():
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers[3].weight = layers[0].weight
    layers[1].requires_grad_(False)
    return nn.Sequential(*layers).to(kit.device())


def train_tied(rank, world_size, wrap, rows=12):
    torch.manual_seed(rank)
    model = wrap(tied_and_frozen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in torch.arange(18.0 * rows, device=kit.device()).sin().view(3, rows, 6):
        optimizer.zero_grad()
        model(x[rank::world_size]).square().mean().backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
    return flat(model.parameters())


def two_backwards(rank, world_size):
    widths = (512, 768, 640, 896, 512)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
    module = nn.Sequential(*layers).to(kit.device())
    x = torch.ones(512, 512, device=kit.device())
    for _ in range(3):
        module(x).sum().backward()  # warms up
    for wrap in (Replicated, DistributedDataParallel):
        module.zero_grad()
        model = wrap(module)
        loss = model(x).sum()
        dist.barrier()
        loss.backward()
        if wrap is Replicated:
            average_gradients(model)
        else:
            model.finish_gradient_synchronization()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(SEED)
        for number in range(4):
            self.add_module(f"layer{number}", nn.Linear(512, 512))

    def forward(self, x):
        for layer in self.children():
            x = torch.relu(layer(x))
        return x


def watch(rank, world_size, bucket_cap_mb=None):
    model = Stack().to(kit.device())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    notes = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: notes[-1].append(names[id(p)]))

    def note_and_reduce(group, bucket):
        held = [names[id(parameter)] for parameter in bucket.parameters()]
        notes[-1].append(f"-> bucket {bucket.index()}: {', '.join(held)}")
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
    wrapped.register_comm_hook(None, note_and_reduce)
    for _ in range(2):
        notes.append([])
        wrapped(torch.ones(1, 512, device=kit.device())).sum().backward()
    return notes


def buckets_by_hand(sizes, cap, first_cap):
    counts, held = [0], 0  # gradients in each bucket, and bytes in the last one
    for size in sizes:
        if held >= (cap if len(counts) > 1 else first_cap):
            counts, held = [*counts, 0], 0
        counts[-1] += 1
        held += size
    return counts


class Bucket:
    def __init__(self, length):
        self.length, self.ready, self.work = length, [], None

    def add(self, parameter):
        if any(parameter is other for other in self.ready):
            raise RuntimeError(FINISH_FIRST)
        self.ready.append(parameter)
        if len(self.ready) == self.length:
            self.start_average()

    def start_average(self):
        gradients = [parameter.grad.flatten() for parameter in self.ready]
        self.flat = torch.cat(gradients) / dist.get_world_size()
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self):
        self.work.wait()
        pieces = self.flat.split([parameter.numel() for parameter in self.ready])
        for parameter, piece in zip(self.ready, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
        self.ready, self.work = [], None


class BucketedDistributedDataParallel(DistributedDataParallel):
    def __init__(self, module, bucket_cap_mb=None):
        super().__init__(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        sizes = [parameter.numel() * parameter.element_size() for parameter in trained]
        cap, first_cap = 2**20 * (bucket_cap_mb or 25), 2**20 * (bucket_cap_mb or 1)
        self.buckets = [Bucket(length) for length in buckets_by_hand(sizes, cap, first_cap)]
        owners = [bucket for bucket in self.buckets for _ in range(bucket.length)]
        self.bucket_of = dict(zip(trained, owners, strict=True))

    def start_average(self, parameter):
        self.bucket_of[parameter].add(parameter)

    def finish_gradient_synchronization(self):
        for bucket in self.buckets:
            if bucket.ready and bucket.work is None:  # a parameter in it was not used
                bucket.start_average()
        for bucket in self.buckets:
            if bucket.ready:
                bucket.finish()


def backwards(rank, world_size, bucket_cap_mb=None, steps=10):
    stack = Stack().to(kit.device())
    model = nn.parallel.DistributedDataParallel(stack, bucket_cap_mb=bucket_cap_mb)
    x = torch.ones(256, 512, device=kit.device())
    began = []
    for _ in range(steps):
        loss = model(x).sum()
        began.append(time.monotonic_ns())
        loss.backward()
    return began


CAPS = {"one bucket: no overlap": 1000, "four buckets": 1}  # in MiB


def step_seconds(rank, world_size, bytes_per_second=None, steps=30):
    x = torch.ones(512, 512, device=kit.device())
    seconds = {name: [] for name in CAPS}
    with ThreadPoolExecutor(1) as wire:
        models = {}
        for name, cap in CAPS.items():
            stack = Stack().to(kit.device())
            models[name] = nn.parallel.DistributedDataParallel(stack, bucket_cap_mb=cap)
            if bytes_per_second:
                models[name].register_comm_hook((wire, bytes_per_second), carry_slowly)  # see below
        for step in range(steps + 3):
            for name, model in models.items():
                dist.barrier()
                start = time.perf_counter()
                model(x).sum().backward()
                if x.is_cuda:
                    torch.cuda.synchronize()
                if step >= 3:  # the first steps warm up, and rebuild the buckets
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def carry_slowly(state, bucket):
    wire, bytes_per_second = state
    reduced, arrived = allreduce_hook(None, bucket), torch.futures.Future()
    nbytes = bucket.buffer().numel() * bucket.buffer().element_size()

    def carry():
        value = reduced.wait()
        time.sleep(nbytes / bytes_per_second)
        arrived.set_result(value)

    wire.submit(carry)
    return arrived


def accumulate(rank, world_size, pieces=4, silent=True, piece=8):
    torch.manual_seed(SEED)
    model = nn.parallel.DistributedDataParallel(Net().to(kit.device()).eval())
    images, labels = first_digits(piece * pieces * world_size)
    mine = zip(
        images[rank::world_size].split(piece), labels[rank::world_size].split(piece), strict=True
    )
    for count, (x, y) in enumerate(mine, 1):
        with model.no_sync() if silent and count < pieces else nullcontext():
            (F.nll_loss(model(x), y) / pieces).backward()
    return flat(parameter.grad for parameter in model.parameters())


def whole_batch_gradient(count):
    torch.manual_seed(SEED)
    net, (images, labels) = Net().eval().to(kit.device()), first_digits(count)
    F.nll_loss(net(images), labels).backward()
    return flat(parameter.grad for parameter in net.parameters())


def deal_by_hand(length, world_size, drop_last=False):
    rounds = length // world_size if drop_last else -(-length // world_size)
    cards = [card % length for card in range(rounds * world_size)]
    return [cards[rank::world_size] for rank in range(world_size)]


def deal(rank, world_size, length, shuffle=False, drop_last=False, epochs=(0,)):
    sampler = DistributedSampler(range(length), shuffle=shuffle, drop_last=drop_last)
    dealt = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
    return dealt


if __name__ == "__main__":
    run_as_script(main)
