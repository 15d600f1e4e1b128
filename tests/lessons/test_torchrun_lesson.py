"""Lesson 11: its scripts, run as the lesson says; its functions; its table of options."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from kernels import QUICK_START, learners_shell
from processes import alive, ended, wait_until
from scripts import NOTEBOOKS, notebook_of
from torch.distributed.run import get_args_parser

import ddp_kit as kit
from ddp_kit.lessons import torchrun
from ddp_kit.lessons.init_methods import free_ports
from ddp_kit.lessons.your_machine import side_by_side

SCRIPTS = NOTEBOOKS / "scripts"
LIMIT = 240  # seconds for four ranks of train.py
HEADER = re.compile(r"^#SBATCH --([\w-]+)=(\S+)$", re.MULTILINE)


def lesson() -> dict:
    return notebook_of("11_torchrun.py")


def prose() -> str:
    cells = [cell for cell in lesson()["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def shell(folder: Path, **programs: str) -> dict[str, str]:
    """Return an environment like that of a learner's shell, where these programs come first."""
    folder.mkdir()
    programs["torchrun"] = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return learners_shell(**QUICK_START, OMP_NUM_THREADS="1", PATH=path)


def run(command: list[str], environment: dict, **more) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT, **more
    )


def namespaces() -> str:
    try:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def test_the_lines_to_copy_train_on_two_hosts(tmp_path):
    [command] = re.findall(r"```\n(bash scripts/two_hosts\.sh .*?)```", prose(), re.DOTALL)
    done = run(["bash", "-c", command], shell(tmp_path / "bin"), cwd=NOTEBOOKS)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert [line.partition(": ")[0] for line in printed] == ["step 10", "step 12", "step 12"]


WHERE = "echo $NODE_RANK $MASTER_ADDR $(ip -4 -o addr show dev cable 2>/dev/null | cut -d' ' -f7)"


def test_each_host_has_an_address_or_a_line_says_that_they_are_one(tmp_path):
    """Each has an address of its own, or a line says that they are one."""
    script = str(SCRIPTS / "two_hosts.sh")
    done = run(["bash", script, WHERE], shell(tmp_path / "bin"))
    first, *lines = sorted(done.stdout.splitlines(), reverse=True)
    refused = "Network namespaces are unavailable: both commands run on this host."
    if first != refused:
        assert [first, *lines] == ["1 10.199.0.1 10.199.0.2/30", "0 10.199.0.1 10.199.0.1/30"]
    without = run(["bash", script, WHERE], shell(tmp_path / "other", ip="exit 1"))
    assert sorted(without.stdout.splitlines()) == ["0 127.0.0.1", "1 127.0.0.1", refused]


@pytest.mark.parametrize(
    ("command", "code"), [("exit $NODE_RANK", 1), ("exit $((3 - 3*NODE_RANK))", 3)]
)
def test_the_script_ends_with_the_exit_code_of_a_host_that_failed(command, code, tmp_path):
    done = run(["bash", str(SCRIPTS / "two_hosts.sh"), command], shell(tmp_path / "bin"))
    assert done.returncode == code


# Each host's command has a child of its own, as torchrun has, and a line after it.
BOTH_SLEEP = "sleep 234; echo $NODE_RANK"


def sleeping(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process] * (process.cmdline() == ["sleep", "234"])
    return found


def both_sleep(script: int) -> Callable[[], bool]:
    below = psutil.Process(script).children
    return lambda: len(sleeping(below(recursive=True))) == 2


@pytest.mark.parametrize("programs", [{}, {"ip": "exit 1"}], ids=["hosts", "without"])
def test_an_ended_script_leaves_no_process_and_no_host(programs, tmp_path):
    environment = shell(tmp_path / "bin", **programs)
    command = ["bash", str(SCRIPTS / "two_hosts.sh"), BOTH_SLEEP]
    below = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        try:
            wait_until(both_sleep(script.pid), 100, "both commands run")
            below = psutil.Process(script.pid).children(recursive=True)
            script.send_signal(signal.SIGTERM)
            script.communicate(timeout=100)  # far less than they sleep
            assert ended(below)
        finally:
            script.kill()
            for process in filter(alive, below):
                process.kill()
    assert f"ddp{script.pid}-" not in namespaces()


def test_an_interrupted_cell_leaves_no_host():
    """Through side_by_side, as the lesson runs the script."""
    if run(["ip", "netns", "add", f"probe{os.getpid()}"], dict(os.environ)).returncode:
        pytest.skip("network namespaces are unavailable")
    run(["ip", "netns", "del", f"probe{os.getpid()}"], dict(os.environ))
    script = f"bash {SCRIPTS / 'two_hosts.sh'} '{BOTH_SLEEP}'"
    mine, asked, below = psutil.Process(), [], []

    def interrupt() -> None:
        def started() -> bool:
            asked[:] = [child.pid for child in mine.children() if child.name() == "bash"]
            return bool(asked) and both_sleep(asked[0])()

        wait_until(started, 100, "both commands run")
        below[:] = psutil.Process(asked[0]).children(recursive=True)
        assert f"ddp{asked[0]}-0" in namespaces()
        os.kill(mine.pid, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            side_by_side(script, seconds=200)
        interrupted.result()
    assert f"ddp{asked[0]}-" not in namespaces()
    assert ended(below)


class Job:
    """A job of Slurm on two nodes of this machine, whose srun starts its line twice."""

    def __init__(self, tmp_path: Path, **variables: str) -> None:
        self.text = (SCRIPTS / "job.sh").read_text("utf-8")
        self.header = dict(HEADER.findall(self.text))
        self.folder = tmp_path / "project"
        srun = (
            'echo "$1 $2 $OMP_NUM_THREADS"; shift 2; "$@" & first=$!; "$@" & second=$!\n'
            "trap 'kill -USR1 $first $second' USR1\n"  # as srun forwards it
            "until wait $first; code=$?; [ $code -lt 128 ]; do :; done\n"
            "until wait $second; code=$?; [ $code -lt 128 ]; do :; done; exit $code"
        )
        hosts = '[ "$*" = "show hostnames node[1-2]" ] && echo 127.0.0.1 && echo node2'
        control = f'[ "$1" = requeue ] && echo "requeued $2" || {{ {hosts}; }}'
        self.environment = shell(tmp_path / "bin", scontrol=control, srun=srun)
        (tmp_path / "bin" / "torchrun").rename(tmp_path / "torchrun")
        activate = self.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f'PATH="{tmp_path}:$PATH"\n')  # without it, there is no torchrun
        (self.folder / "train.py").write_text((SCRIPTS / "train.py").read_text("utf-8"))
        self.environment |= {
            "SLURM_JOB_ID": str(free_ports(1)[0]),  # its port is 20000 and its last four digits
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_NNODES": self.header["nodes"],
            **variables,
        }

    def start(self, *options: str) -> subprocess.Popen:
        command = ["bash", str(SCRIPTS / "job.sh"), "--checkpoint", "saved", *options]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, **streams)

    def saved(self) -> list[str]:
        return [file.parent.name for file in (self.folder / "saved").glob("*/.metadata")]


def test_the_job_trains_on_two_nodes(tmp_path):
    """For real, with stand-ins for Slurm."""
    job = Job(tmp_path, SLURM_CPUS_PER_TASK="8")
    assert (job.header["nodes"], job.header["ntasks-per-node"]) == ("2", "1")
    assert "##SBATCH --gpus-per-node=" in job.text
    with job.start("--steps", "4") as process:
        printed = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, printed
    assert printed.startswith("--cpus-per-task 8 4\n")
    assert re.search(r"^\[default0\]:step 4: loss", printed, re.MULTILINE), printed
    assert job.saved() == ["step-00000004"]
    logs = [file for file in (job.folder / "logs").rglob("stdout.log") if file.read_text()]
    assert len(logs) == 1  # rank 0 alone prints
    assert "requeued" not in printed


def test_a_job_whose_time_is_nearly_over_saves_and_is_queued_again(tmp_path):
    job = Job(tmp_path, SLURM_CPUS_PER_TASK="1", SLURM_GPUS_ON_NODE="2")
    assert job.header["signal"] == "B:USR1@120"
    with job.start("--steps", "1000000", "--save-every", "5") as process:
        try:
            wait_until(job.saved, 200, "a checkpoint is complete")
            process.send_signal(signal.SIGUSR1)
            printed = process.communicate(timeout=LIMIT)[0]
        finally:
            process.terminate()
    assert printed.startswith("--cpus-per-task 1 1\n"), printed  # never 0 threads
    step = int(re.search(r"stopped by a signal after step (\d+)", printed)[1])
    assert job.saved() == [f"step-{step:08}"]
    assert printed.endswith(f"requeued {job.environment['SLURM_JOB_ID']}\n"), printed


def test_the_table_has_the_defaults_of_the_options():
    actions = {
        name: action for action in get_args_parser()._actions for name in action.option_strings
    }
    rows = re.findall(r"^\| `(--[\w-]+)` \| (?:`(.*?)`|(\w+)) \|", prose(), re.MULTILINE)
    assert len(rows) >= 10
    for name, default, word in rows:
        wanted = default or {"empty": "", "none": None}[word]
        found = actions[name].default
        if name == "--master-port":
            assert "Defaults to 29500" in actions[name].help
        else:
            assert wanted == (found if found is None else str(found)), name


@pytest.mark.usefixtures("forked_ranks")
def test_each_host_gets_a_number_of_its_own_and_none_is_left_out():
    found = kit.run(torchrun.rendezvous, free_ports(1)[0], world_size=3)
    assert sorted(found) == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]


def complete(folder: Path, step: int) -> None:
    saved = folder / f"step-{step:08}"
    saved.mkdir()
    (saved / ".metadata").touch()


def test_a_rank_that_has_ended_is_not_killed(tmp_path):
    complete(tmp_path, 100)
    with pytest.raises(RuntimeError, match="rank 1 ended before it could be killed"):
        torchrun.kill_rank(1, str(tmp_path), 100)


def test_the_rank_is_killed_and_not_its_children(tmp_path):
    """A rank's own children, which load its data, have its command line and its variables."""
    rank = "import os, sys, time\nos.fork()\nprint(flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-c", rank, str(tmp_path)]
    ranks = [
        psutil.Popen(command, env=os.environ | {"RANK": number}, stdout=subprocess.PIPE)
        for number in "01"
    ]
    try:
        for process in ranks:
            process.stdout.readline(), process.stdout.readline()
        complete(tmp_path, 100)
        torchrun.kill_rank(1, str(tmp_path), 100)
        wait_until(lambda: ranks[1].poll() is not None, 100, "rank 1 is killed")
        assert (ranks[0].poll(), ranks[1].poll()) == (None, -signal.SIGKILL)
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == command:
                process.kill()
        for process in ranks:
            process.stdout.close()
            process.wait(30)
