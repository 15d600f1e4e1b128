"""Backends: every outcome of a probe, the expected answers, and the fitted costs."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import mpi
from ddp_kit.lessons import _backend_probes, backends

needs_mpi = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))
GLOO = partial(kit.run, world_size=2, backend="gloo", timeout=5)
FINE = ("works", "no answer")


def ones(dtype):
    return [torch.ones(1, dtype=dtype)]


def leaves_at_float16(rank, world_size, dtype):
    if rank == 1 and dtype is torch.float16:
        os._exit(3)
    dist.barrier()
    return ones(dtype), ones(dtype)


def hangs_at_float16(rank, world_size, dtype):
    if rank == 1 and dtype is torch.float16:
        dist.recv(torch.zeros(1), 0)
    return ones(dtype), ones(dtype)


def refuses_float16_on_one_rank(rank, world_size, dtype):
    if rank == 1 and dtype is torch.float16:
        raise RuntimeError("no float16 here\nand more words")
    dist.barrier()
    return ones(dtype), ones(dtype)


def refuses_float16(rank, world_size, dtype):
    if dtype is torch.float16:
        raise RuntimeError("no float16 here\nand more words")
    return ones(dtype), ones(dtype)


def is_wrong_at_float16_on_one_rank(rank, world_size, dtype):
    got = [torch.zeros(1, dtype=dtype)] if rank == 1 and dtype is torch.float16 else ones(dtype)
    return got, ones(dtype)


def answers_float16_though_nothing_is_right(rank, world_size, dtype):
    return ones(dtype), None if dtype is torch.float16 else ones(dtype)


@pytest.mark.parametrize(
    ("operation", "outcome"),
    [
        (leaves_at_float16, "died: exit code 3"),
        (
            hangs_at_float16,
            "hung: rank 1 waits for a message from rank 0, which has returned without sending it.",
        ),
        (refuses_float16_on_one_rank, "refused: no float16 here"),
        (refuses_float16, "refused: no float16 here"),
        (is_wrong_at_float16_on_one_rank, "wrong: [0.0]"),
        (
            answers_float16_though_nothing_is_right,
            "wrong: it returned numbers where no answer is right",
        ),
    ],
)
def test_one_bad_cell_spoils_the_others_or_has_no_name(operation, outcome):
    asked = {"bad": operation, "good": backends.OPERATIONS["broadcast"]}
    cells = backends.probe(GLOO, asked, ("float32", "float16", "int64"), {})
    assert cells.pop(("bad", "float16")) == outcome
    assert set(cells.values()) == {"works"}
    assert len(cells) == 5


def test_a_refusal_is_blamed_where_no_answer_is_right():
    asked = {f"all_reduce {op}": refuses_float16 for op in ("BAND", "SUM")}
    cells = backends.probe(GLOO, asked, ("float16",), {})
    assert cells == {
        ("all_reduce BAND", "float16"): "no answer: no float16 here",
        ("all_reduce SUM", "float16"): "refused: no float16 here",
    }


def test_gloo_does_less_or_more_than_the_lesson_says():
    cells = backends.probe(GLOO)
    assert len(cells) == 19 * 10 + 2
    for (name, kind), outcome in cells.items():
        if kind not in ("float8_e4m3fn", "bool", "complex64"):
            assert outcome.partition(":")[0] in FINE, (name, kind, outcome)
    assert cells["send, recv", "float8_e4m3fn"] == "works"
    assert cells["broadcast", "float8_e4m3fn"] == "refused: Invalid scalar type"
    assert cells["all_reduce SUM", "bool"] == "wrong: a bool that is neither 0 nor 1"
    assert cells["all_reduce MAX", "bool"] == "works"


@needs_mpi
def test_mpi_refuses_what_it_could_do_or_is_wrong():
    cells = backends.probe(partial(kit.run, world_size=2, backend="mpi", timeout=10))
    bad = {cell for cell, outcome in cells.items() if outcome.partition(":")[0] not in FINE}
    assert bad == {("all_reduce PRODUCT", "complex64")}  # PyTorch refuses it itself


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("SUM", "float32", [6, 9, 12, 15]),
        ("AVG", "float32", [2, 3, 4, 5]),
        ("AVG", "int64", [2, 3, 4, 5]),
        ("PRODUCT", "uint8", [0, 15, 48, 105]),
        ("MIN", "float16", [0, 1, 2, 3]),
        ("MAX", "int32", [4, 5, 6, 7]),
        ("BAND", "int64", [0, 1, 0, 1]),
        ("BOR", "int64", [6, 7, 6, 7]),
        ("BXOR", "int64", [6, 7, 0, 1]),
        ("SUM", "bool", [False, True, True, True]),
        ("BXOR", "bool", [False, True, True, False]),
        ("BAND", "float32", None),
        ("MIN", "complex64", None),
        ("AVG", "bool", None),
    ],
)
def test_the_expected_answer_is_wrong(op, dtype, expected):
    answer = _backend_probes.combined(op, 3, getattr(torch, dtype))
    assert (answer if answer is None else answer[:4].tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float8_e4m3fn])
def test_a_piece_in_a_wrong_place_is_not_noticed(dtype):
    for world_size in (2, 3, 4):
        pieces = [
            tuple(piece.float().tolist())
            for rank in range(world_size)
            for piece in _backend_probes.held(rank, world_size, dtype).chunk(world_size)
        ]
        assert len(set(pieces)) == world_size**2


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("[/src/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4242", None),
        ("Connection closed by peer\nin some function", None),
        ("Connection closed  by peer 0x7f3a5c0d1e90", None),
        ("", "(no message)"),
        ("expected [2, 3], got 4.5", "expected [2, 3], got 4.5"),
    ],
)
def test_a_backends_message_shows_a_path_or_an_address(message, kept):
    assert _backend_probes.first_line(message) == (kept or "Connection closed by peer")


def test_refusals_of_many_dtypes_are_counted_apart():
    cells = {
        (
            "all_reduce BAND",
            "float32",
        ): "no answer: ReduceOp.BAND needs integers, got torch.float32",
        ("all_reduce BOR", "float16"): "no answer: ReduceOp.BOR needs integers, got torch.float16",
        ("broadcast", "float16"): "works",
    }
    assert backends.refusals(cells) == {"ReduceOp.OP needs integers, got DTYPE": 2}


def test_an_unavailable_backend_is_probed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(mpi, "missing", lambda: "it needs mpi4py")
    monkeypatch.setattr(backends, "probe", lambda run: run.keywords["backend"])
    found = backends.probe_here()
    assert list(found) == list(backends.PLACES)
    assert found["gloo on the CPU"] == "gloo"
    assert found["mpi on the CPU"] == "it needs mpi4py"
    assert "needs a GPU" in found["gloo on GPUs"]
    assert backends.here() == ["gloo"]


def test_nccl_is_probed_with_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backends, "probe", lambda run: run.keywords["world_size"])
    found = backends.probe_here()
    assert found["nccl on GPUs"] == 1
    assert found["gloo on GPUs"] == 2


def test_bools_stay_true_under_gloo():
    assert list(kit.run(backends.true_until, world_size=2, backend="gloo")) == [8, 8]
    assert list(kit.run(backends.true_until, 7, world_size=2, backend="gloo")) == [None, None]


def test_two_sends_that_cross_end_under_gloo():
    with pytest.raises(kit.DeadlockError):
        kit.run(backends.both_send_first, 4, world_size=2, backend="gloo")


@needs_mpi
def test_mpi_differs_from_gloo_in_points_that_the_lesson_does_not_name():
    run = partial(kit.run, world_size=2, backend="mpi")
    assert list(run(backends.true_until)) == [None, None]
    assert list(run(backends.both_send_first, 4)) == [1.0, 0.0]
    with pytest.raises(kit.DeadlockError):
        run(backends.both_send_first, 4_000_000)
    exact = kit.run(backends.lopsided_sum, torch.float16, world_size=3, backend="mpi")
    assert list(exact) == [[2.0] * 3] * 3
    rounded = kit.run(backends.lopsided_sum, torch.float16, world_size=3, backend="gloo")
    assert 0.0 in rounded[0]
    assert kit.run(backends.started_by, world_size=3, backend="gloo")[0] == "Python"
    assert kit.run(backends.started_by, world_size=3, backend="mpi")[0] != "Python"


def test_alpha_and_beta_are_printed_in_other_units():
    line = [(n, 5e-5 + 2e-9 * n) for n in backends.SIZES]
    assert backends.format_fit(line).endswith("2.000 ns a byte (0.50 GB/s)")
    assert "=      50 µs" in backends.format_fit(line)


def test_a_size_is_not_measured():
    run = partial(kit.run, world_size=2, backend="gloo")
    for operation in backends.TIMED:
        points = backends.series(run, operation, (4, 4_000), torch.float16)
        assert [nbytes for nbytes, _ in points] == [4, 4_000]
        assert all(seconds > 0 for _, seconds in points)
