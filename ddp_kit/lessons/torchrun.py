# Made from notebooks/11_torchrun.ipynb by `make editions`: edit that, not this.
"""torchrun: one program, one host or many."""

import os
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._torchrun import main, wait_for

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def my_place(rank, world_size):
    texts = {name: os.environ.get(name) for name in NAMES}
    return {name: None if text is None else int(text) for name, text in texts.items()}


def take_number(store, hosts):
    number = store.add("hosts", 1) - 1
    if number == hosts - 1:
        store.set("complete", "yes")
    store.wait(["complete"])
    return number


LOOPBACK = "127.0.0.1"


def rendezvous(rank, world_size, port, per_host=2):
    limit = timedelta(seconds=30)
    store = dist.TCPStore(
        LOOPBACK, port, is_master=rank == 0, wait_for_workers=False, timeout=limit
    )
    number = take_number(store, world_size)
    if store.add("done", 1) == world_size:
        store.set("all done", "yes")
    if rank == 0:  # the store ends with its process, so all must have read it
        store.wait(["all done"])
    return number, [number * per_host + local_rank for local_rank in range(per_host)]


def newest(folder):
    saved = Path(folder).glob("step-*/.metadata")
    return max((int(file.parent.name.removeprefix("step-")) for file in saved), default=0)


def kill_rank(rank, folder, step):
    wait_for(lambda: newest(folder))
    victims = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if folder in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("RANK") == str(rank)
    ]
    wait_for(lambda: newest(folder) >= step)
    try:
        min(victims, key=psutil.Process.create_time).kill()  # not a child that it may have
    except (ValueError, psutil.NoSuchProcess):  # none was found, or it has just ended
        raise RuntimeError(f"rank {rank} ended before it could be killed") from None


def save(folder, step, weights):
    unfinished = Path(folder, "checkpoint.new")
    torch.save({"step": step, "weights": weights.cpu()}, unfinished)
    os.replace(unfinished, Path(folder, "checkpoint.pt"))


def load(folder):
    state, file = torch.zeros(1 + 4), Path(folder, "checkpoint.pt")
    if dist.get_rank() == 0 and file.exists():
        kept = torch.load(file)
        state = torch.tensor([kept["step"], *kept["weights"]])
    state = state.to(kit.device())
    dist.broadcast(state, src=0)
    return int(state[0]), state[1:].clone()


def batch(step, examples=24):
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(examples, 4, generator=numbers)
    return inputs, inputs @ torch.arange(1.0, 5)


def train_tiny(rank, world_size, folder, steps, pause=0.0):
    begun, weights = load(folder)
    if rank == 0:
        with Path(folder, "attempts.txt").open("a") as attempts:
            attempts.write(f"from step {begun}: world size {world_size}\n")
    for step in range(begun, steps):
        inputs, targets = (tensor.to(kit.device()) for tensor in batch(step))
        mine, wanted = inputs[rank::world_size], targets[rank::world_size]
        gradient = 2 * mine.T @ (mine @ weights - wanted) / len(inputs)
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient
        if rank == 0:
            save(folder, step + 1, weights)
        dist.barrier()  # nobody continues before it is written
        time.sleep(pause if world_size == 1 else 0)
    return begun, weights.tolist()


def any_broken(loss):
    broken = (~loss.isfinite()).int()
    dist.all_reduce(broken, op=dist.ReduceOp.MAX)
    return broken.item() > 0


if __name__ == "__main__":
    run_as_script(main)
