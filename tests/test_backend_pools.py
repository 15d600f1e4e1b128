"""`backend="mpi"` and `backend="shm"` in a pool: their ranks behave as those of gloo do."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import wait_until

import ddp_kit as kit
from ddp_kit.backends import mpi, shm
from ddp_kit.pool import launchers

needs_mpi = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))
needs_shm = pytest.mark.skipif(shm.missing() is not None, reason=str(shm.missing()))
NAMES = {"mpi": mpi.NAME, "shm": shm.NAME}


@pytest.fixture(params=[pytest.param("mpi", marks=needs_mpi), pytest.param("shm", marks=needs_shm)])
def backend(request):
    return request.param


@pytest.fixture
def run(backend):
    return functools.partial(kit.run, world_size=2, backend=backend)


def total(rank, world_size):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    print("rank", rank, "over", dist.get_backend())
    return tensor.item(), os.getpid()


@pytest.fixture(scope="module", autouse=True)
def no_ranks_of_another_file():
    kit.shutdown()


def test_runs_are_warm_and_bring_back_values_output_and_trace(run, backend):
    first, second = run(total), run(total)
    assert [value for value, _ in first] == [3.0] * 2
    assert first.output == tuple(f"rank {rank} over {NAMES[backend]}\n" for rank in range(2))
    assert [pid for _, pid in first] == [pid for _, pid in second]
    (call,) = second.trace.collectives
    assert [(rank, event.call) for rank, event in sorted(call.items())] == [
        (0, "all_reduce"),
        (1, "all_reduce"),
    ]
    assert all(event.waited and event.end for event in call.values())


def test_a_smaller_world_uses_the_warm_processes(run, backend):
    pids = [pid for _, pid in run(total)]
    assert list(run(total, world_size=1)) == [(1.0, pids[0])]
    assert [pid for _, pid in run(total)] == pids


def raises(rank, world_size):
    if rank == 1:
        raise ValueError("no")
    dist.barrier()


def waits_in_a_ring(rank, world_size):
    dist.recv(torch.zeros(1), (rank + 1) % world_size)


def disagrees(rank, world_size):
    dist.broadcast(torch.zeros(2 + (rank == 1)), src=0)


@pytest.mark.parametrize(
    ("worker", "error", "words"),
    [
        (raises, kit.RankError, "^rank 1 raised ValueError: no"),
        (waits_in_a_ring, kit.DeadlockError, "neither can ever send"),
        (disagrees, kit.MismatchError, "^rank"),
    ],
)
def test_a_mistake_is_explained_and_the_next_run_works(run, worker, error, words):
    with pytest.raises(error, match=words):
        run(worker, timeout=60)
    assert [value for value, _ in run(total)] == [3.0] * 2


def test_the_rank_that_died_is_named_and_not_those_that_mpiexec_ended(run):
    def worker(rank, world_size, end):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else os._exit(end)
        dist.barrier()

    ends = {"killed": "rank 1 died: ended by SIGKILL", 0: "exited with code 0"}
    for end, message in ends.items():
        with pytest.raises(kit.RankDiedError, match=message) as caught:
            run(worker, end, timeout=60)
        assert caught.value.rank == 1
    assert [value for value, _ in run(total)] == [3.0] * 2


def test_an_interrupt_ends_the_run_and_the_pool_works(run):
    def waits(rank, world_size, pid):
        if rank:
            dist.barrier()
        else:
            os.kill(pid, signal.SIGINT)
            threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run(waits, os.getpid(), timeout=60)
    assert [value for value, _ in run(total)] == [3.0] * 2


@needs_mpi
def test_an_interrupt_while_mpiexec_starts_ends_what_it_has_started(monkeypatch):
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    with kit.WorkerPool(2, backend="mpi") as pool:
        with monkeypatch.context() as patched:
            patched.setattr(mpi, "mpiexec", lambda world_size: sleeps)
            pool.restart()
            subprocess.Popen(["sh", "-c", f"sleep 2; kill -INT {os.getpid()}"])
            with pytest.raises(KeyboardInterrupt):
                pool.run(total)
        assert [value for value, _ in pool.run(total)] == [3.0, 3.0]


@pytest.fixture
def temporary(monkeypatch, tmp_path_factory):
    """A temporary folder of its own for a test: a short name, because it will hold sockets."""
    tmp_path_factory.getbasetemp()  # created here, so that it is beside this folder, not in it
    folder = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    yield Path(folder)
    shutil.rmtree(folder)


@needs_mpi
def test_a_killed_parent_takes_mpiexec_and_its_ranks_along(temporary, tmp_path):
    program = textwrap.dedent(
        """
        import os, pathlib, time
        import ddp_kit as kit
        pool = kit.WorkerPool(2, backend="mpi")
        pids = list(pool.run(lambda rank, world_size: (os.getpid(), os.getppid())))
        path = pathlib.Path("pids")
        path.with_suffix(".new").write_text(" ".join(str(p) for pair in pids for p in pair))
        path.with_suffix(".new").rename(path)
        pool.run(lambda rank, world_size: time.sleep(600))
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        wait_until((tmp_path / "pids").exists, 300, "the ranks have run")
        ranks = [psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split()]
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left
    wait_until(lambda: not list(temporary.glob("ompi.*")), 300, "Open MPI's files are gone")


def test_a_wait_that_only_its_timeout_can_end_is_explained(run):
    def worker(rank, world_size):
        group = dist.new_group(timeout=timedelta(seconds=10))
        if rank == 0:
            dist.barrier(group=group)

    with pytest.raises(kit.DeadlockError, match="ends by its own time limit") as caught:
        run(worker, timeout=60)
    assert "Timed out waiting 10000ms for barrier" in caught.value.failures[0].message


# The pool keeps three ranks after this one, so the tests above come first.
@needs_mpi
def test_a_larger_world_starts_new_ranks_without_a_word(watch):
    seen: list[str] = []
    watch(lambda lines: seen.extend(line.doing for line in lines))
    assert [value for value, _ in kit.run(total, world_size=3, backend="mpi")] == [6.0] * 3
    assert "starting under mpiexec" in seen[:3]
    assert set(seen[:3]) <= {"starting under mpiexec", "ready"}, "one may have been quick"


def test_messages_of_any_source_are_matched_in_the_trace(run):
    def worker(rank, world_size):
        tensor = torch.tensor([rank])
        if rank:
            dist.send(tensor, 0, tag=rank)
            return None
        return [dist.recv(tensor, tag=tag) for tag in (2, 1)]

    result = run(worker, world_size=3)
    assert result[0] == [2, 1]
    assert [(m.src, m.dst, m.tag) for m in result.trace.messages()] == [(1, 0, 1), (2, 0, 2)]


def test_bare_ranks_are_recorded_from_their_first_run_on(backend, tmp_path):
    def worker(rank, world_size, name, path):
        if name == shm.NAME:
            shm.register()
            store = dist.FileStore(path, world_size)
        else:
            store = dist.HashStore()
        dist.init_process_group(name, rank=rank, world_size=world_size, store=store)
        dist.barrier()
        dist.destroy_process_group()

    with kit.WorkerPool(2, backend=backend, init=False) as pool:
        assert len(pool.run(worker, NAMES[backend], str(tmp_path / "store")).trace.collectives) == 1


@needs_mpi
def test_a_folder_with_a_long_name_is_refused_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    with pytest.raises(kit.PoolError, match="TMPDIR must be a folder with a shorter name"):
        kit.WorkerPool(2, backend="mpi")


def segments(ranks):
    """Return patterns for the names of all shared memory of the MPI jobs of these ranks.

    Open MPI names a segment after its job and, behind the last dot, the rank that made it.
    """
    if not os.path.isdir("/dev/shm"):
        return set()
    mapped = [Path(entry.path) for rank in ranks for entry in rank.memory_maps()]
    return {f"{path.stem}.*" for path in mapped if path.match("/dev/shm/sm_segment.*")}


@needs_mpi
def test_a_closed_pool_leaves_neither_processes_nor_files(temporary):
    with kit.WorkerPool(2, backend="mpi") as pool:
        ranks = [psutil.Process(pid) for _, pid in pool.run(total)]
        launcher = ranks[0].parent()
        assert "mpi" in "".join(launcher.cmdline())
        patterns = segments(ranks)
        assert list(temporary.glob("ddp_kit-pool-*")), "this test looks in the wrong folder"
    assert psutil.wait_procs([*ranks, launcher], timeout=60)[1] == []
    assert [path for name in patterns for path in Path("/dev/shm").glob(name)] == []
    assert list(temporary.iterdir()) == []


@needs_mpi
def test_the_output_of_an_mpiexec_that_starts_nothing_is_reported(monkeypatch):
    refuses = [sys.executable, "-c", "import sys; sys.exit('no slots')"]
    with kit.WorkerPool(2, backend="mpi") as pool:
        monkeypatch.setattr(mpi, "mpiexec", lambda world_size: refuses)
        with pytest.raises(kit.BackendError) as caught:
            pool.run(total, world_size=3)
        monkeypatch.undo()
        assert [value for value, _ in pool.run(total)] == [3.0, 3.0], "it asks for 2 again"
    assert str(caught.value) == "mpiexec did not start 3 ranks: no slots"


@needs_mpi
def test_an_mpi_that_cannot_be_loaded_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no/such/libmpi.so")
    with kit.WorkerPool(2, backend="mpi") as pool, pytest.raises(kit.BackendError) as caught:
        pool.run(total)
    message = (
        "the ranks ended before they were ready: BackendError: mpi4py cannot load an MPI library"
    )
    assert str(caught.value).startswith(message)


@needs_mpi
def test_a_missing_package_is_reported_before_anything_starts(monkeypatch):
    missing = 'backend="mpi" needs mpi4py, which is not installed; pip install "ddp_kit[mpi]"'
    monkeypatch.setattr(mpi, "missing", lambda: missing)
    monkeypatch.setattr(launchers, "MPIExecProgram", None)
    with pytest.raises(kit.BackendError) as caught:
        kit.run(total, backend="mpi")
    assert str(caught.value) == missing
