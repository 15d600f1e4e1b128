"""What `make gpu` does around its checks, on invented checks; no GPU is needed or used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import gpu
import gpu_checks
import gpu_training
import psutil
import pytest
import torch
from processes import assert_gone, wait_until

import ddp_kit as kit

# Its child leaves the session and ignores SIGTERM, as a rank of torchrun that is stuck may.
STUCK = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
REFUSED = "gloo cannot send a tensor that is on a GPU"


def program(code: str, *arguments: str, title: str = "invented", **options) -> gpu.Check:
    return gpu.Check(title, (sys.executable, "-c", code, *arguments), **{"alone": True, **options})


@pytest.mark.parametrize(
    ("code", "passed", "lines"),
    [
        ("print('noise\\nsum: 6\\n  and more\\n')", True, ["sum: 6", "  and more"]),
        ("import ddp_kit; print('sum:', ddp_kit.__name__)", True, ["sum: ddp_kit"]),
        ("print('sum: 6'); raise SystemExit('no /home/me/file')", False, ["exit status 1: no …"]),
        ("print('1 failed'); raise SystemExit(1)", False, ["exit status 1: 1 failed"]),
        ("import os; os.kill(os.getpid(), 9)", False, ["exit status -9: it printed nothing"]),
        ("print('no')", False, ["it ended without a line that begins with 'sum: '"]),
        (f"raise SystemExit('BackendError: {REFUSED}; use')", True, [f"refused: {REFUSED}"]),
        ("import sys; sys.exit('why\\nhow')", False, ["exit status 1: how", "why"]),
    ],
)
def test_a_check_passes_with_its_line_of_proof_and_says_why_it_failed(code, passed, lines):
    outcome = gpu.run(program(code, proof="sum: "))
    assert (outcome.passed, list(outcome.lines)) == (passed, lines)
    assert gpu.run(program("print('first\\nlast')")).lines == ("last",)


def test_a_check_that_is_stuck_is_ended_with_its_child(tmp_path, monkeypatch):
    noted, popen = tmp_path / "pid", subprocess.Popen

    def start(*args, **options):
        process = popen(*args, **options)
        wait_until(lambda: noted.exists() and noted.read_text(), 60, "the child runs")
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    outcome = gpu.run(program(STUCK, str(noted), limit=0.1))
    assert (outcome.passed, outcome.lines) == (False, ("no result within 0.1 s",))
    pid = int(noted.read_text())
    if psutil.pid_exists(pid):
        assert_gone([psutil.Process(pid)], "a check ran out of time")


def run_main(monkeypatch, target: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--record", str(target), *options])
    return gpu.main()


@pytest.fixture
def invented(monkeypatch) -> list[gpu.Check]:
    """Checks that are run as if there were a GPU."""
    found: list[gpu.Check] = []
    left_out = ["four: it needs two GPUs."]
    monkeypatch.setattr(gpu, "machine", lambda: "an invented GPU.")
    monkeypatch.setattr(gpu, "checks", lambda *given: (found, left_out))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return found


def test_the_other_checks_run_after_one_that_fails(tmp_path, monkeypatch, capsys, invented):
    invented += [
        program("raise SystemExit('a | b')", title="one"),
        program("print('two: well')", title="two", proof="two: "),
        program("print('three: 1\\n4 5')", title="three", proof="three: ", alone=False),
    ]
    seen = []
    target = tmp_path / "GPU.md"
    run = gpu.run
    monkeypatch.setattr(gpu, "run", lambda check: seen.append(target.exists()) or run(check))
    assert run_main(monkeypatch, target) == 1
    assert seen == [False, True, True]  # a run that is cut off leaves a record
    said = re.sub(r"^ *\d+ s, ", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert said == "one: FAILED: exit status 1: a | b\ntwo: two: well\nthree: three: 1\n"
    text = re.sub(r"\| \d+ \|", "| 0 |", target.read_text())
    assert "an invented GPU.\n\n2 of 3 checks passed.\n" in text
    assert "| one | **failed** | 0 | exit status 1: a \\| b |\n| two | passed | 0 | two:" in text
    assert "## Not run\n\n* four: it needs two GPUs.\n\n## three\n\n```\nthree: 1\n4 5" in text
    assert "the time for all checks was up" not in text
    assert run_main(monkeypatch, target, "--only", "^t") == 0
    assert "2 of 2 checks passed.\n" in target.read_text()


def test_a_check_that_is_cut_off_is_listed_as_not_run(tmp_path, monkeypatch, invented):
    invented += [
        program("print('one')", title="one"),
        program("import time; time.sleep(60)", title="two"),
        program("print('three')", title="three"),
    ]
    target = tmp_path / "GPU.md"
    assert run_main(monkeypatch, target, "--limit", "3") == 0
    text = target.read_text()
    assert "1 of 1 checks passed." in text
    up = "the time for all checks was up before it had ended."
    assert text.endswith(f"* two: {up}\n* three: {up}\n")


def test_without_a_gpu_nothing_is_run_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(gpu, "run", None)
    target = tmp_path / "GPU.md"
    assert run_main(monkeypatch, target) == 2
    assert capsys.readouterr() == (
        "",
        f"make gpu needs a GPU, and PyTorch {torch.__version__} sees none here. "
        "Nothing was run, and GPU.md is as it was.\n",
    )
    assert not target.exists()
    with pytest.raises(SystemExit):
        run_main(monkeypatch, gpu.RECORD, "--on-cpu")
    assert "--on-cpu needs a --record of its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "nccl", "starts", "missing"),
    [
        (1, True, ["nccl on 1 rank", "cuda:gloo on 4 ranks"], 3),
        (8, True, ["nccl on 8 ranks"], 2),
        (0, False, ["gloo on 4 ranks"], 4),
    ],
)
def test_every_lesson_is_run(gpus, nccl, starts, missing):
    found, left_out = gpu.checks(gpus, nccl)
    titles = [check.title for check in found]
    lessons = [f"{name}, {start}" for name in gpu.lessons() for start in starts]
    assert [title for title in titles if title in lessons] == lessons
    assert {"point_to_point", "ddp"} < set(gpu.lessons())
    assert len(set(titles)) == len(titles)
    assert len(left_out) == missing


def test_each_check_calls_something_that_exists():
    modules = {Path(module.__file__): module for module in (gpu_checks, gpu_training)}
    for check in gpu.checks(2, True)[0]:
        files = [Path(part) for part in check.command[1:] if part.endswith(".py")]
        assert files or "-m" in check.command
        for path in files:
            assert path.exists()
            assert path not in modules or callable(getattr(modules[path], check.command[2]))


@pytest.mark.long
@pytest.mark.usefixtures("forked_ranks")
def test_the_first_run_proves_its_values_and_its_deadlock(monkeypatch, capsys):
    gpu_checks.first_run([("gloo", 1), ("gloo", 2)])
    first, one, two = capsys.readouterr().out.splitlines()
    assert first == "first_run: 2 backends give the right values and explain what is wrong"
    assert "deadlock" not in one
    assert re.match(r"gloo +on 2: first .* deadlock after \d.* s, exception after \d.* s", two)
    monkeypatch.setattr(gpu_checks, "add_up", lambda rank, world_size: torch.zeros(4))
    with pytest.raises(kit.ProofError, match="the sum is right"):
        gpu_checks.first_run([("gloo", 2)])
    monkeypatch.undo()
    monkeypatch.setattr(gpu_checks, "wait_for_nobody", lambda rank, world_size: None)
    with pytest.raises(kit.ProofError, match="did not raise DeadlockError"):
        gpu_checks.first_run([("gloo", 2)])


@pytest.mark.long
def test_lesson_03_on_gpus_has_the_lines_that_are_said_to_change(tmp_path, monkeypatch, capsys):
    """The CPU in the place of a GPU, and less data; the rest is what `make gpu` runs."""
    script = tmp_path / "script.py"
    script.write_text(gpu_checks.SCRIPT.read_text("utf-8").replace("8000", "800"), "utf-8")
    monkeypatch.setattr(gpu_checks, "SCRIPT", script)
    gpu_checks.cuda_port("gloo", 1, device='torch.device("cpu")')
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"cuda_port: 1 rank over gloo, last loss (\d\.\d\d), on the CPU \1; the lines that .*:",
        first,
    )
    device, model, *others = [line[1:].strip() for line in lines if line.startswith("+")]
    assert device == 'device = torch.device("cpu")'
    assert re.fullmatch(r"model = .*\.to\(device\)", model)
    assert others == [
        "total = torch.zeros(1, device=device)",
        "batch = [part.to(device) for part in batch]",
    ]


def test_memory_is_compared_with_what_pytorch_and_the_gpu_say(monkeypatch, capsys):
    used = iter([0, 0, *range(10**9, 10**9 + 100)])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: next(used))
    places = [torch.device("cpu")] * 2
    gpu_checks.memory(places, lambda place: 5 * gpu_checks.MIB, width=16, count=40)
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert re.match(r"memory: after \w+, the lesson counts 0 MiB on device 0, PyTorch has", first)
    assert header.split() == ["step", "device", "lesson", "PyTorch", "nvidia-smi", "MiB"]
    assert len(rows) == 8 * 2
    assert rows[-1].split() == ["update", "1", "0.0", "953.7", "0.0"]
