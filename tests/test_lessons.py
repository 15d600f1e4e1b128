"""The lessons' claims, at several world sizes and however they are started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from inspect import getsource

import pytest
import torch

import ddp_kit as kit
from ddp_kit.launch import prove
from ddp_kit.lessons import (
    _eight_steps,
    collectives,
    data_parallel,
    ddp,
    environment,
    init_methods,
    partitioned_sgd,
    point_to_point,
    ring_allreduce,
)

WORLD_SIZES = (1, 2, 3, 4)
PROOFS = {
    "point_to_point": "point_to_point: {}, every tensor arrived as it was sent\n",
    "collectives": "collectives: {}, 9 collectives and the barrier are right\n",
    "partitioned_sgd": "partitioned_sgd: {}, replicas bit-equal, gradients equal one process\n",
    "ring_allreduce": "ring_allreduce: {}, 3 rings agree with dist.all_reduce\n",
    "environment": "environment: {}, each knows its rank, synchronize returns as it should\n",
    "init_methods": "init_methods: {}, met in 4 ways, one address from each in the store\n",
    "ddp": "ddp: {}, equal start, mean gradients; no_sync and sampler as by hand\n",
    "data_parallel": "data_parallel: {}, eight steps and a weighted mean equal one process\n",
}
LESSONS = (
    point_to_point,
    collectives,
    partitioned_sgd,
    ring_allreduce,
    environment,
    init_methods,
    ddp,
    data_parallel,
)


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda module: module.__name__.split(".")[-1])
def test_main_prints_its_one_line_and_writes_its_traces(lesson, world_size, capsys, tmp_path):
    lesson.main(["--world-size", str(world_size), "--trace", str(tmp_path)])
    name = lesson.__name__.split(".")[-1]
    assert capsys.readouterr().out == PROOFS[name].format(ranks(world_size))
    trace = kit.load_trace(tmp_path)
    assert trace.world_size == world_size
    assert trace.events or world_size == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda module: module.__name__.split(".")[-1])
def test_a_lesson_holds_on_one_gpu(lesson):
    lesson.main(["--backend", "nccl", "--world-size", "1"])


@pytest.mark.parametrize("name", PROOFS)
def test_torchrun_gives_the_same_line(name):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", f"ddp_kit.lessons.{name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert out.stdout == PROOFS[name].format("2 ranks"), out.stderr


def test_torchrun_refuses_another_world_size():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "ddp_kit.lessons.point_to_point", "--world-size", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert out.returncode != 0
    assert "torchrun started 2 ranks, but --world-size is 3" in out.stderr


@pytest.mark.parametrize("name", PROOFS)
def test_help_names_the_options(name):
    command = [sys.executable, "-m", f"ddp_kit.lessons.{name}", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0
    assert "--world-size" in out.stdout
    assert "--backend" in out.stdout
    assert "--trace DIR" in out.stdout


@pytest.mark.parametrize("name", PROOFS)
def test_bad_options_are_told_in_one_line(name):
    module = sys.modules[f"ddp_kit.lessons.{name}"]
    for size in ("0", "-1", "1000000"):
        with pytest.raises(kit.PoolError, match="world_size must be at"):
            module.main(["--world-size", size])
    with pytest.raises(kit.BackendError, match="got 'smoke'"):
        module.main(["--backend", "smoke"])


def test_the_command_line_ends_in_one_line_without_a_traceback():
    command = [sys.executable, "-m", "ddp_kit.lessons.collectives", "--world-size", "0"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (1, "PoolError: world_size must be at least 1, got 0\n")


def test_a_claim_that_fails_is_an_error():
    with pytest.raises(kit.ProofError, match="this did not hold: pigs fly"):
        prove("pigs fly", False)


def test_main_fails_when_a_lesson_is_wrong(monkeypatch):
    monkeypatch.setattr(ring_allreduce, "expected_cost", lambda ring, n, nbytes: (1, 1))
    with pytest.raises(kit.ProofError, match="messages are as few"):
        ring_allreduce.main(["--world-size", "3"])


# --- point to point ------------------------------------------------------------------------


def test_a_write_before_wait_changes_the_message():
    result = kit.run(point_to_point.written_too_early, world_size=3, backend="gloo")
    assert list(result) == [99, 99, None]  # rank 0 had meant to send 1


def test_a_read_before_wait_sees_the_old_value():
    result = kit.run(point_to_point.read_too_early, world_size=3, backend="gloo")
    assert result[1] == {"before wait": 0, "after wait": 1}


def test_no_race_is_shown_where_there_is_one_rank():
    assert list(kit.run(point_to_point.written_too_early, world_size=1)) == [None]
    assert list(kit.run(point_to_point.read_too_early, world_size=1)) == [None]


# --- collectives ---------------------------------------------------------------------------


def test_the_reference_is_worked_out_by_hand():
    held = [torch.tensor([0.0, 1.0]), torch.tensor([10.0, 11.0])]
    after = {
        name: [None if want is None else collectives._flat(want) for want in answer]
        for name in [worker.__name__ for worker in collectives.COLLECTIVES]
        for answer in [collectives.reference(name, held)]
    }
    assert after == {
        "broadcast": [[0, 1], [0, 1]],
        "scatter": [[0], [1]],
        "gather": [[0, 10], None],
        "reduce": [[10, 12], None],
        "all_reduce": [[10, 12], [10, 12]],
        "all_gather": [[0, 10], [0, 10]],
        "reduce_scatter": [[10], [12]],
        "all_to_all": [[0, 10], [1, 11]],
        "all_reduce_in_a_group": [[0, 1], [10, 11]],
    }
    ops = {op: collectives.reference("all_reduce", held, op)[0].tolist() for op in collectives.OPS}
    assert ops == {
        "SUM": [10, 12],
        "PRODUCT": [0, 11],
        "MAX": [10, 11],
        "MIN": [0, 1],
        "AVG": [5, 6],
    }


def test_a_wrong_answer_does_not_agree():
    result = kit.run(collectives.all_reduce, "MAX", world_size=2)
    held = [collectives.own_tensor(rank, 2) for rank in range(2)]
    assert collectives.agrees(result, collectives.reference("all_reduce", held, "MAX"))
    assert not collectives.agrees(result, collectives.reference("all_reduce", held, "SUM"))


def test_the_group_is_a_true_subset():
    result = kit.run(collectives.all_reduce_in_a_group)
    assert [value["after"][0].item() for value in result] == [20, 10, 20, 30]


# --- partitioned SGD -----------------------------------------------------------------------


def test_partitions_are_disjoint_and_the_same_everywhere():
    parts = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert [len(part) for part in parts] == [50, 25, 25]
    assert sorted(index for part in parts for index in part) == list(range(100))
    again = partitioned_sgd.DataPartitioner(range(100), [0.5, 0.25, 0.25]).partitions
    assert parts == again
    assert parts[0] != list(range(50))


def test_the_network_has_as_many_parameters_as_it_says():
    assert sum(p.numel() for p in partitioned_sgd.Net().parameters()) == 21_840


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_both_ways_of_averaging_give_the_batch_gradient(world_size):
    whole = partitioned_sgd.whole_batch_gradient(32 * world_size)
    for average in (partitioned_sgd.average_gradients, partitioned_sgd.average_gradients_flat):
        result = kit.run(partitioned_sgd.mean_gradient, 32, average, world_size=world_size)
        for gradient in result:
            torch.testing.assert_close(gradient, whole, atol=1e-6, rtol=0)


def test_without_averaging_the_gradients_differ():
    whole = partitioned_sgd.whole_batch_gradient(64)
    result = kit.run(
        partitioned_sgd.mean_gradient, 32, partitioned_sgd.keep_gradients, world_size=2
    )
    assert (result[0] - whole).abs().max() > 1e-3


def test_replicas_drift_without_averaging():
    result = kit.run(partitioned_sgd.train, 1, partitioned_sgd.keep_gradients, world_size=2)
    assert not torch.equal(result[0]["parameters"], result[1]["parameters"])


def test_a_larger_step_learns_as_much_in_three_epochs():
    assert partitioned_sgd.train_alone(3, lr=0.02, momentum=0.9)["accuracy"] > 0.91


# --- ring all-reduce -----------------------------------------------------------------------


def test_rings_are_exact_where_sizes_do_not_divide():
    def all_cases(rank, world_size):
        return [
            (ring.__name__, shape, dtype)
            for ring in ring_allreduce.RINGS
            for shape in [(), (0,), (1,), (2,), (5,), (7, 3), (1, 1, 13), (1001,)]
            for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
            if not ring_allreduce.compare(rank, world_size, ring, shape, dtype)
        ]

    for world_size in (1, 2, 3, 4, 5):
        assert not any(kit.run(all_cases, world_size=world_size))


def test_a_kept_scratch_tensor_does_not_change_the_sum():
    def twice(rank, world_size):
        scratch = torch.full((10,), 77.0)
        for _ in range(2):
            tensor = torch.arange(10.0) + rank
            ring_allreduce.preposted_ring(tensor, scratch)
        return tensor.tolist()

    assert kit.run(twice, world_size=3)[1] == [3.0 * i + 3 for i in range(10)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_costs_are_what_the_formulas_say(world_size):
    numel = 12 * 100
    for ring in ring_allreduce.RINGS:
        trace = kit.run(ring_allreduce.count, ring, numel, world_size=world_size).trace
        messages, nbytes = ring_allreduce.expected_cost(ring, world_size, 4 * numel)
        for rank in range(world_size):
            assert len(trace.messages(src=rank)) == messages
            assert trace.bytes_sent(rank) == nbytes
            right = (rank + 1) % world_size
            assert trace.messages(src=rank) == trace.messages(src=rank, dst=right)


def test_every_step_of_the_ring_is_kept():
    result = kit.run(ring_allreduce.watch, world_size=3)
    assert result[0].tolist() == [
        [1, 1, 1],
        [1, 1, 101],
        [1, 111, 101],
        [111, 111, 101],
        [111, 111, 111],
    ]


def test_bandwidth_measures_every_contestant():
    series = ring_allreduce.bandwidth(kit.run, sizes=(400, 4_000), rounds=2)
    assert list(series) == ["built-in all_reduce", "whole ring", "chunked ring", "preposted ring"]
    for points in series.values():
        assert [nbytes for nbytes, _ in points] == [400, 4_000]
        assert all(seconds > 0 for _, seconds in points)


# --- environment ---------------------------------------------------------------------------


def test_synchronize_leaves_by_each_of_its_exits():
    left = [environment.without_a_package(), environment.synchronize()]
    left.append(environment.in_a_world_of_one())
    left += kit.run(environment.everywhere, world_size=2)
    assert left == [*environment.EXITS, environment.EXITS[3]]
    assert list(kit.run(environment.everywhere, world_size=1)) == [environment.EXITS[2]]
    assert not torch.distributed.is_initialized()


def test_main_fails_when_a_rank_does_not_wait(monkeypatch):
    def leaves_at_once(rank, world_size, late):
        now = time.monotonic()
        return {"came": now + (rank == late), "left": now}

    monkeypatch.setattr(environment, "come_and_leave", leaves_at_once)
    with pytest.raises(kit.ProofError, match="nobody leaves before the last has come"):
        environment.main(["--world-size", "2"])


def test_the_same_worker_says_the_same_from_a_cell_and_under_torchrun(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        + getsource(environment.introduce)
        + "dist.init_process_group('gloo')\nintroduce()\ndist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    result = kit.run(lambda rank, world_size: environment.introduce(), world_size=2)
    assert sorted(out.stdout.splitlines()) == list(result), out.stderr
    assert result[1] == "rank 1 of 2, local rank 1, sum of all ranks 1"


# --- init methods --------------------------------------------------------------------------


def explained(pool, worker, *args):
    with pytest.raises(kit.RankError) as caught:
        pool.run(worker, *args)
    return init_methods.explain(caught.value)


def meaning(words):
    return "\n    ".join(init_methods.MEANINGS[words])


def test_each_meeting_that_fails_is_explained(tmp_path):
    here = [f"tcp://127.0.0.1:{port}" for port in init_methods.free_ports(3)]
    with kit.WorkerPool(2, init=False) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = [
            explained(pool, init_methods.attempt, *case)
            for case in (
                (f"file://{tmp_path}/alone", [(0, 2, 1), None]),
                (f"file://{tmp_path}/twice", [(0, 2, 1), (0, 2, 1)]),
                (f"file://{tmp_path}/size", [(0, 2, 30), (1, 3, 1)]),
                (here[0], [(0, 2, 1), None]),
                (here[1], [None, (1, 2, 1)]),
                (here[2], [(0, 2, 30), (0, 2, 30)], 1.5),
                (taken, [(0, 2, 30), (1, 2, 30)]),
            )
        ]
        assert told == [
            "rank 0: " + meaning("Wait timeout"),
            "ranks 0 and 1: " + meaning("Wait timeout"),
            "rank 1: " + meaning("Wait timeout"),
            "rank 0: " + meaning("clients joined"),
            "rank 1: " + meaning("to connect to"),
            "rank 1: " + meaning("EADDRINUSE"),
            "rank 0: " + meaning("EADDRINUSE"),
        ]
        assert init_methods.owner(server.getsockname()[1]) == "this process"


def test_the_file_of_a_killed_run_is_explained(tmp_path):
    path = tmp_path / "met"
    with kit.WorkerPool(2, init=False) as pool:
        with pytest.raises(kit.RankDiedError):
            pool.run(init_methods.killed, path)
        assert path.exists()
        told = explained(pool, init_methods.attempt, f"file://{path}", [(0, 2, 0.5), None])
    assert told == "rank 0: " + meaning("onnect")


def failure(rank, message):
    return kit.RankFailure(rank, "RuntimeError", message)


def test_only_the_cause_is_explained_where_one_failure_brought_another():
    both = [failure(0, "Read error: Connection reset by peer"), failure(1, "Wait timeout")]
    told = init_methods.explain(kit.RankError(dict(enumerate(both))))
    assert told == "rank 1: " + meaning("Wait timeout")
    assert "rank 0: " in init_methods.explain(kit.RankError({0: both[0]}))
    unknown = init_methods.explain(kit.RankError({1: failure(1, "smoke at port 4711")}))
    assert unknown.startswith("rank 1: RuntimeError, for which")
    assert "4711" not in unknown


def test_main_fails_when_a_rank_wrote_no_address_of_its_own(monkeypatch):
    noted = init_methods.noted
    monkeypatch.setattr(init_methods, "noted", lambda *args: noted(*args) | {"listens": False})
    with pytest.raises(kit.ProofError, match="an address at which it listens"):
        init_methods.main(["--world-size", "2"])


# --- DDP -----------------------------------------------------------------------------------


def test_the_first_backward_has_one_bucket_and_later_ones_send_while_they_compute():
    first, second = kit.run(ddp.watch, 1, world_size=2)[1]
    assert first[-1].startswith("-> bucket 0: layer0.weight, layer0.bias, layer1.weight")
    assert sum(note.startswith("->") for note in first) == 1
    assert second == [
        note
        for bucket, layer in enumerate(["layer3", "layer2", "layer1", "layer0"])
        for bias, weight in [(f"{layer}.bias", f"{layer}.weight")]
        for note in (bias, weight, f"-> bucket {bucket}: {bias}, {weight}")
    ]


def test_buckets_follow_the_registration_for_ever_where_unused_parameters_are_looked_for():
    first, second = kit.run(ddp.watch, 1, True, (2, 0, 3, 1), True, world_size=2)[0]
    assert first == second
    assert second.index("-> bucket 0: layer1.bias") > second.index("layer2.weight")


def test_a_sum_is_a_mean_with_a_learning_rate_as_many_times_as_large():
    mean, summed = (
        kit.run(ddp.pull, lr, hook)[2] for lr, hook in ((0.4, None), (0.1, ddp.sum_gradients))
    )
    assert mean == pytest.approx(summed)
    assert mean[-1] == pytest.approx(15)
    assert abs(kit.run(ddp.pull, 0.4, ddp.sum_gradients)[0][-1]) > 100_000


def test_replicas_drift_once_ddp_is_taken_off():
    result = kit.run(ddp.pull, 0.4, None, True, world_size=3)
    assert [held[-1] for held in result] == pytest.approx([0, 10, 20])
    assert ddp.count_calls(result.trace) == {
        "DistributedDataParallel": 1,
        "DDP broadcast(src=0)": 1,
    }


def test_the_typical_backward_is_not_the_first():
    result = kit.run(ddp.backwards, 1, 3, world_size=2)
    step = ddp.typical(result.trace)
    assert step in (1, 2)
    twin = kit.plot.buckets(result, step=step).twin
    assert f"Backward {step + 1} of 3" in twin
    assert "bucket 3  1,050,624" in twin


def test_a_wrapper_that_nobody_keeps_is_gone_before_backward():
    def gradient(rank, world_size, keep):
        model = torch.nn.Linear(1, 1, bias=False)
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
        loss = wrapper(torch.full((1, 1), 2.0 * rank)).sum()
        if not keep:
            del wrapper
        loss.backward()
        return model.weight.grad.item()

    assert list(kit.run(gradient, True, world_size=2)) == [1, 1]
    assert list(kit.run(gradient, False, world_size=2)) == [0, 2]


def test_a_parameter_without_gradient_leaves_all_of_the_first_step_unreduced():
    result = kit.run(ddp.use_heads, False, [0, 0], world_size=2)
    assert list(result) == [
        {"trunk": 1.0, "head 0": 1.0, "head 1": None},
        {"trunk": 10.0, "head 0": 10.0, "head 1": None},
    ]
    with pytest.raises(kit.RankError, match="did not receive grad for rank 1: 2"):
        kit.run(ddp.use_heads, False, [0, 0], 2, world_size=2)


def test_unused_parameters_count_as_zero_in_the_mean():
    result = kit.run(ddp.use_heads, True, [0, 1], 2, world_size=2)
    assert list(result) == [{"trunk": 5.5, "head 0": 0.5, "head 1": 5.0}] * 2


@pytest.mark.parametrize(
    ("sync", "start", "after"), [(True, [4, 4, 4], [6, 10, 14]), (False, [4, 8, 12], [6, 12, 18])]
)
def test_buffers_come_from_rank_0_before_each_forward(sync, start, after):
    result = kit.run(ddp.running_means, sync, world_size=3)
    stages = [[int(seen[stage]) for seen in result] for stage in result[0]]
    assert stages == [[4, 8, 12], start, after]


def test_positions_are_dealt_as_on_paper():
    assert ddp.deal_by_hand(10, 4) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert ddp.deal_by_hand(10, 4, drop_last=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ddp.deal_by_hand(2, 4) == [[0], [1], [0], [1]]
    assert ddp.how_often(ddp.deal_by_hand(10, 4)) == [8, 2]


@pytest.mark.parametrize("length", range(1, 10))
def test_the_sampler_deals_as_by_hand(length):
    for drop_last in (False, True):
        hands = [hand for (hand,) in kit.run(ddp.deal, length, False, drop_last, world_size=3)]
        assert hands == ddp.deal_by_hand(length, 3, drop_last)


def test_an_epoch_that_is_not_told_deals_the_same_again():
    told, forgotten = (kit.run(ddp.deal, 20, True, False, told) for told in ((0, 1), (0, 0)))
    assert all(first != second for first, second in told)
    assert all(first == second for first, second in forgotten)


def test_main_fails_where_ddp_averages_nothing(monkeypatch):
    monkeypatch.setattr(ddp, "one_step", unaveraged)
    with pytest.raises(kit.ProofError, match="DDP leaves the mean"):
        ddp.main(["--world-size", "2"])


def unaveraged(rank, world_size):
    own = torch.tensor([float(rank)])
    return {"own": own, "average_gradients": own, "DDP": own}


def test_each_variant_is_timed_as_often_as_asked():
    for wire in (None, 1e9):
        seconds = partitioned_sgd.slowest(kit.run(ddp.step_seconds, wire, 2, world_size=2))
        assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys(
            ddp.OPTIONS, 2
        )


# --- DataParallel --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [30, 5, 6])
@pytest.mark.parametrize("devices", WORLD_SIZES)
def test_virtual_devices_train_as_one_process_does(devices, count):
    plain = data_parallel.train_plainly(count=count)
    parallel = data_parallel.train(data_parallel.virtual(devices), count=count)
    torch.testing.assert_close(parallel, plain, atol=1e-6, rtol=0)
    assert plain["gradient"].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("count", "sizes"), [(30, [8, 8, 8, 6]), (5, [2, 2, 1]), (6, [2, 2, 2]), (3, [1, 1, 1])]
)
def test_scatter_cuts_chunks_and_may_leave_a_device_without(count, sizes):
    batch = torch.arange(float(count))
    shards = data_parallel.scatter(batch, data_parallel.virtual(4))
    assert [len(shard) for shard in shards] == sizes
    assert torch.equal(torch.cat(shards), batch)
    assert shards[0].data_ptr() == batch.data_ptr()
    assert shards[1].untyped_storage().nbytes() == 4 * sizes[1]


def test_reduce_is_what_loss_backward_does_to_the_replicas():
    images, labels = data_parallel.first_digits(30)
    places = data_parallel.virtual(3)
    model, optimizer = data_parallel.start()
    steps = {
        step: new
        for step, _, new in data_parallel.eight_steps(model, optimizer, images, labels, places)
    }
    again, _ = data_parallel.start()
    shards = data_parallel.scatter(images, places)
    outputs = data_parallel.parallel_apply(data_parallel.replicate(again, places), shards, places)
    data_parallel.LOSS(data_parallel.gather(outputs, places), labels).backward()
    for index, parameter in enumerate(again.parameters()):
        assert torch.equal(steps["reduce"][0][index], parameter.grad)
        each = [gradients[index] for gradients in steps["backward"]]
        torch.testing.assert_close(sum(each), parameter.grad, atol=1e-7, rtol=0)
        assert each[1].abs().max() > 0


def test_replica_of_device_0_is_the_model_and_others_are_copies():
    model, _ = data_parallel.start()
    first, second = data_parallel.replicate(model, data_parallel.virtual(2))
    for parameter, shared, copy in zip(
        model.parameters(), first.parameters, second.parameters, strict=True
    ):
        assert shared.data_ptr() == parameter.data_ptr() != copy.data_ptr()
        assert torch.equal(copy, parameter)


def test_buffers_remember_the_shard_of_device_0_only():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.tensor([[1.0], [3.0], [100.0], [200.0]])
    places = data_parallel.virtual(2)
    for _ in data_parallel.eight_steps(
        model, optimizer, batch, None, places, lambda output, _: output.mean()
    ):
        pass
    assert model[0].running_mean.item() == pytest.approx(0.1 * 2)
    assert model[0].num_batches_tracked.item() == 1


@pytest.mark.parametrize(("devices", "batch"), [(1, 30), (2, 30), (3, 30), (4, 30), (4, 5)])
def test_bytes_that_devices_hold_are_those_worked_out_by_hand(devices, batch):
    held = data_parallel.held_by_net(data_parallel.virtual(devices), batch)
    shards = [len(chunk) for chunk in torch.arange(batch).chunk(devices)]
    expected = bytes_by_hand(devices, batch)
    for step, here in held.items():
        kept = [device.pop("kept for backward") for device in here]
        working = step in ("parallel apply", "gather", "loss")
        # 49,480 bytes a digit: both convolutions, pools with their indices, relus.
        assert kept == [49_480 * shard * working for shard in shards] + [0] * (
            devices - len(shards)
        )
        nonzero = [{kind: n for kind, n in device.items() if n} for device in here]
        assert nonzero == expected[step], step


def bytes_by_hand(devices, batch):
    """What `held_by_net` must find: float32 has 4 bytes, a label 8; a digit has 784 numbers."""
    network = 4 * 21_840
    after = {}
    for step, number in zip(STEPS, range(1, 9), strict=True):
        after[step] = []
        sizes = [len(chunk) for chunk in torch.arange(batch).chunk(devices)]
        sizes += [0] * (devices - len(sizes))
        for device, size in enumerate(sizes):
            first, alone = device == 0, devices == 1
            gathered = 4 * 10 * batch if number >= 4 and not alone else 0
            held = {
                "parameters": network * first,
                "optimiser state": network * first,
                "batch": batch * (4 * 784 + 8) * first,
                "shard": 4 * 784 * size * (not first and number <= 5),
                "replica": network * (not first and size > 0 and 2 <= number <= 6),
                # the output of a single device is the gathered one, so it lives on
                "outputs": 4 * 10 * size * (3 <= number <= 5 or (alone and number >= 3)),
                "gathered, loss": (gathered + 4 * (number >= 5)) * first,
                "gradients": network * (number >= 6 and size > 0 and (first or number == 6)),
            }
            after[step].append({kind: n for kind, n in held.items() if n})
    return after


STEPS = (
    *("scatter", "replicate", "parallel apply", "gather"),
    *("loss", "backward", "reduce", "update"),
)


@pytest.mark.parametrize(("world_size", "count"), [(3, 30), (4, 30), (4, 5)])
def test_plain_mean_is_wrong_and_weighted_mean_right_for_unequal_shards(world_size, count):
    whole = data_parallel.train_plainly(1, count)["gradient"]
    mean = kit.run(data_parallel.rank_gradient, False, count, world_size=world_size)
    weighted = kit.run(data_parallel.rank_gradient, True, count, world_size=world_size)
    equal = count % world_size == 0
    for rank in range(world_size):
        assert data_parallel.distance(weighted[rank], whole) < 1e-6
        assert (data_parallel.distance(mean[rank], whole) < 1e-6) == equal
        assert equal or data_parallel.distance(mean[rank], whole) > 1e-3


def test_main_fails_when_outputs_are_gathered_in_another_order(monkeypatch):
    gather = data_parallel.gather
    monkeypatch.setattr(_eight_steps, "gather", lambda outputs, at: gather(outputs[::-1], at))
    with pytest.raises(kit.ProofError, match="the gradient of 2 devices and of one are the same"):
        data_parallel.main(["--world-size", "2"])


def test_every_step_is_timed_as_often_as_asked():
    one, two = data_parallel.step_seconds([data_parallel.virtual(n) for n in (1, 2)], rounds=2)
    assert tuple(one) == tuple(two) == STEPS
    for times in (*one.values(), *two.values()):
        assert len(times) == 2
        assert min(times) > 0


def test_real_replicas_are_called_and_read_as_the_stand_ins_are(monkeypatch):
    """PyTorch's own replicate on the CPU: only its copy between GPUs is replaced."""

    def broadcast(tensors, devices, detach=False):
        copies = [[tensor.clone() for tensor in tensors] for _ in devices[1:]]
        return [[tensor.view_as(tensor) for tensor in tensors], *copies]

    def apply(modules, inputs, devices):
        assert list(devices) == places
        return [module(shard) for module, shard in zip(modules, inputs, strict=True)]

    inner = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(inner, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(inner, "_get_device_index", lambda device, optional: device.index)
    real = torch.nn.parallel
    monkeypatch.setattr(real, "scatter", lambda batch, devices: batch.chunk(len(devices)))
    monkeypatch.setattr(real, "parallel_apply", apply)
    monkeypatch.setattr(real, "gather", lambda outputs, device: torch.cat(outputs))
    places = [torch.device("cpu", 0), torch.device("cpu", 1)]
    assert data_parallel.are_real(places)
    torch.testing.assert_close(
        data_parallel.train(places), data_parallel.train_plainly(), atol=1e-6, rtol=0
    )


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="torch.nn.parallel moves tensors between GPUs, and there are no two here",
)
def test_stand_ins_equal_the_real_functions_and_dataparallel():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for count in range(2, min(4, torch.cuda.device_count()) + 1):
            places = data_parallel.devices(count)
            assert data_parallel.are_real(places)
            real = data_parallel.train(places)
            stand_in = data_parallel.train(data_parallel.virtual(count))
            torch.testing.assert_close(real, stand_in, atol=1e-5, rtol=0)
            assert data_parallel.held_by_net(places) == data_parallel.held_by_net(
                data_parallel.virtual(count)
            )
            model, optimizer = data_parallel.start(places[0])
            first, _ = data_parallel.replicate(model, places[:2])
            assert first.parameters[0].data_ptr() == next(model.parameters()).data_ptr()
            whole = torch.nn.DataParallel(model, device_ids=places)
            for images, labels in data_parallel.batches(3):
                optimizer.zero_grad()
                output = whole(images.to(places[0]))
                data_parallel.LOSS(output, labels.to(places[0])).backward()
                optimizer.step()
            trained = partitioned_sgd.flat(model.parameters())
            torch.testing.assert_close(real["parameters"], trained, atol=1e-6, rtol=0)
