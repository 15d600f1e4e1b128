"""The ranks that start in the background when a notebook imports the kit, before any run."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from kernels import ENVIRONMENT, Kernel
from processes import assert_gone, wait_until

from ddp_kit.pool import arguments

IMPORT = "import os\nimport ddp_kit as kit\n"
PIDS = "list(kit.run(lambda rank, world_size: os.getpid()))"
OF_ONE_RANK = "list(kit.run(lambda rank, world_size: os.getpid(), world_size=1))"
STATES = "[rank.state for pool in kit.status().pools for rank in pool.ranks]"


@pytest.fixture
def start(tmp_path):
    """Return a function that starts kernels that warm up; end them after the test."""
    kernels: list[Kernel] = []

    def kernel(set_up: str = IMPORT, **variables: str) -> Kernel:
        kernels.append(Kernel(tmp_path, set_up, **{"DDP_KIT_WARM": "1"} | variables))
        return kernels[-1]

    yield kernel
    for one in kernels:
        one.end()


def ranks(kernel: Kernel) -> list[psutil.Process]:
    found = []
    for child in kernel.process.children(recursive=True):
        try:
            if "DDP_KIT_RANK" in child.environ():
                found.append(child)
        except psutil.Error:
            continue  # it has just started, or ended
    return found


def wait_for_ranks(kernel: Kernel, number: int = 4) -> set[int]:
    wait_until(lambda: len(ranks(kernel)) == number, 120, f"{number} ranks have started")
    return {rank.pid for rank in ranks(kernel)}


def pids(kernel: Kernel, code: str = PIDS) -> set[int]:
    return set(map(int, kernel.value(code).strip("[]").split(", ")))


FORKED = """
import multiprocessing

def use(send):
    send.send(list(kit.run(lambda rank, world_size: rank, world_size=2)))

receive, send = multiprocessing.Pipe(duplex=False)
child = multiprocessing.get_context("fork").Process(target=use, args=(send,))
child.start()
found = receive.poll(240) and receive.recv()
child.kill()
child.join()
"""


def test_the_first_run_finds_the_ranks_that_the_import_has_started(start, tmp_path):
    """What the notebook has changed meanwhile counts, and a forked child has not taken them."""
    kernel = start()
    started = wait_for_ranks(kernel)
    kernel.run(FORKED)
    assert kernel.value("found") == "[0, 1]"
    folder = tmp_path / "another"
    folder.mkdir()
    kernel.run(f"os.chdir({str(folder)!r}); os.environ['LEARNER'] = 'set'")
    kernel.run("seen = set(kit.run(lambda r, w: (os.getcwd(), os.environ['LEARNER'])))")
    assert kernel.value(f"seen == {{({str(folder)!r}, 'set')}}") == "True"
    assert pids(kernel) == started


def test_a_variable_that_pytorch_reads_at_its_start_restarts_ranks_that_nobody_used(start):
    kernel = start()
    started = wait_for_ranks(kernel)
    kernel.run("os.environ['OMP_NUM_THREADS'] = '1'")
    assert not pids(kernel) & started
    used = pids(kernel)
    kernel.run("os.environ['OMP_NUM_THREADS'] = '2'")
    assert pids(kernel) == used, "ranks that were used stay"


def test_ranks_that_nobody_used_end_after_a_while_and_the_first_run_starts_them(start):
    kernel = start(IMPORT + "kit.settings.UNUSED_RANKS_END_AFTER = 10.0")
    wait_for_ranks(kernel)
    wait_for_ranks(kernel, 0)
    assert kernel.value("kit.status()") == "shared pool: no ranks; the next run starts them"
    assert len(pids(kernel)) == 4


NO_MEMORY = """
import psutil, types
psutil.virtual_memory = lambda: types.SimpleNamespace(available=2**31 - 1)
"""
NO_PROCESS = """
import errno, multiprocessing.util as util

def no_process(*args):
    util.spawnv_passfds = spawn
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

spawn, util.spawnv_passfds = util.spawnv_passfds, no_process
"""


@pytest.mark.parametrize(
    ("set_up", "variables"),
    [
        (IMPORT, {"DDP_KIT_WARM": "0"}),
        (NO_MEMORY + IMPORT, {}),
        (NO_PROCESS + IMPORT, {}),
        (IMPORT + "with kit.WorkerPool(1) as pool: pool.run(print)", {}),
        ("import os\n%run lesson.py\nimport ddp_kit as kit", {}),
    ],
    ids=["turned off", "too little memory", "a failure", "a pool of its own", "in a lesson"],
)
def test_no_rank_starts_before_a_run(start, tmp_path, set_up, variables):
    lesson = "import ddp_kit as kit\nwith kit.WorkerPool(1) as p: p.run(print)\n"
    (tmp_path / "lesson.py").write_text(lesson)
    kernel = start(set_up, **variables)
    kernel.run("pass")
    assert not ranks(kernel)
    assert len(pids(kernel, OF_ONE_RANK)) == 1


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("350\n")
    (tmp_path / "memory.stat").write_text("anon 250\ninactive_file 20\nactive_file 30\nshmem 50\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert arguments.available_memory() > 1e6
    (tmp_path / "memory.max").write_text("1000\n")
    assert arguments.available_memory() == 700
    (tmp_path / "memory.stat").write_text("anon 250\n")
    assert arguments.available_memory() > 1e6, "the limit is left alone if it cannot be read"


def test_a_script_starts_no_rank_by_its_import():
    code = "import ddp_kit, psutil; print(psutil.Process().children())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT | {"DDP_KIT_WARM": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("how", ["shutdown", "killed while they import", "killed when they wait"])
def test_a_kernel_that_never_runs_anything_leaves_nothing(start, tmp_path, how):
    folder = tmp_path / "temporary"
    folder.mkdir()
    kernel = start(TMPDIR=str(folder))
    wait_for_ranks(kernel)
    if how == "killed when they wait":
        wait_until(lambda: "starting" not in kernel.value(STATES), 300, "they wait for a run")
    left = [kernel.process, *ranks(kernel)]
    if how == "shutdown":
        kernel.manager.shutdown_kernel()
    else:
        kernel.process.kill()
    psutil.wait_procs(left, 120)  # a rank notices when its imports are done
    assert_gone(left, how)
    assert not list(folder.glob("ddp_kit*"))
