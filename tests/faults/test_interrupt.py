"""■ in a notebook and Ctrl-C in a terminal: the prompt is back, whatever the ranks do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from kernels import ENVIRONMENT, STUCK, interrupt, start_stuck
from processes import assert_gone, wait_until

from ddp_kit.pool.run_loop import Run


def test_the_interrupt_button_ends_a_run_that_starts(kernel):
    """Both in one notebook, because a kernel takes seconds."""
    while_its_processes_are_being_spawned(kernel)
    kernel.run("kit.shutdown()")
    while_its_ranks_are_starting(kernel)


def while_its_ranks_are_starting(kernel):
    def ranks() -> list[psutil.Process]:
        children = kernel.process.children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def importing() -> bool:
        return sum(rank.memory_info().rss > 50e6 for rank in ranks()) == 2

    cell = kernel.send("kit.run(pid, world_size=2)")
    wait_until(importing, 100, "two ranks are importing torch")
    started = ranks()
    interrupt(kernel, cell, "start")
    assert cell.rendered.splitlines()[1:] == ["the ranks were still starting: no worker had begun"]
    assert_gone(started, "the interrupt of their start")


def while_its_processes_are_being_spawned(kernel):
    cell = kernel.raises(
        "import signal\n"
        "from ddp_kit.pool import launchers\n"
        "class Interrupting:\n"
        "    def __init__(self, make=launchers.NewProcess, **options):\n"
        "        launchers.NewProcess = make\n"
        "        self.process = make(**options)\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.process, name)\n"
        "    def start(self):\n"
        "        self.process.start()\n"
        "        os.killpg(os.getpgrp(), signal.SIGINT)  # as the button does\n"
        "launchers.NewProcess = Interrupting\n"
        "kit.run(pid, world_size=2)"
    )
    assert cell.error["ename"] == "KeyboardInterrupt"
    assert cell.rendered.startswith("KeyboardInterrupt: the run was stopped")
    assert cell.stderr == ""
    assert kernel.process.children() == [], "what was started is ended"
    assert len(kernel.ranks(2)) == 2


@pytest.mark.usefixtures("forked_spawn")
def test_the_interrupt_button_ends_a_run_whatever_its_ranks_do(kernel, tmp_path):
    kernel.run(STUCK)
    for worker in ("recv", "loop", "sleep", "flood"):
        cell, ranks = start_stuck(kernel, worker, tmp_path / worker)
        interrupt(kernel, cell, worker)
        assert_gone(ranks, f"the interrupt of {worker}")
        shown = cell.rendered.splitlines()
        assert shown[0].startswith("KeyboardInterrupt: the run was stopped; ranks that had not")
        if worker == "recv":
            assert shown[1:3] == [f"rank {r} was waiting in recv(src={1 - r})" for r in (0, 1)]
            assert shown[4] == "    dist.recv(torch.zeros(1), src=1 - rank)"
    assert len(kernel.ranks(2)) == 2


def test_an_interrupt_at_any_moment_leaves_interrupts_as_they_were():
    """SIGINT comes while the kit begins or stops holding interrupts back, a thousand times."""
    shooter = (
        "import os, random, signal, sys, time\n"
        "while os.read(0, 1):\n"  # one signal per request: a second would reach the except below
        "    time.sleep(random.random() / 1000)\n"
        "    os.kill(os.getppid(), signal.SIGINT)\n"
    )
    code = (
        "import os, signal, subprocess, sys, threading\n"
        "from ddp_kit.pool.interrupts import holding_interrupt\n"
        f"shooter = subprocess.Popen([sys.executable, '-c', {shooter!r}], stdin=subprocess.PIPE)\n"
        # It receives the signals that the main thread has blocked.
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "came, wrong = 0, 0\n"
        "while came < 1000:\n"
        "    try:\n"
        "        os.write(shooter.stdin.fileno(), b'.')\n"
        "        while True:\n"
        "            with holding_interrupt():\n"
        "                pass\n"
        "    except KeyboardInterrupt:\n"
        "        came += 1\n"
        "        wrong += signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "        wrong += signal.getsignal(signal.SIGINT) is not signal.default_int_handler\n"
        "print(came, wrong)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("1000 0\n", "")


def test_a_second_interrupt_before_the_first_is_dealt_with_leaves_a_pool_that_works(pool):
    def late(rank, world_size):
        time.sleep(600)

    def interrupt_twice(run):
        monkeypatch.undo()
        raise KeyboardInterrupt  # as if it came just before the clean-up

    list(pool.run(lambda rank, world_size: rank))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Run, "_close", interrupt_twice)
        monkeypatch.setattr(Run, "_collect", lambda run, timeout: not run._has_begun)
        with pytest.raises(KeyboardInterrupt):
            pool.run(late)
    assert list(pool.run(lambda rank, world_size: rank, timeout=60)) == [0, 1]


def test_ctrl_c_ends_a_lesson_in_a_terminal():
    lesson = subprocess.Popen(
        [sys.executable, "-m", "ddp_kit.lessons.partitioned_sgd", "--world-size", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,  # its process group gets what a terminal would send
    )
    process = psutil.Process(lesson.pid)
    wait_until(lambda: len(process.children()) == 2, 100, "the lesson has started its ranks")
    ranks = process.children()
    os.killpg(lesson.pid, signal.SIGINT)
    out, err = lesson.communicate(timeout=600)  # Python unloads PyTorch, on a busy machine
    assert (out, lesson.returncode) == ("", 130)
    assert err.splitlines()[0].startswith("KeyboardInterrupt: the run was stopped")
    assert "Traceback" not in err
    assert_gone(ranks, "Ctrl-C")
