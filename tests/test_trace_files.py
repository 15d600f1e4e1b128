"""What `--trace` writes, what `kit.load_trace` makes of it, and clocks that do not agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from time import monotonic_ns

import pytest
import torch
import torch.distributed as dist
import traces

import ddp_kit as kit
from ddp_kit.lessons import collectives, point_to_point
from ddp_kit.lessons._launch import Ranks
from ddp_kit.pool.rank.torchrun_environment import clock_name, compare_clocks
from ddp_kit.trace import Clock, Trace, TraceFolder
from ddp_kit.trace.events import Event, Group

pytestmark = pytest.mark.usefixtures("forked_ranks")
EVERY_FIELD = Event(
    *(1, 7, "all_to_all_single", "collective", "alltoall_base", Group("pair", (1, 2)), 3, 0, 4),
    *(2, "int64", ((2, 3), ()), ((1,),), ((1, 2), (0, 3)), "MAX", 48, 10, 11, 12),
    traces.pipeline(2).events[0].where,
    *(True, "cuda"),
)
BY_HAND = {
    "short": traces.pipeline(3),
    "never waited for": traces.ring(3, 1),
    "never ended": traces.broken(3),
    "dropped": traces.mixed(2, 2),
    "without spans": replace(traces.pipeline(2), spans=()),
    "empty": Trace(2),
    "every field": Trace(2, (EVERY_FIELD,), (0, 5), ((1, 0), (2, 9))),
}
BY_HAND["dropped"] = replace(BY_HAND["dropped"], dropped=(0, 12))


def write(path, trace, worker="work", ranks=None):
    folder = TraceFolder(path)
    folder.write(worker, trace, range(trace.world_size) if ranks is None else ranks)
    return folder


def files(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def without_times(trace):
    """Return the events as they are on every run: no time, and no line of the run's code."""
    timeless = {"start": 0, "waited": None, "end": None}
    return [(replace(e, **timeless, where=None), e.where.function) for e in trace]


# --- round trip ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_HAND)
def test_a_trace_comes_back_equal(name, tmp_path):
    write(tmp_path, BY_HAND[name])
    assert kit.load_trace(tmp_path) == BY_HAND[name]


def test_a_real_trace_comes_back_equal(tmp_path):
    def worker(rank, world_size):
        tensor, pair = torch.ones(2, 3), dist.new_group([0, 1])
        if rank == 0:
            dist.send(tensor, 1, tag=3, group=pair)
        else:
            dist.recv(tensor, tag=3, group=pair)
        dist.all_to_all_single(tensor, tensor.clone(), [1, 1], [1, 1])
        dist.reduce(tensor, 1, dist.ReduceOp.MAX)
        sending = dist.isend(tensor, 1 - rank)
        dist.irecv(torch.ones(2, 3), 1 - rank).wait()
        sending.wait()

    trace = kit.run(worker, world_size=2).trace
    assert len(trace) > 10
    write(tmp_path, trace)
    assert kit.load_trace(str(tmp_path)) == trace


def test_a_rank_trace_is_readable_lines_of_json(tmp_path):
    write(tmp_path, BY_HAND["short"])
    head, *lines = (tmp_path / "run-00-work" / "rank-2.jsonl").read_text().splitlines()
    first_line = json.loads(head)
    assert [first_line[name] for name in ("format", "rank", "world_size")] == [
        *("ddp_kit trace 2", 2, 3),
    ]
    first = json.loads(lines[0])
    assert (first["op"], first["peer"], first["outputs"]) == ("recv", 1, [[32, 32]])
    assert "reduce_op" not in first  # it has its default value
    assert len(lines) == first_line["events"] == 4


def test_the_strides_of_a_trace_that_was_read_are_those_of_the_run(tmp_path):
    def reduce_transposed(rank, world_size):
        dist.all_reduce(torch.ones(2, 3).t())

    trace = kit.run(reduce_transposed, world_size=2).trace
    TraceFolder(tmp_path).write("transposed", trace, range(2))
    assert set(kit.load_trace(tmp_path)) == set(trace)


# --- runs ----------------------------------------------------------------------------------


def test_a_run_is_chosen_by_number_or_by_worker(tmp_path):
    folder = TraceFolder(tmp_path)
    kept = [traces.ring(2, rounds) for rounds in (1, 2, 3)]
    for worker, trace in zip(("first", "again", "again"), kept, strict=True):
        folder.write(worker, trace, range(2))
    chosen = [(0, 0), (2, 2), (-1, 2), (-3, 0), ("first", 0), ("again", 2)]
    assert [kept.index(kit.load_trace(tmp_path, run)) for run, _ in chosen] == [
        n for _, n in chosen
    ]
    assert kit.load_trace(tmp_path) == kept[2]
    for run in (3, -4, "never"):
        with pytest.raises(kit.TraceError, match=rf"no run {run!r} in .* it has 3: 0 first, 1 ag"):
            kit.load_trace(tmp_path, run)


def test_runs_beyond_a_hundred_keep_their_order(tmp_path):
    folder = TraceFolder(tmp_path)
    for number in range(102):
        folder.write("<lambda>", Trace(1, dropped=(number,)), [0])
    assert kit.load_trace(tmp_path).dropped == (101,)
    assert kit.load_trace(tmp_path, "lambda").dropped == (101,)
    with pytest.raises(kit.TraceError, match="it has 102: 0 lambda"):
        kit.load_trace(tmp_path, 102)


def test_a_second_start_replaces_the_first_and_leaves_what_is_not_its_own(tmp_path):
    write(tmp_path, traces.ring(3, 1))
    old = tmp_path / "run-00-work"
    (old / ".rank-3.jsonl.new").write_text('{"format": "ddp_k')  # of a rank that was killed
    (old / "notes.txt").touch()
    (tmp_path / "rank-0.jsonl").touch()
    (tmp_path / "run-01-mine").mkdir()
    folder = TraceFolder(tmp_path)
    folder.clear()
    assert files(tmp_path) == ["rank-0.jsonl", "run-00-work/notes.txt"]
    assert (tmp_path / "run-01-mine").is_dir()
    folder.write("other", traces.ring(2, 1), range(2))
    assert kit.load_trace(tmp_path) == traces.ring(2, 1)
    (old / "notes.txt").unlink()
    old.rmdir()
    TraceFolder(tmp_path).clear()
    assert files(tmp_path) == ["rank-0.jsonl"]
    assert not (tmp_path / "run-00-other").exists()


# --- what cannot be loaded -----------------------------------------------------------------


def test_no_folder_and_an_empty_one_differ(tmp_path):
    with pytest.raises(kit.TraceError, match=r"no folder '.*never'; name the one that a lesson"):
        kit.load_trace(tmp_path / "never")
    with pytest.raises(kit.TraceError, match="there is no trace in"):
        kit.load_trace(tmp_path)


def test_a_missing_rank_trace_is_named(tmp_path):
    write(tmp_path, traces.ring(4, 1), ranks=[0, 1, 3])
    with pytest.raises(kit.TraceError, match=r"^rank 2: the trace is missing in '.*run-00-work'"):
        kit.load_trace(tmp_path)
    (tmp_path / "run-00-work" / "rank-3.jsonl").unlink()
    with pytest.raises(kit.TraceError, match=r"^ranks 2 and 3: the traces are missing in"):
        kit.load_trace(tmp_path)


def test_an_unfinished_rank_trace_does_not_count(tmp_path, monkeypatch):
    folder = TraceFolder(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.write("work", traces.ring(2, 1), [1])
    assert files(tmp_path) == ["run-00-work/.rank-1.jsonl.new"]
    with pytest.raises(kit.TraceError, match="there is no trace in"):
        kit.load_trace(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "hello", "is damaged"),
        (lambda text: text.replace("trace 2", "trace 7"), "is not a rank trace that this kit"),
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: text[: text.rindex('{"rank"')], "is damaged"),
        (lambda text: text.replace('"rank": 1', '"rank": 0'), "is damaged"),
        (lambda text: text.replace('"op"', '"opera"'), "is damaged"),
        (lambda text: "", "is damaged"),
    ],
    ids=["other kind", "version", "cut", "line lost", "other rank", "other field", "empty"],
)
def test_a_file_that_cannot_be_read_is_named(change, words, tmp_path):
    write(tmp_path, traces.ring(2, 2))
    part = tmp_path / "run-00-work" / "rank-1.jsonl"
    part.write_text(change(part.read_text()))
    with pytest.raises(kit.TraceError, match=rf"rank-1.jsonl' {words}"):
        kit.load_trace(tmp_path)


# --- clocks --------------------------------------------------------------------------------


def test_times_of_another_clock_become_those_of_rank_0(tmp_path):
    trace = traces.broken(3)
    never_over = (trace.spans[2][0], 0)
    trace = replace(trace, spans=(*trace.spans[:2], never_over))
    skewed = tuple(
        replace(
            event,
            start=event.start + 5_000,
            waited=event.waited and event.waited + 5_000,
            end=event.end and event.end + 5_000,
        )
        for event in trace
    )
    spans = tuple((begin + 5_000, end and end + 5_000) for begin, end in trace.spans)
    folder = write(tmp_path, trace, ranks=[0])
    folder._runs, folder.clock = 0, Clock(-5_000, 70)
    folder.write("work", Trace(3, skewed, (), spans), [1, 2])
    assert kit.load_trace(tmp_path) == replace(trace, clock_error=(0, 70, 70))


def test_clocks_of_other_hosts_are_compared_and_those_of_one_are_exact():
    def worker(rank, world_size):
        host = [0, 1, 1, 2][rank]
        skew = [0, 10**12, -(10**12)][host]
        return compare_clocks(f"host {host}", lambda: monotonic_ns() + skew), compare_clocks()

    clocks = [measured for measured, same in kit.run(worker) if same is None]
    assert len(clocks) == 4
    assert clocks[0] is None
    assert clocks[1] == clocks[2]  # one host, one offset
    for clock, skew in ((clocks[1], 10**12), (clocks[3], -(10**12))):
        assert abs(clock.offset + skew) <= clock.error < 50_000_000


def test_processes_of_one_host_have_one_clock_name():
    names = list(kit.run(lambda rank, world_size: clock_name(), world_size=2))
    assert names == [clock_name()] * 2


# --- lessons -------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_torchrun")
def test_torchrun_and_spawned_ranks_write_the_same(tmp_path):
    own, theirs = tmp_path / "spawned", tmp_path / "torchrun"
    collectives.main(["--world-size", "2", "--backend", "gloo", "--trace", str(own)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "ddp_kit.lessons.collectives"]
    command += ["--backend", "gloo", "--trace", str(theirs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert out.returncode == 0, out.stderr
    assert files(theirs) == files(own)
    for number in range(len(list(own.iterdir()))):
        spawned, torchrun = kit.load_trace(own, number), kit.load_trace(theirs, number)
        assert without_times(torchrun) == without_times(spawned)
        assert (torchrun.world_size, torchrun.clock_error) == (2, ())
        assert all(event.start <= event.waited <= event.end for event in torchrun if event.end)


def test_the_last_run_of_a_lesson_can_be_drawn(tmp_path):
    point_to_point.main(["--world-size", "3", "--trace", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("run-00-blocking", "run-01-immediate", "run-02-exchange"),
        *("run-03-from_anyone", "run-04-token"),
    ]
    picture = kit.plot.timeline(kit.load_trace(tmp_path))
    assert repr(picture).startswith("3 messages on 3 ranks, step by step")


def test_a_run_that_fails_is_kept_too(tmp_path):
    def failing(rank, world_size):
        dist.barrier()
        raise ValueError

    with pytest.raises(kit.RankError):
        Ranks(2, "gloo", folder=TraceFolder(tmp_path))(failing)
    assert [event.call for event in kit.load_trace(tmp_path)] == ["barrier"] * 2

    def failing_at_once(rank, world_size):
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        Ranks(1, "gloo", 0, TraceFolder(tmp_path / "torchrun"))(failing_at_once)
    assert kit.load_trace(tmp_path / "torchrun").dropped == (0,)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(kit.PoolError, match=rf"--trace cannot write to '{path}': \w+ .*"):
            point_to_point.main(["--world-size", "2", "--trace", str(path)])


def test_a_start_that_is_refused_removes_nothing(tmp_path):
    write(tmp_path, traces.ring(2, 1))
    with pytest.raises(kit.PoolError, match="world_size"):
        point_to_point.main(["--world-size", "0", "--trace", str(tmp_path)])
    assert kit.load_trace(tmp_path) == traces.ring(2, 1)
