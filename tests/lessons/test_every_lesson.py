"""The lessons' claims, at several world sizes and however they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ddp_kit as kit
from ddp_kit import lessons, model
from ddp_kit.lessons import (
    data_parallel,
    ddp,
    experts,
    init_methods,
    ring_allreduce,
    tensor_parallel,
    what_happens_at_1024,
)
from ddp_kit.lessons._launch import prove
from ddp_kit.pool.rank import torchrun_environment

PROOFS = {
    "start_here": "start_here: {}, each one a process, and all hold the same sum\n",
    "point_to_point": "point_to_point: {}, every tensor arrived as it was sent\n",
    "collectives": "collectives: {}, 12 collectives and the barrier are right\n",
    "partitioned_sgd": "partitioned_sgd: {}, replicas bit-equal, gradients equal one process\n",
    "ring_allreduce": "ring_allreduce: {}, 3 rings agree with dist.all_reduce\n",
    "your_machine": "your_machine: {}, each knows its rank, synchronize returns as it should\n",
    "init_methods": "init_methods: {}, met in 4 ways, one address from each in the store\n",
    "ddp": "ddp: {}, equal start, mean gradients; no_sync and sampler as by hand\n",
    "ddp_mistakes": "ddp_mistakes: {}, 8 mistakes do what the lesson says\n",
    "backends": "backends: {}, 16 operations right on 5 dtypes\n",
    "torchrun": "torchrun: {}, each knows its place, resumed training bit-equal\n",
    "what_happens_at_1024": "what_happens_at_1024: {}, 5 all_reduces send what the model says\n",
    "one_rank_first": (
        "one_rank_first: {}, FLOPs and bytes of a step are those of the formulas, recomputed "
        "bit-equal\n"
    ),
    "device_mesh": (
        "device_mesh: {}, 9 changes of placement by hand equal DTensor's, and so do meshes\n"
    ),
    "context_parallel": (
        "context_parallel: {}, ring and Ulysses attend and train as one process does\n"
    ),
    "experts": "experts: {}, experts, with and without replicas, train as one process does\n",
    "which_one_when": (
        "which_one_when: {}, FSDP x TP sends as planned, and 3 ways train as one process does\n"
    ),
    "zero": "zero: {}, 3 stages and PyTorch's own train as one process does\n",
    "tensor_parallel": (
        "tensor_parallel: {}, by hand and PyTorch's own train as one process does\n"
    ),
    "pipeline_parallel": "pipeline_parallel: {}, 7 schedules train as one process does\n",
    "your_own_backend": ("your_own_backend: {}, sums are exact and DDP trains as over gloo\n"),
    "data_parallel": "data_parallel: {}, eight steps and a weighted mean equal one process\n",
}

# Three ranks cannot share four heads.
ON_THREE = {
    "context_parallel": (
        "context_parallel: {}, ring and Ulysses attend, and the ring trains, as one process does\n"
    )
}

# torchrun starts two ranks below, and tests/cluster four, of every lesson. These run on four here
# as well: two have meshes of 2 x 2, and `make check` runs one.
ON_FOUR = ("device_mesh", "which_one_when", "ring_allreduce")


def lesson(name: str) -> ModuleType:
    return import_module(f"ddp_kit.lessons.{name}")


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def test_no_lesson_is_left_out():
    files = Path(lessons.__file__).parent.glob("[!_]*.py")
    assert {file.stem for file in files} == set(PROOFS)


def on_world_sizes():
    for name in PROOFS:
        for world_size in (1, 2, 3, 4):
            default = world_size in (1, 3) or (world_size == 4 and name in ON_FOUR)
            marks = [] if default else pytest.mark.long
            yield pytest.param(name, world_size, id=f"{name}-{world_size}", marks=marks)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("name", "world_size"), list(on_world_sizes()))
def test_main_prints_its_one_line_and_writes_its_traces(name, world_size, capsys, tmp_path):
    lesson(name).main(["--world-size", str(world_size), "--trace", str(tmp_path)])
    proof = (PROOFS | ON_THREE if world_size == 3 else PROOFS)[name]
    assert capsys.readouterr().out == proof.format(ranks(world_size))
    trace = kit.load_trace(tmp_path)
    assert trace.world_size == world_size
    silent = name == "one_rank_first"  # each of its ranks is on its own
    assert trace.events or world_size == 1 or silent


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("choice", [("nccl", "1"), ("cuda:gloo", "2")], ids=" ".join)
@pytest.mark.parametrize("name", PROOFS)
def test_a_lesson_holds_on_one_gpu(name, choice):
    lesson(name).main(["--backend", choice[0], "--world-size", choice[1]])


def under_torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.long
@pytest.mark.usefixtures("forked_torchrun")
def test_torchrun_gives_the_same_lines(tmp_path):
    """All in one start, because a start takes seconds. tests/cluster has two hosts do the same."""
    program = tmp_path / "program.py"
    program.write_text(
        "from importlib import import_module\n"
        f"for name in {list(PROOFS)}:\n"
        "    import_module(f'ddp_kit.lessons.{name}').main([])\n"
    )
    out = under_torchrun(str(program))
    assert out.stdout == "".join(line.format("2 ranks") for line in PROOFS.values()), out.stderr


def test_a_lesson_runs_under_torchrun_as_the_readme_says():
    out = under_torchrun("-m", "ddp_kit.lessons.ring_allreduce")
    assert (out.stdout, out.returncode) == (PROOFS["ring_allreduce"].format("2 ranks"), 0)


def test_torchrun_refuses_another_world_size(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    for variable, value in (place | met).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torchrun_environment, "end_with_agent", lambda: None)
    with pytest.raises(
        kit.PoolError, match="torchrun has started 2 ranks, but --world-size is 3; leave out"
    ):
        lesson("point_to_point").main(["--world-size", "3"])


@pytest.mark.parametrize("name", PROOFS)
def test_help_names_the_options(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        lesson(name).main(["--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert f"python -m ddp_kit.lessons.{name}" in out
    assert "--world-size" in out
    assert "--backend" in out
    assert "--trace DIR" in out


@pytest.mark.parametrize("name", PROOFS)
def test_bad_options_give_an_error_of_one_line(name):
    module = lesson(name)
    for size in ("0", "-1", "1000000"):
        with pytest.raises(kit.PoolError, match="world_size must be at"):
            module.main(["--world-size", size])
    with pytest.raises(kit.BackendError, match="got 'smoke'"):
        module.main(["--backend", "smoke"])


def test_the_command_line_ends_in_one_line_without_a_traceback():
    command = [sys.executable, "-m", "ddp_kit.lessons.collectives", "--world-size", "0"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (out.returncode, out.stderr) == (1, "PoolError: world_size must be at least 1, got 0\n")


def test_a_claim_that_fails_says_what_a_comparison_found():
    found = kit.compare([4.0] * 4, 1.0)
    message = r"(?s)this did not hold: it is the mean\n.*\nIt is 4 times the reference"
    with pytest.raises(kit.ProofError, match=message):
        prove("it is the mean", found)
    prove("it is the sum", kit.compare([4.0] * 4, 4.0))


# What is changed, so that a lesson is wrong or no longer agrees with its formula, and the claim
# of its main that then does not hold.
MISTAKES = [
    (
        "collectives.barrier",
        lambda r, n: {"arrived": r, "left": 0},
        "nobody left the barrier early",
    ),
    ("ring_allreduce.preposted_ring", ring_allreduce.whole_ring, "sends what the formula says"),
    ("ddp.DistributedDataParallel", ddp.Replicated, "Replicated trains as one process does"),
    ("ddp_mistakes.masks", lambda *_: [0], "with a seed for each rank, they differ"),
    (
        "data_parallel.gather",
        lambda outputs, at, gather=data_parallel.gather: gather(outputs[::-1], at),
        "the gradient of 2 devices and of one are the same",
    ),
    (
        "init_methods.noted",
        lambda *args, noted=init_methods.noted: noted(*args) | {"listens": "nothing"},
        "an address at which it listens",
    ),
    ("your_machine.everywhere", lambda *_: "there is no process group", "all ranks leave together"),
    (
        "what_happens_at_1024.SENT",
        {"tree": (what_happens_at_1024.tree, model.naive_ring)},
        "tree takes as long as predicted",
    ),
    ("one_rank_first.flops_per_token", lambda **sizes: 1, "has the FLOPs of the formula"),
    ("device_mesh.by_hand", lambda *_: {"after": torch.zeros(1)}, "is as DTensor's"),
    ("tensor_parallel.cut_gpt", tensor_parallel.forget, "by hand trains as one process does"),
    (
        "context_parallel.ulysses",
        lambda q, k, v, *_: q + k.sum() + v.sum(),
        "Ulysses attends as one",
    ),
    (
        "experts.train",
        lambda *settings: experts.train(*settings, average=lambda model, mesh: None),
        "1 replicas train as one process",
    ),
    (
        "_which_one_when.bytes_along",
        lambda dp, tp: {"dp": 1.0, "tp": 1.0},
        "a rank sends what the model says",
    ),
]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("name", "wrong", "claim"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_main_fails_where_a_lesson_is_wrong(name, wrong, claim, monkeypatch):
    module = name.partition(".")[0].removeprefix("_")
    main = lesson(module).main
    monkeypatch.setattr(f"ddp_kit.lessons.{name}", wrong)
    with pytest.raises(kit.ProofError, match=claim):
        main(["--world-size", "2"])


def test_ranks_of_lessons_compute_as_exactly_as_their_proofs_ask():
    result = kit.run(lambda rank, world_size: os.environ["NVIDIA_TF32_OVERRIDE"], world_size=2)
    assert list(result) == ["0", "0"]
