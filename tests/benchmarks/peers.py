"""The peers' sides: what a learner would use instead, each as its own documentation drives it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from side import seconds, serve

NBDISTRIBUTED_CELL = """
total = torch.ones(1)
dist.all_reduce(total)
print(total.item())
"""


def torchrun():
    """The whole command, as `!torchrun file.py` in a cell waits for it."""
    body = str(Path(__file__).with_name("torchrun_body.py"))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", body]
    yield "ready"
    yield [seconds(subprocess.run, [sys.executable, *command], check=True)]


def partial_state_all_reduce():
    """Runs in a process that debug_launcher forked."""
    import torch
    from accelerate import PartialState

    PartialState(cpu=True)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 4


def accelerate():
    """`debug_launcher` forks this process, which has imported torch; every call forks again."""
    from accelerate import debug_launcher

    yield "ready"
    while True:
        yield [seconds(debug_launcher, partial_state_all_reduce, num_processes=4)]


class Engines:
    """ipyparallel's cluster on this machine, its engines in one process group."""

    def __init__(self, world_size):
        import ipyparallel

        self.cluster = ipyparallel.Cluster(n=world_size)
        self.folder = tempfile.TemporaryDirectory()
        try:
            client = self.cluster.start_and_connect_sync()
            self.view = client[:]
            store = f"file://{self.folder.name}/store"
            joining = [client[i].apply_async(join_group, i, world_size, store) for i in client.ids]
            for one in joining:
                one.get()
        except BaseException:
            self.close()
            raise

    def close(self):
        self.cluster.stop_cluster_sync()
        self.folder.cleanup()


def join_group(rank, world_size, store):
    """Runs in an engine."""
    import os
    import sys

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)


def engine_all_reduce():
    """Runs in an engine."""
    import torch

    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return total.item()


def engine_hundred_megabytes():
    """Runs in an engine."""
    import torch

    return torch.zeros(25_000_000)


def ipyparallel_cold():
    import ipyparallel  # noqa: F401
    import torch  # noqa: F401

    yield "ready"
    began = time.perf_counter()
    engines = Engines(4)
    answers = engines.view.apply_sync(engine_all_reduce)
    took = time.perf_counter() - began
    assert answers == [4.0] * 4
    yield [took]
    engines.close()


def ipyparallel_warm(world_size, function, repeat):
    engines = Engines(world_size)
    try:
        engines.view.apply_sync(function)
        yield "ready"
        while True:
            yield [seconds(engines.view.apply_sync, function) for _ in range(repeat)]
    finally:
        engines.close()


class Kernel:
    """A notebook kernel with nbdistributed's ranks."""

    def __init__(self):
        import nbdistributed  # noqa: F401 - a missing package is reported before a kernel starts
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.cell("import torch\nimport torch.distributed as dist\n%load_ext nbdistributed")

    def cell(self, code):
        """Run a cell and return what it printed."""
        printed = []

        def keep(message):
            content = message["content"]
            printed.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        self.client.execute_interactive(code, timeout=60, output_hook=keep)
        return "".join(printed)

    def start_ranks(self):
        """Return after the first cell that all four ranks answered. An earlier one waits 30 s."""
        self.cell("%dist_init -n 4")
        while self.cell(NBDISTRIBUTED_CELL).count("4.0") != 4:
            time.sleep(0.1)

    def close(self):
        self.cell("%dist_shutdown")
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def nbdistributed_cold():
    kernel = Kernel()
    try:
        yield "ready"
        yield [seconds(kernel.start_ranks)]
    finally:
        kernel.close()


def nbdistributed_warm():
    kernel = Kernel()
    try:
        kernel.start_ranks()
        yield "ready"
        while True:
            yield [seconds(kernel.cell, NBDISTRIBUTED_CELL) for _ in range(3)]
    finally:
        kernel.close()


if __name__ == "__main__":
    serve(
        {
            "torchrun": torchrun,
            "accelerate": accelerate,
            "ipyparallel_cold": ipyparallel_cold,
            "ipyparallel_warm": lambda: ipyparallel_warm(4, engine_all_reduce, 20),
            "ipyparallel_values": lambda: ipyparallel_warm(2, engine_hundred_megabytes, 1),
            "nbdistributed_cold": nbdistributed_cold,
            "nbdistributed_warm": nbdistributed_warm,
        }
    )
