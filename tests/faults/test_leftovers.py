"""Nothing is left: no process, no named memory, no folder, however the end came."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from jupyter_client import BlockingKernelClient
from kernels import ENVIRONMENT, STUCK, Kernel, start_stuck
from processes import BOUND, assert_gone, ended, wait_until, wait_until_calm

import ddp_kit as kit
from ddp_kit.pool import private_folder


def pid(rank, world_size):
    return os.getpid()


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(private_folder.PREFIX + "*"))


def named_memory() -> set[str]:
    """List named memory, except semaphores, that of Open MPI, and tensors that PyTorch shares.

    Other tests have MPI ranks at the same time, and kill programs that have a DataLoader. PyTorch
    names the memory of a batch for a moment, and Python a semaphore until it is unlinked; what a
    process has named that is killed in this moment stays. The kit itself has neither.
    """
    there = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in there if not name.startswith(("sm_segment", "torch_", "sem."))}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Give a test a temporary folder of its own, and check /dev/shm afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = named_memory()
    yield
    # Tests that run at the same time may have some for a moment.
    wait_until(lambda: named_memory() <= before, BOUND, "no named memory is left")


@pytest.fixture
def notebook(tmp_path):
    own = Kernel(tmp_path)
    own.run(STUCK)
    try:
        yield own
    finally:
        own.end()


def everything(kernel: Kernel) -> list[psutil.Process]:
    return [kernel.process, *kernel.process.children(recursive=True)]


def test_close_leaves_no_process_and_no_folder():
    with kit.WorkerPool(2) as pool:
        ranks = [psutil.Process(number) for number in pool.run(pid)]
        (folder,) = folders()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    assert ended(ranks)
    assert not folders()


def test_the_end_of_a_script_without_close_leaves_nothing(tmp_path):
    script, ranks = start_script("")
    assert script.wait(timeout=BOUND) == 0
    assert script.communicate()[1] == ""
    assert ended(ranks)
    assert not folders()


@pytest.mark.parametrize(
    "end", [pytest.param("restart_kernel", marks=pytest.mark.long), "shutdown_kernel"]
)
def test_the_end_of_an_idle_kernel_leaves_nothing_and_waits_for_nobody(notebook, end):
    notebook.ranks(2)
    before = everything(notebook)
    assert not any("resource_tracker" in " ".join(p.cmdline()) for p in before), (
        "the tracker ignores SIGTERM; a kernel that shuts down would wait for it, and be killed"
    )
    notebook.manager.shutdown_wait_time = BOUND  # on a busy machine, 5 s may be too short
    getattr(notebook.manager, end)()
    assert_gone(before, end)
    assert not folders()


@pytest.mark.parametrize(
    "now",
    [pytest.param(False, marks=pytest.mark.long, id="waiting"), pytest.param(True, id="at once")],
)
def test_a_shutdown_in_a_deadlock_leaves_no_process(notebook, tmp_path, now):
    start_stuck(notebook, "recv", tmp_path / "recv")
    before = everything(notebook)
    notebook.manager.shutdown_kernel(now=now)
    assert_gone(before, "the shutdown")
    assert_next_pool_sweeps()


def test_a_killed_kernel_with_ranks_stuck_in_native_code_leaves_no_process(notebook, tmp_path):
    start_stuck(notebook, "frozen" if sys.platform == "linux" else "recv", tmp_path / "stuck")
    before = everything(notebook)
    notebook.process.send_signal(signal.SIGKILL)  # to the kernel alone, not to its group
    assert_gone(before, "the kernel was killed")
    assert_next_pool_sweeps()


def test_a_killed_jupyterlab_leaves_no_process(tmp_path):
    port_file = tmp_path / "runtime"
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.port=0", "--ServerApp.disable_check_xsrf=True"),
            *("--IdentityProvider.token=", f"--ServerApp.root_dir={tmp_path}"),
        ],
        env=ENVIRONMENT | {"JUPYTER_RUNTIME_DIR": str(port_file)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # The file exists before its text does.
        wait_until(lambda: written(port_file), 300, "JupyterLab runs")
        url = json.loads(written(port_file))["url"]
        # The file is written a moment before the server listens.
        wait_until(lambda: answers(f"{url}api/status"), 300, "JupyterLab answers")
        request = urllib.request.Request(f"{url}api/kernels", data=b"{}", method="POST")
        number = json.load(urllib.request.urlopen(request, timeout=60))["id"]
        client = BlockingKernelClient(connection_file=str(port_file / f"kernel-{number}.json"))
        client.load_connection_file()
        # Without a manager, a client takes a kernel whose heartbeat is a second late for dead.
        client.start_channels(hb=False)
        client.wait_for_ready(timeout=60)
        client.execute(
            "import torch, torch.distributed as dist, ddp_kit as kit\n"
            "kit.settings.RUN_JUDGED_AFTER = kit.settings.RANKS_JUDGED_AFTER = 600.0\n"
            "kit.run(lambda r, w: dist.recv(torch.zeros(1), src=1 - r), world_size=2)"
        )
        (kernel,) = (
            p for p in psutil.Process(server.pid).children() if "ipykernel" in str(p.cmdline())
        )
        wait_until(lambda: len(kernel.children()) == 2, 300, "the kernel has started its ranks")
        ranks = kernel.children()
        wait_until(lambda: all(len(r.net_connections()) > 1 for r in ranks), 300, "they talk")
        wait_until_calm(ranks)
        client.stop_channels()
    finally:
        server.kill()
        server.wait()
    assert_gone([kernel, *ranks], "JupyterLab was killed")
    assert_next_pool_sweeps()


def written(folder):
    """Return what a JupyterLab has written about itself so far."""
    return "".join(file.read_text() for file in folder.glob("jpserver-*.json"))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60):
            return True
    except urllib.error.URLError:
        return False


def assert_next_pool_sweeps() -> None:
    """A killed process may leave its pool's folder; the next pool's sweep removes it."""
    assert len(folders()) <= 1
    # A process with threads releases its lock a moment after it counts as ended.
    wait_until(lambda: private_folder.sweep() or not folders(), BOUND, "what was left is swept")


def test_the_next_pool_sweeps_what_a_killed_one_left_and_nothing_else(tmp_path):
    left, checkout = tmp_path / "ddp_kit-pool-left", tmp_path / "ddp_kit-main"
    homework = tmp_path / "ddp_kit-pool-mine" / "homework.py"
    for file in (left / "group-1", checkout / "README.md", homework):
        file.parent.mkdir()
        file.touch()
    with kit.WorkerPool(1), kit.WorkerPool(1):
        assert not left.exists()
        assert len(folders()) == 3, "two living pools keep theirs"
    assert homework.exists()
    assert (checkout / "README.md").exists()
    assert folders() == {homework.parent}


def test_large_values_leave_no_named_memory():
    before = named_memory()
    with kit.WorkerPool(2) as pool:
        values = list(pool.run(lambda rank, world_size: torch.ones(1_000_000)))
        wait_until(lambda: named_memory() <= before, BOUND, "the values have no names")
    assert all(value.sum() == 1_000_000 for value in values), "they outlive the pool"


def test_a_forked_child_does_not_close_the_pool(pool):
    before = list(pool.run(pid))
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(pool.run(pid)) == before


SCRIPT = """
import os
import ddp_kit as kit

def pid(rank, world_size):
    return os.getpid()

print(*kit.run(pid, world_size=2), flush=True)
"""


def start_script(body: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    ranks = [psutil.Process(int(p)) for p in script.stdout.readline().split()]
    assert len(ranks) == 2
    return script, ranks


def test_a_rank_that_leaves_ends_its_threads_and_calls_what_is_registered(tmp_path):
    def leave_much(rank, world_size):
        import atexit
        from concurrent.futures import ThreadPoolExecutor

        sys.left = ThreadPoolExecutor(1)
        sys.left.submit(int).result()
        atexit.register((tmp_path / "called").touch)

    with kit.WorkerPool(1) as pool:
        pool.run(leave_much)
    assert (tmp_path / "called").exists()
