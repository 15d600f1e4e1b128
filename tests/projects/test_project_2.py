"""Project 2: the reference reaches every milestone, and mistakes in it meet their hints."""

from __future__ import annotations

import gc
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddp_kit as kit
from ddp_kit.check.hints import find
from ddp_kit.check.too_large_for_one_rank import LIMIT, LOSSES, MemoryLimit, fitting, replay
from ddp_kit.model import Link, chunked_ring

pytestmark = pytest.mark.usefixtures("forked_ranks")
REFERENCE = Path(__file__).with_name("project_2.py")
START = Path(__file__).parents[2] / "notebooks" / "projects" / "2_too_large_for_one_rank.py"
CHECK = kit.check.project_2
SOLVED = REFERENCE.read_text("utf-8")
LIMITED, EQUAL, BYTES, TIME = 2, 3, 4, 5  # milestones
PLAN = "PLAN = Plan(dp=2, tp=2, pp=2, micro_batches=BATCH // 2, sequence_parallel=False)"
MISTAKES = {  # by milestone and hint: what is changed in the reference, and to what
    (1, "no such plan"): [
        (PLAN, "PLAN = 2, 2, 2"),
        (PLAN, "PLAN = Plan(dp=2, tp=2, pp=2, micro_batches=8, sequence_parallel=False)"),
        (PLAN, "PLAN = Plan(tp=8, micro_batches=8, sequence_parallel=False)"),
        (PLAN, "PLAN = Plan(dp=2, tp=2, pp=2, micro_batches=4)"),
        (PLAN, PLAN.replace("sequence", "recompute='full', sequence")),
    ],
    (1, "does not fit"): [
        (PLAN, "PLAN = Plan(dp=8, sequence_parallel=False)"),
        (PLAN, "PLAN = Plan(dp=2, pp=4, micro_batches=4, sequence_parallel=False)"),
    ],
    (1, "slow"): [(PLAN, "PLAN = Plan(tp=4, pp=2, micro_batches=8, sequence_parallel=False)")],
    (LIMITED, "whole at first"): [
        ("self.blocks = nn.ModuleList()", "self.all = fill(nn.Linear(600, 600))\n"
         "        self.blocks = nn.ModuleList()"),
    ],
    (LIMITED, "all forwards first"): [("order(plan.pp - index, m)", "order(m, m)")],
    (LIMITED, "over the limit"): [
        ("y = stage(x)", "y = stage(x)\n            stage.kept = [y, "
         "*getattr(stage, 'kept', []), y.new_zeros(60_000)]"),
    ],
    (EQUAL, "no losses"): [
        ("    return losses\n", "    return []\n"),
        ("    return losses\n", "    return losses[-1:]\n"),
    ],
    (EQUAL, "other loss"): [
        ("losses.append(loss.item() / plan.dp)", "losses.append(loss.item())"),
        ("f\"blocks.{number}.\"", "\"blocks.0.\""),
    ],
    (EQUAL, "other gradient"): [
        ("parameter.grad /= plan.dp", "pass"),
        ("dist.all_reduce(parameter.grad, group=data)", "pass"),
        ("optimizer.zero_grad()", "pass"),
        ("y.backward(gradient)", "y.backward(None if gradient is None else gradient / 4)"),
    ],
    (EQUAL, "float32"): [
        ("out = y.detach()", "out = y.detach().float().double()"),
        ("y.backward(gradient)", "y.backward(gradient if gradient is None else "
         "gradient.float().double())"),
    ],
    (BYTES, "whole tensor in each round"): [
        ("(plan.tp - 1) / plan.tp * BYTES", "(plan.tp - 1) * BYTES"),
        ("dp = 2 * (plan.dp - 1) / plan.dp", "dp = 2 * (plan.dp - 1)"),
    ],
    (BYTES, "one dimension left out"): [
        ("return tp + pp + dp", "return tp + pp"),
        ("return tp + pp + dp", "return tp + dp"),
        ("return tp + pp + dp", "return pp + dp"),
    ],
    (BYTES, "all ranks alike"): [("stage = rank // plan.tp % plan.pp", "stage = 0")],
    (BYTES, "other bytes"): [("return tp + pp + dp", "return tp / plan.micro_batches + pp + dp")],
    (TIME, "no bubble"): [("plan.micro_batches + plan.pp - 1", "plan.micro_batches")],
    (TIME, "no latency"): [("def seconds(plan=PLAN):", "def seconds(plan=PLAN):\n"
                            "    LINK = type(given['LINK'])(0, given['LINK'].beta)")],
    (TIME, "other time"): [("* each + gradients", "/ 1000 * each")],
}  # fmt: skip
CASES = [(*key, *change) for key, changes in MISTAKES.items() for change in changes]


def program(folder: Path, *change: str) -> str:
    """Return the path of the reference with a change."""
    assert not change or SOLVED.count(change[0]) == 1, change[0]
    path = folder / "mine.py"
    path.write_text(SOLVED.replace(*change) if change else SOLVED, "utf-8")
    return str(path)


def test_the_reference_reaches_every_milestone(capsys):
    credit = CHECK(str(REFERENCE))
    assert credit == 1
    assert len(credit.parts) == 5
    printed = capsys.readouterr().out
    assert [f"Project 2, milestone {n}: reached" in printed for n in range(1, 6)] == [True] * 5


@pytest.mark.parametrize(("milestone", "hint", "old", "new"), CASES)
def test_a_mistake_meets_its_hint(milestone, hint, old, new, tmp_path):
    with pytest.raises(kit.ExerciseError) as caught:
        CHECK(program(tmp_path, old, new), milestone=milestone, hint=3)
    assert caught.value.mistake == find("P2", hint).mistake
    assert caught.value.hint == f"{find('P2', hint).question}\n{find('P2', hint).place}"


def test_what_is_no_program_is_refused(tmp_path):
    def refused(program):
        with pytest.raises(kit.ExerciseError) as caught:
            CHECK(program)
        return str(caught.value)

    assert "got a value of type function" in refused(program)
    assert "there is no program" in refused(str(tmp_path / "other.py"))
    path = tmp_path / "mine.py"
    path.write_text("PLAN = 1 / 0", "utf-8")
    assert "cannot be loaded: ZeroDivisionError" in refused(str(path))
    path.write_text("PLAN = 1", "utf-8")
    assert "should define train" in refused(str(path))


def test_predictions_that_are_not_written_or_fail_are_said_so(tmp_path):
    def said(new, error=kit.ExerciseError):
        path = program(tmp_path, "def seconds(plan=PLAN):", f"def seconds(plan=PLAN):\n    {new}")
        with pytest.raises(error) as caught:
            CHECK(path, milestone=TIME, hint=1)
        return str(caught.value)

    assert "predict the seconds" in said(
        "raise NotImplementedError('Project 2: predict the seconds')", NotImplementedError
    )
    assert "seconds(): it raised KeyError: 2" in said("{}[2]")
    assert "it should return a number, and returns None" in said("return")


def test_the_start_has_the_losses_of_one_process_and_stops_at_the_limit():
    names = runpy.run_path(str(START))
    assert names["train_alone"]() == pytest.approx(LOSSES, abs=1e-13)
    credit = kit.check.credit(CHECK, str(START))
    assert not any(credit.parts.values())
    assert f"and its limit is {LIMIT:,}" in credit.wrong["trains under the limit"]


def test_the_start_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(START)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "one process: 4.85852318867" in done.stdout
    assert f"would hold 2,504,256 bytes of tensors, and its limit is {LIMIT:,}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_few_plans_fit_and_the_fastest_has_three_dimensions():
    found = fitting()
    assert min(found, key=found.get) == (2, 2, 2, 1)
    assert len(found) == 4


def test_the_limit_counts_what_is_alive_once():
    with MemoryLimit(1000) as memory:
        kept = torch.zeros(100)
        view = kept.view(10, 10)[1:]
        assert memory.held == 400
        view += 1
        del kept
        assert memory.held == 400
        del view
        gc.collect()
        assert (memory.held, memory.peak) == (0, 400)
        with pytest.raises(MemoryError, match="rank 0 would hold 1,004 bytes of tensors"):
            torch.zeros(251)
    torch.zeros(1000)


def test_the_limit_counts_activations_gradients_and_states():
    with MemoryLimit(float("inf")) as memory:
        weight = torch.zeros(10, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([weight])
        loss = weight.exp().sum()
        assert memory.held == 80 + 80 + 8  # what exp keeps, and the loss
        loss.backward()
        del loss
        assert memory.held == 160
        optimizer.step()
        assert 320 <= memory.held <= 328


def replayed(worker, n=2):
    return replay(kit.run(worker, world_size=n).trace, Link(1.0, 0.5))


def exchange(rank, world_size):
    import torch.distributed as dist

    mine, other = torch.zeros(4), torch.zeros(4)
    receiving = dist.irecv(other, 1 - rank)
    sending = dist.isend(mine, 1 - rank)
    receiving.wait()
    sending.wait()
    dist.all_reduce(mine)


def test_a_replay_lets_calls_last_as_long_as_on_the_link():
    found = replayed(exchange)
    takes = 1 + 16 * 0.5 + chunked_ring(2, 16, 1.0, 0.5)
    assert found.done == found.busy == [takes, takes]


def pass_on(rank, world_size):
    import torch.distributed as dist

    tensor = torch.zeros(2)
    if rank:
        dist.recv(tensor, rank - 1)
    if rank < world_size - 1:
        dist.send(tensor, rank + 1)


def test_a_replay_waits_for_messages():
    found = replayed(pass_on, 3)
    assert found.done == [5.0, 10.0, 10.0]
    assert found.busy == [5.0, 5.0, 0.0]


def distributed(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    with MemoryLimit(float("inf")) as memory:
        part = DTensor.from_local(torch.zeros(10), mesh, [Shard(0)])
        kept = part + 1
        return memory.held, kept.shape


def test_the_limit_counts_what_a_dtensor_consists_of():
    assert kit.run(distributed, world_size=1)[0][0] == 80
