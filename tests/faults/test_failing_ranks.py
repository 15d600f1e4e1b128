"""A rank raises or dies while the others wait: all is reported, and the pool stays usable."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.pool import launchers
from ddp_kit.pool.rank import bootstrap
from ddp_kit.pool.rank.server import describe


def total(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    return tensor.item()


def pid(rank, world_size):
    return os.getpid()


def one_raises(rank, world_size):
    if rank == 1:
        raise ValueError("boom")
    if rank == 3:
        time.sleep(600)
    dist.barrier()


def line_of(function, number):
    return f"line {function.__code__.co_firstlineno + number} of {function.__name__}"


@pytest.mark.usefixtures("forked_ranks")
def test_one_rank_raises_while_others_wait():
    list(kit.run(pid))
    start = time.monotonic()
    with pytest.raises(kit.RankError) as caught:
        kit.run(one_raises)
    assert time.monotonic() - start < 60  # it took 0.4 s when this was written
    assert set(caught.value.failures) == {1}
    assert str(caught.value).splitlines() == [
        "rank 1 raised ValueError: boom",
        f'    {line_of(one_raises, 2)}: raise ValueError("boom")',
        "ranks 0 and 2 were waiting in barrier",
        f"    {line_of(one_raises, 5)}: dist.barrier()",
        "rank 3 had not returned",
    ]
    assert kit.run(total)[0] == 6


def test_equal_failures_are_reported_once_and_all_also_if_one_comes_late():
    def two_ways(rank, world_size):
        if rank == 2:
            time.sleep(0.2)
            raise KeyError("other")
        raise ValueError("same")

    with pytest.raises(kit.RankError) as caught:
        kit.run(two_ways)
    assert set(caught.value.failures) == {0, 1, 2, 3}
    raised = [line for line in str(caught.value).splitlines() if line.startswith("rank")]
    assert raised == ["ranks 0, 1 and 3 raised ValueError: same", "rank 2 raised KeyError: 'other'"]


def test_output_before_a_failure_is_shown_and_kept_with_the_error(capsys):
    def talk_then_raise(rank, world_size):
        print("last words")
        raise RuntimeError

    with pytest.raises(kit.RankError, match="ranks 0 and 1 raised RuntimeError") as caught:
        kit.run(talk_then_raise, world_size=2)
    assert caught.value.output == ("last words\n",) * 2
    assert capsys.readouterr().out == "[rank 0] last words\n[rank 1] last words\n"


@pytest.mark.parametrize("reason", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_that_cannot_be_printed_is_still_reported(reason):
    class Mute(BaseException):
        def __str__(self):
            raise reason("no words")

    def fail(rank, world_size):
        raise Mute if rank else KeyboardInterrupt

    with pytest.raises(kit.RankError, match="rank 0 raised KeyboardInterrupt") as caught:
        kit.run(fail, world_size=2)
    assert "rank 1 raised Mute: (its message could not be read" in str(caught.value)


def described(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of any type
        function(*args)
    return describe(0, caught.value)


def test_what_python_shows_with_an_exception_comes_with_it():
    def look_up(config):
        return config["lr"]

    def fail(rank):
        try:
            look_up({})
        except KeyError as error:
            if rank == 0:
                raise ValueError("no rate") from error
            if rank == 1:
                raise ValueError("no rate")  # noqa: B904
            raise ValueError("no rate") from None

    direct, during, neither = (described(fail, rank) for rank in range(3))
    assert (direct.cause.type, direct.cause.where.source) == ("KeyError", 'return config["lr"]')
    assert during.context == direct.cause
    assert (direct.context, during.cause, neither.cause, neither.context) == (None,) * 4


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has neither notes nor groups")
def test_notes_and_the_members_of_a_group_come_with_it():
    first = ValueError("one")
    first.add_note("Try two.")
    members = describe(0, ExceptionGroup("both", [first, TypeError("two")])).members  # noqa: F821
    assert [(one.type, one.notes) for one in members] == [
        ("ValueError", ("Try two.",)),
        ("TypeError", ()),
    ]


def test_a_circle_of_causes_is_cut():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    text = str(kit.RankError({0: describe(0, first)}))
    assert 2 <= text.count("directly caused by") < 50


@pytest.mark.usefixtures("forked_ranks")
def test_an_exception_that_a_barrier_hides_is_shown():
    def leave(rank, world_size):
        try:
            if rank == 1:
                {}["lr"]
            dist.all_reduce(torch.ones(1))
        finally:
            dist.barrier()

    with pytest.raises(kit.MismatchError) as caught:
        kit.run(leave, world_size=3)
    assert set(caught.value.handled) == {1}
    assert caught.value.hint.startswith("The KeyError of rank 1 may be the reason. All ranks")
    lines = str(caught.value).splitlines()
    at = lines.index("rank 1 was handling KeyError: 'lr'")
    assert lines[at + 1] == f'    {line_of(leave, 3)}: {{}}["lr"]'


@pytest.mark.usefixtures("forked_ranks")
def test_an_exception_that_was_handled_before_is_left_out_of_a_later_wait():
    def recover(rank, world_size):
        if rank == 0:
            with suppress(KeyError):
                {}["lr"]
            try:
                {}["lr"]
            except KeyError:
                dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
        dist.recv(torch.ones(1), 1 - rank)

    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(recover, world_size=2)
    assert caught.value.handled == {}


def kill_itself(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("leave", "argument", "exitcode", "words"),
    [
        (os._exit, 3, 3, "exited with code 3. Likely cause: the worker called os._exit"),
        (kill_itself, signal.SIGKILL, -9, "ended by SIGKILL. Likely cause: it was"),
        (kill_itself, signal.SIGSEGV, -11, "ended by SIGSEGV. Likely cause: native"),
    ],
    ids=["os._exit", "SIGKILL", "SIGSEGV"],
)
def test_a_rank_that_dies_is_named(leave, argument, exitcode, words):
    def die(rank, world_size):
        if rank == 1:
            leave(argument)
        dist.barrier()

    with pytest.raises(kit.RankDiedError) as caught:
        kit.run(die, world_size=2)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    first, *waits = str(caught.value).splitlines()
    assert first.startswith(f"rank 1 died: {words}")
    assert waits == ["rank 0 was waiting in barrier", f"    {line_of(die, 3)}: dist.barrier()"]
    assert kit.run(total, world_size=2)[0] == 1


@pytest.mark.usefixtures("forked_ranks")
def test_a_failure_is_also_reported_when_another_rank_dies():
    def worker(rank, world_size):
        if rank == 0:
            raise ValueError("the real cause")
        if rank == 1:
            os._exit(3)
        dist.barrier()

    with pytest.raises(kit.RankDiedError) as caught:
        kit.run(worker, world_size=3)
    first, *others = str(caught.value).splitlines()
    assert first.startswith("rank 1 died: exited with code 3.")
    assert others[0] == "rank 0 raised ValueError: the real cause"
    assert others[2] == "rank 2 was waiting in barrier"
    assert list(caught.value.failures) == [0]


@pytest.mark.usefixtures("forked_ranks")
def test_sys_exit_waits_for_no_thread():
    def worker(rank, world_size):
        threading.Thread(target=time.sleep, args=(600,)).start()
        sys.exit("enough")

    with pytest.raises(kit.RankError, match="rank 0 raised SystemExit: enough"):
        kit.run(worker, world_size=1, timeout=60)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("leave", [sys.exit, lambda: sys.exit(0), exit])
def test_an_exit_without_an_error_is_a_result(leave):
    def worker(rank, world_size):
        if rank == 1:
            leave()
        return "whole"

    assert list(kit.run(worker, world_size=2)) == ["whole", None]


@pytest.mark.usefixtures("forked_ranks")
def test_an_exit_with_an_error_has_its_line():
    def worker(rank, world_size):
        if rank == 1:
            argparse.ArgumentParser().parse_args(["--epochs"])
        dist.barrier()

    with pytest.raises(kit.RankError) as caught:
        kit.run(worker, world_size=2)
    assert str(caught.value).splitlines()[:2] == [
        "rank 1 raised SystemExit: 2",
        f'    {line_of(worker, 2)}: argparse.ArgumentParser().parse_args(["--epochs"])',
    ]
    assert "error: unrecognized arguments: --epochs" in caught.value.output[1]


def zero_waits(rank, world_size):
    if rank == 1:
        raise ValueError("boom")
    dist.recv(torch.zeros(1), src=1)


@pytest.mark.usefixtures("forked_ranks")
def test_only_the_ranks_that_had_to_be_stopped_are_replaced():
    before = list(kit.run(pid, world_size=2))
    with pytest.raises(kit.RankError):
        kit.run(zero_waits, world_size=2)
    now = list(kit.run(pid, world_size=2))
    assert now[1] == before[1], "the rank that raised is warm, and needs no replacement"
    assert now[0] != before[0]


NOTED = """
from ddp_kit.pool import launchers

def noted(make=launchers.NewProcess, **kwargs):
    print("a rank starts")
    return make(**kwargs)

def zero_waits(rank, world_size):
    if rank == 1:
        raise ValueError("boom")
    dist.recv(torch.zeros(1), src=1)

kit.run(pid, world_size=2)
launchers.NewProcess = noted
"""


@pytest.mark.usefixtures("forked_spawn")
def test_a_notebook_shows_the_error_first_and_starts_only_the_replacements_that_it_needs(kernel):
    """All in one notebook, because a kernel and its ranks take seconds."""
    kernel.run(NOTED)
    the_error_comes_first_and_then_the_replacements(kernel)
    a_replacement_that_fails_to_start_is_reported_by_the_next_run_only(kernel)
    a_pool_that_is_closed_in_the_cell_of_its_error_starts_none(kernel)


def the_error_comes_first_and_then_the_replacements(kernel):
    cell = kernel.raises("kit.run(zero_waits, world_size=2)")
    shown = [kind for kind, _ in cell.messages if kind in ("error", "stream")]
    assert shown == ["error", "stream"]
    assert cell.stdout == "a rank starts\n"
    assert kernel.run("kit.run(pid, world_size=2)").stdout == ""


def a_replacement_that_fails_to_start_is_reported_by_the_next_run_only(kernel):
    kernel.run("def refuse(**kwargs): raise OSError(12, 'Cannot allocate memory')")
    kernel.run("launchers.NewProcess = refuse")
    cell = kernel.raises("kit.run(zero_waits, world_size=2)")
    assert cell.error["evalue"].startswith("rank 1 raised ValueError: boom")
    assert cell.stdout + cell.stderr == ""
    cell = kernel.raises("kit.run(pid, world_size=2)")
    assert cell.error["evalue"].startswith("cannot start another process here")
    kernel.run("launchers.NewProcess = noted")
    assert len(kernel.ranks(2)) == 2


def a_pool_that_is_closed_in_the_cell_of_its_error_starts_none(kernel):
    kernel.run("pool = kit.WorkerPool(2); pool.run(pid)")
    cell = kernel.raises("try: pool.run(zero_waits)\nfinally: pool.close()")
    assert cell.error["ename"] == "RankError"
    assert cell.stdout == ""


def test_a_rank_killed_between_runs_is_replaced():
    victim = kit.run(pid, world_size=2)[1]
    os.kill(victim, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(victim)], timeout=300)
    assert victim not in list(kit.run(pid, world_size=2))


def test_a_rank_that_dies_while_the_group_forms_is_reported_and_replaced():
    with kit.WorkerPool(2) as pool:
        pool._processes.ranks[1].process.kill()  # may still count as alive for a moment
        with suppress(kit.RankDiedError):
            pool.run(pid)
        assert len(pool.run(pid)) == 2


@pytest.mark.parametrize("started", [0, 1])
def test_a_pool_that_cannot_start_all_its_ranks_says_so_and_leaves_nothing(monkeypatch, started):
    make, ranks = launchers.NewProcess, []

    def refuse(**kwargs):
        if len(ranks) == started:
            raise OSError(24, "Too many open files")
        ranks.append(make(**kwargs))
        return ranks[-1]

    monkeypatch.setattr(launchers, "NewProcess", refuse)
    with pytest.raises(kit.PoolError, match=r"cannot start another process.*open files") as caught:
        kit.WorkerPool(2)
    assert caught.value is not None, "it is held, and its traceback holds the pool"
    assert all(rank.exitcode is not None for rank in ranks)


@pytest.mark.usefixtures("forked_ranks")
def test_a_run_ends_at_its_timeout():
    def one_is_late(rank, world_size):
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)
        time.sleep(600)

    list(kit.run(pid, world_size=2))
    start = time.monotonic()
    with pytest.raises(kit.RunTimeoutError) as caught:
        kit.run(one_is_late, world_size=2, timeout=5)
    assert time.monotonic() - start < 60
    assert caught.value.unfinished == (0, 1)
    assert [frame.function for frame in caught.value.waits[1].stack] == ["one_is_late"]
    assert any("time.sleep" in line for line in caught.value._render_traceback_())
    assert str(caught.value).splitlines() == [
        "the run did not end within 5 s.",
        "rank 0 was waiting in recv(src=1)",
        f"    {line_of(one_is_late, 2)}: dist.recv(torch.zeros(1), src=1)",
        "rank 1 had not returned",
        "Look for a loop that does not end on rank 1, or a wait that the kit does not record, such "
        "as for a queue, a lock or a process. If the work needs longer, raise the timeout.",
    ]
    assert kit.run(total, world_size=2)[0] == 1


def asks(rank, world_size):
    return input("go on? ") if rank else breakpoint()


def test_a_worker_that_calls_input_fails_with_an_explanation():
    with pytest.raises(kit.RankError) as caught:
        kit.run(asks, world_size=2)
    messages = [caught.value.failures[rank].message for rank in range(2)]
    assert "input() and debuggers do not work in a rank" in messages[0]
    assert "pass the answer to the ranks as an argument of kit.run" in messages[1]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", ["recording", "pack", "describe"])
def test_a_bug_in_the_kit_itself_is_reported_with_its_traceback(name):
    def breaks_the_kit(rank, world_size):
        if rank == 1:
            from ddp_kit.pool.rank import server

            def bug(*args):
                raise LookupError("a bug in the kit")

            setattr(server, name, bug)
            server.RankServer._status = bug

    def breaks_the_kit_and_fails():
        kit.run(breaks_the_kit, world_size=2)
        kit.run(zero_waits, world_size=2)

    with pytest.raises(kit.InternalError) as caught:
        breaks_the_kit_and_fails()
    assert caught.value.rank == 1
    assert "LookupError: a bug in the kit" in caught.value.traceback
    assert "Please report it" in str(caught.value)
    assert kit.run(total, world_size=2)[0] == 1


@pytest.mark.usefixtures("forked_ranks")
def test_after_a_bug_in_the_kit_all_ranks_are_new():
    def breaks_the_kit_in_the_next_run(rank, world_size, number):
        from ddp_kit.trace.rank import recorded_functions

        def bug(*args):
            raise LookupError("a bug in the kit")

        if rank == number:
            recorded_functions.Recorder = bug

    kit.run(breaks_the_kit_in_the_next_run, 1, world_size=2)
    with pytest.raises(kit.InternalError):
        kit.run(breaks_the_kit_in_the_next_run, 0, world_size=2)
    assert kit.run(total, world_size=2)[0] == 1


def exits_at_once(*args):
    os._exit(3)


def test_a_process_that_ends_before_any_worker_ran_is_not_blamed_on_the_worker(monkeypatch):
    monkeypatch.setattr(bootstrap, "serve_spawned", exits_at_once)
    with (
        pytest.raises(kit.PoolError, match="rank 0 ended with exit code 3 before it was ready"),
        kit.WorkerPool(1) as pool,
    ):
        pool.run(total)
