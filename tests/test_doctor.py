"""The doctor finds what is wrong, reports what follows from it, and never fails itself."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import data
from ddp_kit import doctor_checks as checks
from ddp_kit.doctor_checks import Finding, findings, run_check
from ddp_kit.pool import memory

GIB = 2**30
FINE = Finding("4 cores", "Enough.")
POOR = Finding("1 GiB", "Too little.", ok=False)


def replace(monkeypatch, *answers):
    """Make functions return what they would on another machine: (owner, name, value)."""
    for owner, name, value in answers:
        monkeypatch.setattr(owner, name, lambda *_, value=value: value)


def refuse(*_, **__):
    raise OSError(111, "Connection refused")


# Python and its packages


def test_a_python_that_is_too_old_is_named(monkeypatch):
    assert checks.python().ok
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert not checks.python().ok
    assert checks.python().consequence == "The kit needs Python 3.10 or newer."


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not checks.python().ok
    assert "WSL" in checks.python().consequence


@pytest.mark.parametrize(
    ("version", "cuda", "ok", "words"),
    [
        ("2.13.0+cpu", None, True, "without CUDA"),
        ("2.13.0+cu130", "13.0", True, "built for CUDA 13.0"),
        ("2.9.1", None, False, "2.12 or newer"),
    ],
)
def test_a_build_of_pytorch_is_judged_by_its_version_and_named_with_its_cuda(
    monkeypatch, version, cuda, ok, words
):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = checks.pytorch()
    assert found.ok == ok
    assert words in found.found + found.consequence


@pytest.fixture
def torchvision(monkeypatch, tmp_path):
    """Fake a torchvision that was built for this torch; return the folder of its library."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    replace(
        monkeypatch,
        (metadata, "version", "0.28.0"),
        (metadata, "requires", ["numpy", "torch (==2.13.0)"]),
        (torch.ops, "load_library", None),
    )
    spec = namedtuple("spec", "submodule_search_locations")([str(tmp_path)])
    replace(monkeypatch, (data.importlib.util, "find_spec", spec))
    (tmp_path / "_C.so").touch()
    return tmp_path


def test_a_missing_torchvision_is_named(torchvision, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    found = checks.torchvision()
    assert (found.ok, found.found) == (False, "not installed")


def test_a_torchvision_of_another_version_is_named_and_not_loaded(torchvision, monkeypatch):
    replace(monkeypatch, (metadata, "requires", ["torch==2.12.1"]))
    monkeypatch.setattr(torch.ops, "load_library", lambda _: pytest.fail("it was loaded"))
    found = checks.torchvision()
    assert not found.ok
    assert "0.28.0 is for torch 2.12.1, but torch 2.13.0+cpu is installed" in found.found


def test_a_torchvision_whose_operators_are_for_another_pytorch_or_missing_is_named(
    torchvision, monkeypatch
):
    assert checks.torchvision().ok
    with monkeypatch.context() as patched:
        patched.setattr(torch.ops, "load_library", refuse)
        found = checks.torchvision()
    assert not found.ok
    assert "kit.mnist, datasets, transforms and models work if" in found.consequence
    (torchvision / "_C.so").unlink()
    assert not checks.torchvision().ok


@pytest.mark.parametrize(
    ("gloo", "nccl", "lacking", "words"),
    [
        (True, False, "mpi4py", 'gloo, shm (unavailable: nccl, mpi). backend="auto" selects gloo.'),
        (True, False, None, 'gloo, mpi, shm (unavailable: nccl). backend="auto" selects gloo.'),
        (True, True, None, "nccl if every rank has its own GPU, otherwise gloo."),
        (False, False, "mpi4py", "shm (unavailable: gloo, nccl, mpi). The lessons need gloo"),
    ],
)
def test_backends_are_listed_with_the_one_that_auto_selects(
    monkeypatch, gloo, nccl, lacking, words
):
    replace(
        monkeypatch,
        (dist, "is_gloo_available", gloo),
        (dist, "is_nccl_available", nccl),
        (checks.mpi, "missing", lacking),
        (checks.shm, "missing", None),
    )
    found = checks.backends()
    assert found.ok == gloo
    assert words in f"{found.found}. {found.consequence}"


@pytest.mark.parametrize(("used", "words"), [(True, "initialized in"), (False, "not initialized")])
def test_cuda_in_this_process_means_spawned_ranks(monkeypatch, used, words):
    replace(monkeypatch, (torch.cuda, "is_initialized", used))
    found = checks.cuda()
    assert found.ok
    assert found.found.startswith(words)
    assert "spawned, not forked" in found.consequence


def test_another_thread_than_the_main_thread_is_named():
    assert checks.main_thread().ok
    found = []
    thread = threading.Thread(target=lambda: found.append(checks.main_thread()), name="T")
    thread.start()
    thread.join(5)
    assert (found[0].ok, found[0].found) == (False, "this is the thread 'T'")


# The machine


@pytest.mark.parametrize(
    ("count", "nccl", "devices", "ok", "words"),
    [
        (0, False, [], True, "none. Ranks use gloo on the CPU"),
        (0, True, ["nvidia0", "nvidia1"], False, "2 in the machine, but PyTorch sees none"),
        (1, True, ["nvidia0"], True, "nccl supports up to 1 rank,"),
        (4, True, [], True, "nccl supports up to 4 ranks,"),
        (4, False, [], False, "4, but this PyTorch has no nccl"),
    ],
)
def test_gpus_are_counted(monkeypatch, tmp_path, count, nccl, devices, ok, words):
    for device in devices:
        (tmp_path / device).touch()
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    replace(monkeypatch, (torch.cuda, "device_count", count), (dist, "is_nccl_available", nccl))
    found = checks.gpus()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


@pytest.mark.parametrize(
    ("count", "quota", "ok", "words"),
    [
        (1, None, False, "All ranks share it"),
        (2, None, True, "2 ranks get 1 thread each, 4 ranks get 1 thread each. 4 ranks share 2"),
        (8, None, True, "2 ranks get 4 threads each, 4 ranks get 2 threads each."),
        (8, "800000 100000", True, "get 4 threads"),
        (8, "150000 100000", False, "limited to 1.5"),
    ],
)
def test_threads_are_counted_within_the_quota_of_a_container(
    monkeypatch, tmp_path, count, quota, ok, words
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
    monkeypatch.setattr(checks, "CONTROL_GROUP", tmp_path)
    if quota:
        (tmp_path / "cpu.max").write_text(quota)
    found = checks.cores()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


@pytest.mark.parametrize(
    ("free", "limit", "used", "ok", "words"),
    [
        (8 * GIB, None, None, True, "Enough for 34 ranks now, the most that kit.run starts."),
        (GIB / 2, None, None, False, "Enough for 2 ranks of 250 MB, but the lessons use 4."),
        (GIB / 2, None, None, False, "call kit.run(worker, world_size=2), or shut down other"),
        (GIB / 4, None, None, False, "when memory runs out: shut down other notebooks."),
        (8 * GIB, str(2 * GIB), 0, True, "8 ranks"),
        (8 * GIB, str(2 * GIB), GIB // 2, False, "train need up to 2.0 GiB, as in lesson 08: call"),
        (8 * GIB, str(GIB // 2), 0, False, "512 MiB free of the 512 MiB to which this container"),
    ],
)
def test_memory_is_counted_in_ranks_within_the_limit_of_a_container(
    monkeypatch, tmp_path, free, limit, used, ok, words
):
    machine = SimpleNamespace(total=16 * GIB, available=free)
    replace(monkeypatch, (psutil, "virtual_memory", machine), (checks, "living_ranks", 0))
    monkeypatch.setattr(checks, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    if used is not None:
        (tmp_path / "memory.current").write_text(str(used))
        (tmp_path / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    found = checks.memory()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


@pytest.mark.parametrize(
    ("space", "ok", "words"),
    [
        ((64 * 2**20, 64 * 2**20), False, "64 MiB free of 64 MiB. DataLoader workers may die"),
        ((8 * GIB, 2**20), False, "1 MiB free of 8.0 GiB."),
        ((8 * GIB, 8 * GIB), True, "DataLoader workers and nccl use it."),
        (None, True, "no /dev/shm"),
    ],
)
def test_a_small_shared_memory_is_named(monkeypatch, space, ok, words):
    replace(monkeypatch, (checks, "shared_space", space))
    found = checks.shared_memory()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


def test_shared_memory_is_measured(monkeypatch):
    volume = namedtuple("volume", "f_blocks f_bavail f_frsize")(16384, 4096, 4096)
    replace(monkeypatch, (os, "statvfs", volume))
    assert checks.shared_space() == (64 * 2**20, 16 * 2**20)
    monkeypatch.setattr(os, "statvfs", lambda _: os.stat("/no/such/folder"))
    assert checks.shared_space() is None


def test_no_loopback_interface_is_named(monkeypatch):
    assert checks.loopback().ok
    replace(monkeypatch, (socket, "if_nameindex", [(2, "eth0")]))
    assert not checks.loopback().ok
    assert checks.loopback().found.startswith("no interface lo")


@pytest.mark.parametrize("step", ["create_server", "create_connection"])
def test_a_loopback_that_refuses_is_named(monkeypatch, step):
    monkeypatch.setattr(socket, step, refuse)
    found = checks.loopback()
    assert not found.ok
    assert "Connection refused" in found.found


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


@pytest.mark.parametrize(
    ("limit", "ok", "words"),
    [
        (295, True, "Enough for 39 ranks."),
        (resource.RLIM_INFINITY, True, "no limit"),
        (110, False, "Enough for 2 ranks, but the lessons use 4: "),
    ],
)
def test_a_low_limit_of_open_files_is_counted_in_ranks(monkeypatch, limit, ok, words):
    replace(monkeypatch, (resource, "getrlimit", (limit, limit)))
    found = checks.open_files()
    assert found.ok == ok
    assert words in f"{found.found}. {found.consequence}"


def test_the_doctor_and_the_pool_count_open_files_alike(monkeypatch):
    replace(monkeypatch, (resource, "getrlimit", (140, 140)))
    assert f"Enough for {memory.ranks_by_files()} ranks." in checks.open_files().consequence


def test_the_temporary_folder_is_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert checks.temporary_folder().ok
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_without_writing_locks_or_privacy_is_named(monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        found = checks.temporary_folder()
        assert (found.ok, found.found) == (False, "unusable (No such file or directory)")
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", refuse)
        assert not checks.temporary_folder().ok
    replace(monkeypatch, (checks.stat, "S_IMODE", 0o777))
    found = checks.temporary_folder()
    assert (found.ok, found.found) == (False, "accessible to other users")


# The page


def test_a_check_that_fails_is_a_line(monkeypatch, capsys):
    def fails():
        raise ZeroDivisionError("no cores")

    monkeypatch.setattr(checks, "cores", fails)
    kit.doctor()
    assert "cores             the check failed (ZeroDivisionError: no cores)." in (
        capsys.readouterr().out
    )


def test_a_check_that_hangs_or_has_no_thread_is_a_line_too(monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    release = threading.Event()
    start = time.monotonic()
    found = run_check(lambda: release.wait(120), timeout=0.05)
    release.set()
    assert time.monotonic() - start < 60
    assert (found.ok, found.found) == (False, "the check failed (no result within 0.05 s)")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert "can't start new thread" in run_check(checks.gpus).found


def test_every_finding_has_a_line(capsys):
    assert kit.doctor() is None
    *lines, blank, _ = capsys.readouterr().out.splitlines()
    subjects = [line[6:24].rstrip() for line in lines if line[:6].strip()]
    found = findings()
    assert subjects == list(found)
    assert found["main thread"].ok  # although the checks run in other threads
    assert {line[:6] for line in lines} <= {"ok    ", "WARN  ", "      "}
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
def test_the_summary_and_the_exit_code_count_what_needs_attention(
    monkeypatch, capsys, found, summary
):
    by_subject = {f"check {number}": finding for number, finding in enumerate(found)}
    replace(monkeypatch, (checks, "findings", by_subject))
    assert checks.main([]) == (POOR in found)
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == summary
    assert [line.startswith("ok") for line in out[:-2]] == [finding.ok for finding in found]


def test_the_command_loads_no_heavy_library_and_warns_of_nothing():
    command = [sys.executable, "-X", "importtime", "-m", "ddp_kit.doctor"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600)
    times = [line for line in out.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rsplit("|", 1)[1].strip() for line in times}
    assert out.stderr.splitlines() == times
    assert "ddp_kit.doctor_checks" in loaded
    assert not {"torchvision", "matplotlib", "IPython"} & loaded
    assert out.returncode == ("WARN" in out.stdout)


def test_the_command_has_help():
    command = [sys.executable, "-m", "ddp_kit.doctor", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.startswith("usage: python -m ddp_kit.doctor")


def test_the_command_works_in_a_cell():
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_cell('%run -m ddp_kit.doctor')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert out.stderr == ""
    assert "SystemExit" not in out.stdout
    assert "main thread" in out.stdout


def test_torchvision_works_after_the_doctor():
    code = "import ddp_kit as kit\nkit.doctor()\nimport torchvision\nprint(len(kit.mnist()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert out.stderr == ""
    assert out.stdout.endswith(("attention.\n10000\n", "found.\n10000\n"))
