"""Train a small GPT on a file: python train.py, or torchrun --nproc-per-node 4 train.py

A step takes --batch-size sequences in all, so 1, 2 and 4 ranks print the same losses.
"""

import argparse
import contextlib
import faulthandler
import gc
import math
import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.elastic.multiprocessing.errors import record


class GPT(nn.Module):
    def __init__(self, context, layers, heads, width, dropout):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        weights = sum(p.numel() for p in (*self.blocks.parameters(), self.head.weight))
        self.flops_per_token = 6 * weights + 12 * layers * width * context  # forward and backward

    def forward(self, inputs, targets):
        x = self.tokens(inputs) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(len(self.positions.weight), x.device)
        logits = self.head(self.norm(self.blocks(x, mask, is_causal=True)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Text:
    """Bytes in blocks. Place n is a block: each comes once an epoch, in an order of the epoch's."""

    def __init__(self, data, context):
        self.data, self.context, self.epoch = data, context, None
        self.blocks = (len(data) - 1) // context

    def block(self, place):
        epoch, number = divmod(place, self.blocks)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(epoch)  # the same on all ranks
            self.epoch, self.order = epoch, torch.randperm(self.blocks, generator=generator)
        start = self.order[number].item() * self.context
        return self.data[start : start + self.context + 1]

    def batch(self, places, device):
        rows = torch.stack([self.block(place) for place in places]).long()
        if device.type == "cuda":
            rows = rows.pin_memory().to(device, non_blocking=True)
        return rows[:, :-1], rows[:, 1:]


class AppState(Stateful):
    """All that a run needs to go on, as torch.distributed.checkpoint saves and loads it."""

    def __init__(self, net, optimizer, scheduler, rng):
        self.net, self.optimizer, self.scheduler, self.rng = net, optimizer, scheduler, rng
        self.own_rng = f"rng_{dist.get_rank()}"  # of an entry that all ranks have, one is saved
        self.step = self.position = 0  # steps taken, and sequences seen

    def state_dict(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        own = {self.own_rng: self.rng.get_rng_state()}
        return {**state, **own, "step": self.step, "position": self.position}

    def load_state_dict(self, state):
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.net, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self.rng.set_rng_state(state[self.own_rng])
        self.step, self.position = state["step"], state["position"]


def load_newest(folder, app, group):
    found = [sorted(folder.glob("step-*/.metadata"))[-1:]]  # written last, so this one is complete
    dist.broadcast_object_list(found, src=0, group=group)  # others may see an older folder (NFS)
    for metadata in found[0]:
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # no RNG of a rank that is new
        dcp.load({"app": app}, checkpoint_id=metadata.parent, planner=planner)


def finish(saving, newest):
    """Wait until a checkpoint is complete, and remove those before it."""
    saving.result()
    for other in newest.parent.glob("step-*") if dist.get_rank() == 0 else ():
        if other.name < newest.name:
            shutil.rmtree(other)


def log(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


@torch.no_grad()
def evaluate(net, text, size, device, autocast):
    net.eval()
    mine = range(dist.get_rank(), text.blocks, dist.get_world_size())
    sums = torch.zeros(2, device=device)  # of losses, and of sequences
    for first in range(0, len(mine), size):
        places = mine[first : first + size]
        with autocast:
            loss = net(*text.batch(places, device))
        sums += torch.stack((loss * len(places), torch.full_like(loss, len(places))))
    dist.all_reduce(sums)  # the ranks meet here only, as they may have unequal numbers of batches
    net.train()
    return (sums[0] / sums[1]).item()


@record  # torchrun then reports the traceback of the rank that failed first
def main(args):
    faulthandler.register(signal.SIGUSR2)  # kill -USR2 PID prints the lines that a rank is in
    asked_to_stop = []
    for number in signal.SIGUSR1, signal.SIGTERM:
        signal.signal(number, lambda number, frame: asked_to_stop.append(number))

    gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpu else "cpu")
    if gpu:
        torch.cuda.set_device(device)
    timeout, alone = timedelta(seconds=args.timeout), {}
    if "RANK" not in os.environ:  # no torchrun: a world of one rank, and a store in its memory
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timeout, device_id=device if gpu else None, **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Two more groups, because calls of different threads may come in any order.
    control = dist.new_group(timeout=timeout, backend="gloo", group_desc="control")
    saver = dist.new_group(timeout=timeout, backend="gloo", group_desc="saver")
    size, rest = divmod(args.batch_size, world_size * args.accumulate)  # of a micro-batch
    if rest:
        wanted = f"{world_size} ranks * {args.accumulate} micro-batches"
        raise ValueError(f"--batch-size must be a multiple of {wanted}, got {args.batch_size}")

    data = torch.from_file(str(args.data), size=args.data.stat().st_size, dtype=torch.uint8)
    cut = len(data) * 9 // 10
    train, held_out = Text(data[:cut], args.context), Text(data[cut:], args.context)
    torch.manual_seed(0)  # the same weights on all ranks,
    net = GPT(args.context, args.layers, args.heads, args.width, args.dropout).to(device)
    torch.manual_seed(1 + rank)  # and other numbers that dropout takes out
    if args.compile:
        net.compile()
    model = nn.parallel.DistributedDataParallel(net)
    parts = [[p for p in net.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": part, "weight_decay": wd} for part, wd in zip(parts, (0.1, 0.0))]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=gpu)
    decay = args.decay or args.steps

    def rate(step):  # a part of --lr: up in a line, then down along a cosine to 0.1
        done = min(1, max(0, step - args.warmup) / max(1, decay - args.warmup))
        return min((step + 1) / max(1, args.warmup), 0.55 + 0.45 * math.cos(math.pi * done))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    app = AppState(net, optimizer, scheduler, torch.cuda if gpu else torch)
    if args.checkpoint:
        load_newest(args.checkpoint, app, control)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=gpu)
    saving, stop, began, tokens = None, False, time.perf_counter(), 0
    while app.step < args.steps and not stop:
        mine = range(app.position + rank, app.position + args.batch_size, world_size)
        total = torch.zeros((), device=device)
        for first in range(0, len(mine), size):
            last = first + size == len(mine)
            with contextlib.nullcontext() if last else model.no_sync():
                with autocast:
                    loss = model(*train.batch(mine[first : first + size], device)) / args.accumulate
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        app.step += 1
        app.position += args.batch_size
        tokens += args.batch_size * args.context

        end = app.step == args.steps
        if app.step % args.log_every == 0 or end:
            dist.all_reduce(total)
            loss, speed = total.item() / world_size, tokens / (time.perf_counter() - began)
            peak = world_size * args.peak_tflops * 1e12
            mfu = f", MFU {speed * net.flops_per_token / peak:.1%}" if peak else ""
            log(f"step {app.step}: loss {loss:.4f}, norm {norm:.2f}, {speed:,.0f} tokens/s{mfu}")
            began, tokens = time.perf_counter(), 0
        flag = torch.tensor(len(asked_to_stop))  # a signal may reach ranks in different steps
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control)
        stop = flag.item() > 0
        if args.checkpoint and (app.step % args.save_every == 0 or end or stop):
            if saving:
                finish(*saving)
            folder = args.checkpoint / f"step-{app.step:08}"
            saving = dcp.async_save({"app": app}, checkpoint_id=folder, process_group=saver), folder
        if app.step % args.eval_every == 0 or end:
            loss = evaluate(net, held_out, size, device, autocast)
            log(f"step {app.step}: loss {loss:.4f} on held-out text")
            began, tokens = time.perf_counter(), 0
    if saving:
        finish(*saving)
    if stop:
        log(f"stopped by a signal after step {app.step}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    option = parser.add_argument
    option("--data", type=Path, default=__file__, help="a file; without, this program's text")
    option("--steps", type=int, default=100)
    option("--decay", type=int, help="step at which the learning rate is lowest (default: --steps)")
    option("--warmup", type=int, default=10, help="steps in which the learning rate rises")
    option("--lr", type=float, default=1e-3)
    option("--batch-size", type=int, default=32, help="sequences in a step, on all ranks together")
    option("--accumulate", type=int, default=1, help="micro-batches of a rank in a step")
    option("--context", type=int, default=64, help="bytes in a sequence")
    for name, default in {"layers": 2, "heads": 4, "width": 64}.items():
        option(f"--{name}", type=int, default=default)
    option("--dropout", type=float, default=0.0)
    option("--compile", action="store_true", help="with torch.compile")
    option("--checkpoint", type=Path, help="folder to save in and to go on from; all ranks see it")
    for name, default in {"save": 100, "eval": 100, "log": 10}.items():
        option(f"--{name}-every", type=int, default=default, help="steps")
    option("--peak-tflops", type=float, default=0, help="of a rank's device, for the MFU")
    option("--timeout", type=float, default=600, help="seconds that ranks wait for each other")
    main(parser.parse_args())
    gc.collect()  # DDP's models are in cycles
    dist.destroy_process_group()  # after the model is gone: the other order can hang, or abort
