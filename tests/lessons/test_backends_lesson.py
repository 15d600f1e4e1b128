"""Backends: every outcome of a probe, the expected answers, and the fitted costs."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit import model
from ddp_kit.backends import mpi
from ddp_kit.lessons import _backends, backends

needs_mpi = pytest.mark.skipif(mpi.missing() is not None, reason=str(mpi.missing()))
GLOO = partial(kit.run, world_size=2, backend="gloo", timeout=60)


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
def test_one_bad_cell_has_a_name_and_leaves_the_others_alone(operation, outcome):
    asked = {"bad": operation, "good": backends.OPERATIONS["broadcast"]}
    cells = backends.probe(GLOO, asked, ("float32", "float16", "int64"))
    assert cells.pop(("bad", "float16")) == outcome
    assert set(cells.values()) == {"works"}
    assert len(cells) == 5


def test_a_refusal_is_no_fault_where_no_answer_is_right():
    asked = {f"all_reduce {op}": refuses_float16 for op in ("BAND", "SUM")}
    cells = backends.probe(GLOO, asked, ("float16",))
    assert cells == {
        ("all_reduce BAND", "float16"): "no answer: no float16 here",
        ("all_reduce SUM", "float16"): "refused: no float16 here",
    }


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
def test_a_backends_message_shows_no_path_and_no_address(message, kept):
    assert _backends._first_line(message) == (kept or "Connection closed by peer")


def test_an_unavailable_backend_is_not_probed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(mpi, "missing", lambda: "it needs mpi4py")
    monkeypatch.setattr(_backends, "probe", lambda run: run.keywords["backend"])
    found = backends.probe_here()
    assert list(found) == list(backends.PLACES)
    assert found["gloo on the CPU"] == "gloo"
    assert found["mpi on the CPU"] == "it needs mpi4py"
    assert "needs a GPU" in found["gloo on GPUs"]
    assert backends.here() == ["gloo"]


@needs_mpi
def test_mpi_differs_from_gloo_in_the_points_that_the_lesson_names():
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


def test_the_fit_by_hand_is_as_near_as_its_steps():
    beta = 2e-4 / 10**5.51  # half a step away from a ratio that is tried
    points = [(n, 2e-4 + beta * n) for n in backends.SIZES]
    assert backends.fit_by_hand(points) == pytest.approx((2e-4, beta), rel=0.05)
    noisy = [(n, up * t) for (n, t), up in zip(points, (1, 2, 0.5, 1, 1, 1.5, 0.7), strict=True)]
    assert backends.fit_by_hand(noisy) == pytest.approx(model.fit(noisy), rel=0.06)


def test_the_slowest_rank_counts_and_the_first_round_does_not():
    def two_ranks(worker, operation, sizes, dtype):
        """Stand for `kit.run`, with two rounds of one size."""
        assert (worker, sizes) == (backends.measure, (4,))
        return [[[1.0, 5.0]], [[3.0, 2.0]]]

    assert backends.samples(two_ranks, dist.all_reduce, (4,)) == [(4, [3.0, 5.0])]
    rounds = kit.run(backends.measure, dist.all_reduce, (4, 1_000_000), world_size=2)
    assert [[len(seconds) for seconds in rank] for rank in rounds] == [[15, 5]] * 2


def test_the_table_has_a_sign_for_each_outcome_and_a_reason_for_a_place_that_is_missing(capsys):
    found = {("send", "float16"): "works", ("send", "bool"): "wrong: [2]"}
    found |= {("AVG", "float16"): "refused: no", ("AVG", "bool"): "no answer"}
    _backends.print_table({"gloo": found, "nccl": "it needs a GPU"})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [["gloo", "f16", "bool"], ["send", "✓", "≠"], ["AVG", "✗", "·"]]
    assert rows[4] == ["nccl:", "it", "needs", "a", "GPU"]
