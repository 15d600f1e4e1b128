"""`kit.torchrun`: ranks that torchrun starts, on this host and beside it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import BOUND

import ddp_kit as kit
from ddp_kit.lessons import torchrun as lesson
from ddp_kit.lessons.init_methods import free_ports
from ddp_kit.pool import live_view

pytestmark = pytest.mark.usefixtures("forked_torchrun")
torchrun = functools.partial(kit.torchrun, nproc_per_node=2)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path_factory):
    """Every run ends its processes and removes what it has written."""
    tmp_path_factory.getbasetemp()  # created here, so that it is beside this folder, not in it
    folder = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    # From 2.15 on, torchrun makes PyTorch's cache for compiled code, which is not ours to remove.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    assert psutil.wait_procs(agents(), timeout=BOUND)[1] == []
    assert os.listdir(folder) == []
    os.rmdir(folder)


def agents():
    """Return what this process has started of torchrun, and its ranks."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if "torch.distributed.run" in command or "group-program" in command:
                found.append(process)
    return found


class Shown(live_view.LiveView):
    """A view that remembers what every rank was doing, and for how long."""

    def __init__(self, _world_size=0):
        self.lines: list[list[live_view.RankLine]] = []

    def update(self, lines):
        self.lines.append(list(lines))


@functools.cache
def a_run():
    """Return the result of a run, what it printed, and what it showed: once for several tests."""
    factor, shown = 10, Shown()

    def worker(rank, world_size, added):
        total = torch.tensor([rank])
        dist.all_reduce(total)
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()
        print(f"sum {total.item()}")
        print("to stderr", file=sys.stderr)
        time.sleep(3)  # long enough to be seen
        return factor * total.item() + added, os.environ["RANK"], type(world_size)

    numbers = {"nproc_per_node": 2, "nnodes": 1}
    numbers = {name: numpy.int64(number) for name, number in numbers.items()}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(live_view, "current", live_view.View(lambda world_size: shown))
        patch.setenv("PET_NNODES", "2")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
        result = kit.torchrun(worker, 5, **numbers)
    return result, out.getvalue(), shown.lines


def test_it_returns_and_prints_what_run_does():
    result, printed, _ = a_run()  # with PET_NNODES=2, and with whole numbers of NumPy
    assert list(result) == [(15, "0", int), (15, "1", int)]
    assert result.output == ("sum 1\nto stderr\n",) * 2
    assert [event.op for event in result.trace] == ["all_reduce", "all_reduce", "barrier"] * 2
    lines = ["[rank 0] sum 1", "[rank 0] to stderr", "[rank 1] sum 1", "[rank 1] to stderr"]
    assert printed.splitlines()[:4] == lines
    assert "ranks 0 and 1 never waited for all_reduce, which may still be in flight" in printed


def test_what_ranks_do_is_shown_also_while_torchrun_starts():
    _, _, seen = a_run()
    doing = [[line.doing for line in lines] for lines in seen]
    assert doing[0] == ["starting under torchrun"] * 2
    assert ["computing"] * 2 in doing
    waits = [lines[0].seconds for lines in seen if lines[0].doing == "starting under torchrun"]
    assert max(filter(None, waits), default=0) >= 1, "it takes longer than a second"


def test_a_lesson_runs_by_name_with_its_options_and_its_trace(capsys):
    result = torchrun("ddp_kit.lessons.ring_allreduce", "--world-size", "2")
    assert list(result) == [None, None]
    line = "ring_allreduce: 2 ranks, 3 rings agree with dist.all_reduce"
    assert capsys.readouterr().out == f"[rank 0] {line}\n"
    assert len(result.trace.messages()) == 4  # of its last run, in chunks


def test_a_file_runs_as_a_program_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""
            import os, sys, beside
            import torch.distributed as dist
            if __name__ == "__main__":
                dist.init_process_group("gloo")
                print(beside.word, sys.argv[1:], dist.get_world_size())
                dist.destroy_process_group()
                sys.exit(0)
        """)
    )
    monkeypatch.chdir(tmp_path)
    result = kit.torchrun("train.py", "--epochs", "1", nproc_per_node=1)
    assert list(result) == [None]
    assert result.output == ("found ['--epochs', '1'] 1\n",)


def test_a_deadlock_is_reported_also_with_a_rank_that_has_returned():
    def recv_in_vain(rank, world_size):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)

    with pytest.raises(kit.DeadlockError, match="which has returned without sending") as caught:
        torchrun(recv_in_vain)
    assert caught.value.returned == (1,)


def one_ends(rank, world_size, how):
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")
    dist.barrier()


def test_a_rank_that_raises_is_reported_with_its_line_and_the_waits_of_the_others():
    with pytest.raises(kit.RankError) as caught:
        torchrun(one_ends, "raised")
    assert set(caught.value.failures) == {1}
    frames = caught.value.failures[1].frames
    assert [frame.function for frame in frames if frame.own] == ["one_ends"]
    assert caught.value.failures[1].where.source == 'raise ValueError("boom")'
    assert [wait.op for wait in caught.value.waits] == ["barrier"]


def test_a_rank_that_is_killed_is_reported_with_its_signal():
    with pytest.raises(kit.RankDiedError) as caught:
        torchrun(one_ends, "killed")
    assert (caught.value.rank, caught.value.signal) == (1, "SIGKILL")


def test_an_interrupt_ends_a_run_and_its_agent_and_loses_no_output(capsys):
    def worker(rank, world_size, pid):
        print("begun", flush=True)
        if rank == 0:
            dist.recv(torch.zeros(1), 1)  # rank 1 has begun, too
        else:
            dist.send(torch.zeros(1), 0)
        if rank == 0:
            os.kill(pid, signal.SIGINT)
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(KeyboardInterrupt):
        torchrun(worker, os.getpid())
    assert capsys.readouterr().out == "[rank 0] begun\n[rank 1] begun\n"


class OtherHost(io.StringIO):
    """A fake stdout that runs each command line that is printed for another host."""

    def __init__(self, changes=()):
        super().__init__()
        self.started, self._changes = [], dict(changes)

    def write(self, text):
        if text.startswith("  torchrun "):
            for old, new in self._changes.items():
                text = text.replace(old, new)
            words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(text)[1:]]
            pipes = {"stdout": self._output, "stderr": subprocess.STDOUT}
            around = os.environ | {"TMPDIR": self._folder}  # torchrun leaves a folder of its own
            self.started.append(subprocess.Popen(words, env=around, **pipes))
        return super().write(text)

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._output = self._stack.enter_context(tempfile.TemporaryFile("w+"))
        self._stack.enter_context(contextlib.redirect_stdout(self))
        return self

    def __exit__(self, *_exc):
        try:
            for process in self.started:
                process.wait(60)
        finally:
            for process in self.started:
                process.kill()
                process.wait()
            self._output.seek(0)
            self.output = self._output.read()
            self._stack.close()


@pytest.fixture
def beside_the_notebook(monkeypatch, tmp_path):
    """Run in a new folder; the file that is written there for the other host must be removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    assert os.listdir(tmp_path) == []


on_two_hosts = functools.partial(
    kit.torchrun, nproc_per_node=1, nnodes=2, master_addr="127.0.0.1", join_timeout=300
)


@pytest.mark.usefixtures("beside_the_notebook")
def test_ranks_of_two_hosts_return_print_and_are_traced():
    def worker(rank, world_size):
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.zeros(2), 0)
        print(f"rank {rank} of {world_size}, on host {os.environ['GROUP_RANK']}")
        if rank == 1:
            print("." * 300_000)
            display("text", display_id=True, metadata={})  # noqa: F821 - as in a notebook
        return rank * 10

    with OtherHost() as other_host:
        result = on_two_hosts(worker)
    assert list(result) == [0, 10]
    assert result.output[0] == "rank 0 of 2, on host 0\n"
    dropped = r"\n\.\.\. 100,029 bytes left out: 200,000 of a run are kept \.\.\.\n"
    of_host = rf"rank 1 of 2, on host 1\n\.+{dropped}\.+\ntext\n"
    assert re.fullmatch(of_host, result.output[1]), "the end of a flood is kept, too"
    assert [(m.src, m.dst, m.nbytes) for m in result.trace.messages()] == [(0, 1, 8)]
    assert "[rank 1] rank 1 of 2, on host 1\n" in other_host.getvalue()
    assert "rank 1 of 2, on host 1" in other_host.output


@pytest.mark.usefixtures("beside_the_notebook")
def test_what_a_rank_on_another_host_raises_is_reported_here():
    def worker(rank, world_size):
        if rank == 1:
            raise ValueError("boom")
        time.sleep(600)  # gloo does not end it

    with OtherHost(), pytest.raises(kit.RankError) as caught:
        on_two_hosts(worker)
    assert [(rank, f.type) for rank, f in caught.value.failures.items()] == [(1, "ValueError")]


@pytest.mark.usefixtures("beside_the_notebook")
def test_a_deadlock_with_a_rank_on_another_host_is_reported():
    def worker(rank, world_size):
        dist.recv(torch.zeros(1), 1 - rank)

    words = "rank 0 waits for rank 1, rank 1"
    with OtherHost(), pytest.raises(kit.DeadlockError, match=words) as caught:
        on_two_hosts(worker)
    sources = [wait.where.source for wait in caught.value.waits]
    assert sources == ["dist.recv(torch.zeros(1), 1 - rank)"] * 2


@pytest.mark.usefixtures("beside_the_notebook")
def test_an_exit_of_a_worker_on_another_host_is_reported():
    with OtherHost(), pytest.raises(kit.RankError) as caught:
        on_two_hosts(lambda rank, world_size: sys.exit(3) if rank == 1 else "fine")
    assert str(caught.value.failures[1]).startswith("SystemExit: 3")


@pytest.mark.usefixtures("beside_the_notebook")
def test_another_number_of_ranks_on_the_other_host_is_reported():
    with (
        OtherHost({"--nproc-per-node 1": "--nproc-per-node 2"}),
        pytest.raises(kit.RankError, match="torchrun has started 3 ranks instead of 2"),
    ):
        on_two_hosts(lambda rank, world_size: dist.barrier())


def test_a_host_that_never_joins_is_reported_in_one_sentence(capsys):
    with pytest.raises(kit.PoolError, match="connected within 3 s: start those of host 1"):
        on_two_hosts(lesson.my_place, join_timeout=3)
    command = capsys.readouterr().out
    assert "--node-rank 1" in command
    [port] = re.findall(r"--master-port (\d+)", command)
    assert 20000 <= int(port) < 30000  # an outgoing connection may take a larger one meanwhile


def test_an_impossible_rendezvous_is_refused_before_anything_starts():
    two_hosts = functools.partial(torchrun, lesson.my_place, nnodes=2)
    with pytest.raises(kit.PoolError, match="cannot resolve the name 'no-such-host'"):
        two_hosts(master_addr="no-such-host")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(kit.PoolError, match=f"port {port} of this host is unavailable"):
            two_hosts(master_addr="127.0.0.1", master_port=port)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node must be a whole number of at least 1, got 0"),
        ({"nnodes": "1:2"}, "nnodes must be a whole number of at least 1, got '1:2'"),
        ({"nnodes": True}, "nnodes must be a whole number of at least 1, got True"),
        ({"timeout": 0}, "timeout must be a positive number of seconds or None, got 0"),
        ({"join_timeout": None}, "join_timeout must be a positive number of seconds, got None"),
        ({"master_port": 29500}, "one host needs no master_addr= and master_port="),
        ({"nnodes": 2, "master_port": 70000}, "master_port must be at most 65535, got 70000"),
        ({"nnodes": 2, "master_addr": 5}, 'master_addr must be a name such as "host0", got 5'),
        ({"backend": "mpi"}, "torchrun cannot start MPI ranks; use kit.run"),
        ({"worker": "no_such_module"}, "there is no module 'no_such_module'; name a module"),
        ({"worker": "missing.py"}, "there is no file 'missing.py'; name a module or a file"),
        ({"worker": len}, "cannot be called as len(rank, world_size)"),
        ({"worker": len}, "nproc_per_node= sets the number of ranks"),
    ],
)
def test_an_impossible_argument_is_refused_before_anything_starts(given, message):
    worker = given.pop("worker", lesson.my_place)
    with pytest.raises(kit.KitError) as caught:
        kit.torchrun(worker, **given)
    assert message in str(caught.value)


def test_a_file_that_the_kit_did_not_write_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    file = tmp_path / f"my_place_for_port_{port}.py"
    file.write_text("important = True\n")
    with pytest.raises(kit.PoolError, match=f"{file.name!r} is in the way"):
        kit.torchrun(lesson.my_place, nnodes=2, master_addr="127.0.0.1", master_port=port)
    assert file.read_text() == "important = True\n"


def test_ranks_that_never_came_are_reported(capsys):
    with pytest.raises(kit.PoolError, match="torchrun did not start 1 ranks"):
        kit.torchrun(print, nproc_per_node=1, join_timeout=0.01)
    assert capsys.readouterr().out == ""
