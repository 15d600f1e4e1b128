"""The doctor finds what is wrong, reports what follows from it, and never fails itself."""

from __future__ import annotations

import pkgutil
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import ddp_kit as kit
from ddp_kit import doctor_checks as checks
from ddp_kit.doctor_checks import Finding, findings, run_check
from ddp_kit.pool import arguments

GIB = 2**30
FINE = Finding("4 cores", "Enough.")
POOR = Finding("1 GiB", "Too little.", ok=False)
REFUSED = OSError(111, "Connection refused")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that makes functions and variables answer as on another machine."""
    for path in ("ddp_kit.doctor_checks.CONTROL_GROUP", "ddp_kit.pool.arguments.CONTROL_GROUP"):
        monkeypatch.setattr(path, tmp_path)
    monkeypatch.setattr(checks, "DEVICES", tmp_path)

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


def gpus(count, nccl, *devices):
    files = {f"file {device}": "" for device in devices}
    return {"torch.cuda.device_count": count, "torch.distributed.is_nccl_available": nccl} | files


def backends(gloo, nccl, lacking):
    return {
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


def files(limit):
    return {"resource.getrlimit": (limit, limit)}


@pytest.mark.parametrize(
    ("check", "answers", "ok", "words"),
    [
        ("python", {}, True, "Every rank is a separate process of this Python"),
        ("pytorch", {"torch.__version__": "2.9.1"}, False, "2.12 or newer"),
        ("pytorch", {"torch.version.cuda": None}, True, "built without CUDA"),
        ("pytorch", {"torch.version.cuda": "13.0"}, True, "built for CUDA 13.0"),
        ("backends", backends(True, False, "mpi4py"), True, "gloo, shm (unavailable: nccl, mpi)."),
        ("backends", backends(True, True, None), True, "nccl if every rank has its own GPU, othe"),
        ("backends", backends(False, False, None), False, "The lessons need gloo"),
        ("gpus", gpus(0, False), True, "none. Ranks use gloo on the CPU"),
        ("gpus", gpus(0, True, "nvidia0", "nvidia1"), False, "2 in the machine, but PyTorch sees"),
        ("gpus", gpus(1, True, "nvidia0"), True, "nccl supports up to 1 rank,"),
        ("gpus", gpus(4, False), False, "4, but this PyTorch has no nccl"),
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
        ("loopback", {}, True, "lo works"),
        ("loopback", {"socket.if_nameindex": [(2, "eth0")]}, False, "no interface lo"),
        ("loopback", {"socket.create_server": REFUSED}, False, "Connection refused"),
        ("open_files", files(295), True, "Enough for 39 ranks."),
        ("open_files", files(resource.RLIM_INFINITY), True, "no limit"),
        ("open_files", files(110), False, "Enough for 2 ranks, but the lessons use 4: "),
        ("temporary_folder", {"tempfile.tempdir": "/no/such"}, False, "unusable (No such file or"),
        ("temporary_folder", {"fcntl.flock": REFUSED}, False, "unusable (Connection refused)"),
        ("temporary_folder", {"stat.S_IMODE": 0o777}, False, "accessible to other users"),
        ("main_thread", {}, True, "Ranks can be started from here."),
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


def test_another_thread_than_the_main_thread_is_named():
    found = []
    thread = threading.Thread(target=lambda: found.append(checks.main_thread()), name="T")
    thread.start()
    thread.join(5)
    assert (found[0].ok, found[0].found) == (False, "this is the thread 'T'")


def test_a_loopback_that_drops_connections_is_named_in_time(monkeypatch):
    # A listener whose queue is full: nobody accepts, and the system drops the next connection.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        connect = socket.create_connection
        monkeypatch.setattr(socket, "create_connection", lambda _, wait: connect(address, wait))
        start = time.monotonic()
        found = checks.loopback()
        for one in waiting:
            one.close()
    assert not found.ok
    assert "timed out" in found.found
    assert time.monotonic() - start < 30  # the system tries for minutes


def test_the_doctor_and_the_pool_count_open_files_alike(machine):
    machine(files(140))
    assert f"Enough for {arguments.ranks_by_files()} ranks." in checks.open_files().consequence


def test_the_temporary_folder_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert checks.temporary_folder().ok
    assert not list(tmp_path.iterdir())


def test_a_check_that_fails_is_a_line(monkeypatch, capsys):
    monkeypatch.setitem(checks.CHECKS, "cores", lambda: 1 / 0)
    kit.doctor()
    failed = "cores             the check failed (ZeroDivisionError: division by zero)."
    assert failed in capsys.readouterr().out


def test_a_check_that_hangs_or_has_no_thread_is_a_line_too(machine):
    release = threading.Event()
    start = time.monotonic()
    found = run_check(lambda: release.wait(120), timeout=0.05)
    release.set()
    assert time.monotonic() - start < 60
    assert (found.ok, found.found) == (False, "the check failed (no result within 0.05 s)")
    machine({"threading.Thread.start": RuntimeError("can't start new thread")})
    assert "can't start new thread" in run_check(checks.gpus).found


def test_every_finding_has_a_line(capsys):
    assert kit.doctor() is None
    *lines, blank, _ = capsys.readouterr().out.splitlines()
    subjects = [line[6:24].rstrip() for line in lines if line[:6].strip()]
    found = findings()
    assert subjects == list(found)
    assert found["main thread"].ok  # although the checks run in other threads
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
def test_the_summary_and_the_exit_code_count_what_needs_attention(machine, capsys, found, summary):
    machine({"ddp_kit.doctor_checks.findings": dict(enumerate(found))})
    assert checks.main([]) == (POOR in found)
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
    assert "main thread" in out.stdout


def test_torchvision_works_after_the_doctor():
    code = "import ddp_kit as kit\nkit.doctor()\nimport torchvision\nprint(len(kit.mnist()))"
    out = run_python("-c", code)
    assert out.stderr == ""
    assert out.stdout.endswith(("attention.\n10000\n", "found.\n10000\n"))
