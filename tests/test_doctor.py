"""The doctor finds what is wrong, reports what follows from it, and never fails itself."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import ddp_kit as kit
from ddp_kit import doctor_checks as checks
from ddp_kit.doctor_checks import Finding, findings

GIB = 2**30
FINE = Finding("4 cores", "Enough.")
POOR = Finding("1 GiB", "Too little.", ok=False)
REFUSED = OSError(111, "Connection refused")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes functions and variables answer as on another machine."""
    for path in ("ddp_kit.doctor_checks.CONTROL_GROUP", "ddp_kit.pool.arguments.CONTROL_GROUP"):
        monkeypatch.setattr(path, tmp_path)

    def give(value):
        if isinstance(value, Exception):
            raise value
        return value

    def change(answers):
        for name, value in answers.items():
            if name.startswith("file "):
                (tmp_path / name[5:]).write_text(value)
                continue
            is_function = callable(pkgutil.resolve_name(name))
            new = (lambda *_, value=value: give(value)) if is_function else value
            monkeypatch.setattr(name, new, raising=False)

    return change


def backends(gloo, nccl, lacking, gpus=0):
    return {
        "torch.cuda.device_count": gpus,
        "torch.distributed.is_gloo_available": gloo,
        "torch.distributed.is_nccl_available": nccl,
        "ddp_kit.backends.mpi.missing": lacking,
        "ddp_kit.backends.shm.missing": None,
    }


def cores(count, quota=""):
    return {"os.sched_getaffinity": set(range(count)), "file cpu.max": quota}


def free(available, limit="max", used=0):
    return {
        "psutil.virtual_memory": SimpleNamespace(total=16 * GIB, available=available),
        "ddp_kit.doctor_checks.living_ranks": 0,
        "file memory.max": str(limit),
        "file memory.current": str(used),
        "file memory.stat": "inactive_file 0\nactive_file 0\n",
    }


def shared(blocks, unused):
    space = SimpleNamespace(f_blocks=blocks, f_bavail=unused, f_frsize=4096)
    return {"os.statvfs": space}


@pytest.mark.parametrize(
    ("check", "answers", "ok", "words"),
    [
        ("pytorch", {"torch.__version__": "2.9.1"}, False, "2.12 or newer"),
        ("pytorch", {"torch.version.cuda": None}, True, "built without CUDA"),
        ("pytorch", {"torch.version.cuda": "13.0"}, True, "built for CUDA 13.0"),
        ("backends", backends(True, False, "mpi4py"), True, "gloo, shm; 0 GPUs. No lesson needs"),
        ("backends", backends(True, True, None, 2), True, "nccl for up to 2 ranks, otherwise gloo"),
        ("backends", backends(True, False, None, 4), False, "has no nccl: ranks use gloo on the C"),
        ("backends", backends(False, False, None), False, "The lessons need gloo"),
        ("cores", cores(1), False, "All ranks share it"),
        (
            "cores",
            cores(2),
            True,
            "2 ranks get 1 thread each, 4 ranks get 1 thread each. 4 ranks s",
        ),
        ("cores", cores(8), True, "2 ranks get 4 threads each, 4 ranks get 2 threads each."),
        ("cores", cores(8, "150000 100000"), False, "limited to 1.5"),
        ("memory", free(8 * GIB), True, "Enough for 34 ranks now, the most that kit.run starts."),
        ("memory", free(GIB / 2), False, "2 ranks of 250 MB, but the lessons use 4. The system k"),
        ("memory", free(GIB / 4), False, "when memory runs out: shut down other notebooks."),
        ("memory", free(8 * GIB, 2 * GIB), True, "8 ranks"),
        ("memory", free(8 * GIB, 2 * GIB, GIB // 2), False, "train need up to 2.0 GiB, as in less"),
        ("shared_memory", shared(16384, 16384), False, "64 MiB free of 64 MiB. DataLoader workers"),
        ("shared_memory", shared(2**21, 2**21), True, "DataLoader workers and nccl use it."),
        ("shared_memory", {"os.statvfs": FileNotFoundError()}, True, "no /dev/shm"),
    ],
)
def test_a_check_says_what_it_found_and_what_follows(machine, check, answers, ok, words):
    machine(answers)
    found = getattr(checks, check)()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


@pytest.fixture
def torchvision(monkeypatch, tmp_path, machine):
    """Fake a torchvision that was built for this torch; return the folder of its library."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    machine(
        {
            "importlib.metadata.version": "0.28.0",
            "importlib.metadata.requires": ["numpy", "torch (==2.13.0)"],
            "torch.ops.load_library": None,
            "importlib.util.find_spec": spec,
        }
    )
    (tmp_path / "_C.so").touch()
    return tmp_path


def test_a_missing_torchvision_is_named(torchvision, machine):
    machine({"importlib.metadata.version": metadata.PackageNotFoundError("torchvision")})
    assert (checks.torchvision().ok, checks.torchvision().found) == (False, "not installed")


def test_a_torchvision_of_another_version_is_named_and_not_loaded(torchvision, machine):
    machine({"importlib.metadata.requires": ["torch==2.12.1"]})
    machine({"torch.ops.load_library": AssertionError("it was loaded")})
    found = checks.torchvision()
    assert not found.ok
    assert "0.28.0 is for torch 2.12.1, but torch 2.13.0+cpu is installed" in found.found


def test_a_torchvision_whose_operators_are_for_another_pytorch_or_missing_is_named(
    torchvision, machine
):
    assert checks.torchvision().ok
    (torchvision / "_C.so").unlink()
    assert not checks.torchvision().ok
    (torchvision / "_C.so").touch()
    machine({"torch.ops.load_library": REFUSED})
    found = checks.torchvision()
    assert not found.ok
    assert "All lessons work; where you import torchvision yourself" in found.consequence


def test_a_check_that_fails_is_a_line(monkeypatch, capsys):
    monkeypatch.setitem(checks.CHECKS, "cores", lambda: 1 / 0)
    kit.doctor()
    failed = "cores          the check failed (ZeroDivisionError: division by zero)."
    assert failed in capsys.readouterr().out


def test_every_finding_has_a_line(capsys):
    assert kit.doctor() is None
    *lines, blank, _ = capsys.readouterr().out.splitlines()
    assert [line[6:21].rstrip() for line in lines if line[:6].strip()] == list(findings())
    assert all(len(line) <= 100 for line in lines)
    assert blank == ""


@pytest.mark.parametrize(
    ("found", "summary"),
    [
        ([FINE, FINE], "No problems found."),
        ([FINE, POOR], "1 line needs attention."),
        ([POOR, FINE, POOR], "2 lines need attention."),
    ],
)
def test_the_summary_counts_what_needs_attention(machine, capsys, found, summary):
    machine({"ddp_kit.doctor_checks.findings": dict(enumerate(found))})
    assert checks.report() == found.count(POOR)
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == summary
    assert [line.startswith("ok") for line in out[:-2]] == [finding.ok for finding in found]


def run_python(*options):
    command = [sys.executable, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_command_loads_no_heavy_library_and_warns_of_nothing():
    out = run_python("-X", "importtime", "-m", "ddp_kit.doctor")
    times = [line for line in out.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rsplit("|", 1)[1].strip() for line in times}
    assert out.stderr.splitlines() == times
    assert "ddp_kit.doctor_checks" in loaded
    assert not {"torchvision", "matplotlib", "IPython"} & loaded
    assert out.returncode == ("WARN" in out.stdout)


def test_the_command_works_in_a_cell():
    shell = "from IPython.core.interactiveshell import InteractiveShell as Shell\n"
    out = run_python("-c", f"{shell}Shell.instance().run_cell('%run -m ddp_kit.doctor')")
    assert out.stderr == ""
    assert "SystemExit" not in out.stdout
    assert "memory" in out.stdout


def test_torchvision_works_after_the_doctor():
    code = "import ddp_kit as kit\nkit.doctor()\nimport torchvision\nprint(len(kit.mnist()))"
    out = run_python("-c", code)
    assert out.stderr == ""
    assert out.stdout.endswith(("attention.\n10000\n", "found.\n10000\n"))
