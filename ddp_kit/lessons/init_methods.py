# Made from notebooks/06_init_methods.ipynb by `make editions`: edit that, not this.
"""Init methods: how ranks find each other."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.lessons._init_methods import (
    ForwardingStore,
    free_ports,
    listeners,
    main,
    own_address,
    own_words,
    quiet,
    ranks_in,
)
from ddp_kit.lessons._launch import run_as_script

HERE = os.environ.get("MASTER_ADDR", "127.0.0.1")  # torchrun sets it to rank 0's machine


PATIENCE = timedelta(seconds=30)  # for a rendezvous that should succeed


def sum_of_ranks():
    total = torch.tensor([dist.get_rank()], device=kit.device())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def by_environment(rank, world_size, port):
    os.environ.setdefault("MASTER_ADDR", HERE)
    os.environ.setdefault("MASTER_PORT", str(port))
    dist.init_process_group("gloo", init_method="env://", timeout=PATIENCE)
    return sum_of_ranks()


def by_file(rank, world_size, path):
    url = f"file://{path}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    return sum_of_ranks()


def by_tcp(rank, world_size, port):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # under torchrun no rank would listen
    url = f"tcp://{HERE}:{port}"
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=world_size, timeout=PATIENCE
    )
    return sum_of_ranks()


def by_store(rank, world_size, port):
    store = dist.TCPStore(HERE, port, world_size, is_master=rank == 0, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    return sum_of_ranks()


def join(store, run, world_size):
    come = store.add(f"{run}/come", 1)
    if come > world_size:
        raise RuntimeError(f"{world_size} processes have come already")
    return come - 1


def by_arrival(_, world_size, path):
    store = dist.FileStore(path, world_size)
    rank = join(store, "first run", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    return rank, sum_of_ranks()


class RecordingStore(ForwardingStore):
    def __init__(self, store):
        super().__init__(store)
        self.notes = []
        self.values = {}

    def set(self, key, value):
        self.notes.append(("set", key, len(value)))
        self.values[key] = bytes(value)
        super().set(key, value)

    def wait(self, keys, *timeout):
        self.notes.extend(("wait", key, 0) for key in keys)
        super().wait(keys, *timeout)

    def get(self, key):
        value = super().get(key)
        self.notes.append(("get", key, len(value)))
        return value

    def add(self, key, amount):
        self.notes.append(("add", key, 0))
        return super().add(key, amount)


def noted(rank, world_size, path):
    store = RecordingStore(dist.FileStore(path, world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    formed = len(store.notes)
    listens = own_address(store.values)
    sum_of_ranks()
    later = len(store.notes) - formed
    return {"notes": store.notes, "later": later, "listens": listens}


def exchange(store, rank, world_size, name, value):
    store.set(f"{name}/{rank}", value)
    keys = [f"{name}/{other}" for other in range(world_size)]
    return [store.get(key).decode() for key in keys]


def attempt(rank, world_size, url, claims, late=0):
    if claims[rank] is None:
        return None
    time.sleep(late if rank else 0)
    rank, world_size, seconds = claims[rank]
    limit = timedelta(seconds=seconds)
    with quiet():
        dist.init_process_group(
            "gloo", init_method=url, rank=rank, world_size=world_size, timeout=limit
        )
    return sum_of_ranks()


def keep_trying(connect, limit, now=time.monotonic, pause=time.sleep):
    end, wait = now() + limit, 0.1
    while True:
        try:
            return connect()
        except ConnectionError:
            left = end - now()
            if left <= 0:
                raise TimeoutError(f"nobody has answered for {limit:g} s") from None
            pause(min(wait, left))
            wait *= 2


if __name__ == "__main__":
    run_as_script(main)
