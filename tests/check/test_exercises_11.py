"""Wrong answers to the exercises of lesson 11, and the errors that the learner gets."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from answers import assert_mistake, mistake

import ddp_kit as kit
from ddp_kit.check import torchrun

pytestmark = pytest.mark.usefixtures("forked_ranks")


def placing(host="GROUP_RANK", local="LOCAL_RANK", number=int, cpu="cpu"):
    """Return an answer to 11.1; each argument can make it wrong in one way."""

    def my_place(gpus):
        device = f"cuda:{os.environ[local]}" if gpus or not cpu else cpu
        return number(os.environ[host]), device

    return my_place


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"local": "RANK"}, "rank as device", "rank 2 should return (1, 'cuda:0') but returns"),
        ({"host": "LOCAL_RANK"}, "wrong host", "rank 1 should return (0, 'cuda:1') but returns"),
        ({"number": str}, "host as text", "but returns ('0', 'cuda:0')"),
        ({"cpu": ""}, "no cpu", "rank 0 should return (0, 'cpu') but returns"),
    ],
)
def test_a_place_that_is(wrong, name, fact):
    gpus = 0 if name == "no cpu" else 2
    case = f"exercise 11.1, my_place({gpus}) on 4 ranks: wrong result\nrank "
    assert_mistake(kit.check.exercise_11_1, placing(**wrong), name, case, fact)


@pytest.mark.parametrize("value", ["cuda:0", None, (0, "cuda:0", 1)])
def test_a_place_that_is_not_two_values(value):
    fact = f"but returns {value!r}\n"
    assert_mistake(kit.check.exercise_11_1, lambda gpus: value, "another form", fact)


@mistake("11.1", "otherwise", "rank 1 should return (0, 'cuda:1') but returns (0, 'cuda')\n")
def test_a_device_without_its_number(gpus):
    return int(os.environ["GROUP_RANK"]), "cuda"


def resuming(loads=lambda rank: rank == 0, share="always", copy=True, late=0, missing=0):
    """Return an answer to 11.2; each argument can make it wrong in one way."""

    def resume(folder, weights):
        file = Path(folder, "checkpoint.pt")
        found = [torch.load(file) if loads(dist.get_rank()) and file.exists() else None]
        if share == "always" or (share == "if found" and found[0]):
            dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return missing
        if copy:
            weights.copy_(found[0]["weights"])
        else:
            weights = found[0]["weights"]
        return found[0]["step"] + late

    return resume


HOLDS = "should hold [5, 6, 7] in weights but holds [1, 1, 1]"


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"loads": lambda rank: True, "share": "never"}, "rank 0 only", f"rank 1 {HOLDS}\n"),
        ({"share": "if found"}, "rank 0 only", "with a checkpoint on 2 ranks: it deadlocks\n"),
        ({"copy": False}, "not copied", f"rank 0 {HOLDS}\nrank 1 {HOLDS}\n"),
        ({"late": 1}, "wrong step", "rank 1 should return 3 but returns 4\n"),
        ({"missing": 1}, "not step 0", "rank 1 should return 0 but returns 1\n"),
    ],
)
def test_a_resumption_that_is(wrong, name, fact):
    case = f"exercise 11.2, resume with{'out' if name == 'not step 0' else ''} a checkpoint"
    assert_mistake(kit.check.exercise_11_2, resuming(**wrong), name, case, fact)


@mistake("11.2", "rank 0 only", "resume with a checkpoint on 2 ranks: it raised an error\n")
def test_a_resumption_that_loads_what_only_rank_0_has(folder, weights):
    return torch.load(Path(folder, "checkpoint.pt"))["step"]


@mistake("11.2", "not copied", f"rank 0 {HOLDS}\nrank 1 {HOLDS}\n")
def test_a_resumption_that_forgets_the_weights(folder, weights):
    return 3


@mistake("11.2", "weights changed", "without a checkpoint", "[1, 1, 1] in weights but holds [0, 0")
def test_a_resumption_that_clears_the_weights_first(folder, weights):
    weights.zero_()
    return resuming()(folder, weights)


def counting(sets=True, adds=True, own=False, as_list=list):
    """Return an answer to 11.3; each argument can make it wrong in one way."""

    def ranks_here(store, host, local_world_size):
        if sets:
            store.set(f"host {host}", str(local_world_size))
        before = range(host + own)
        if adds:
            first = sum(int(store.get(f"host {other}")) for other in before)
        else:
            first = host * local_world_size
        return as_list(range(first, first + local_world_size))

    return ranks_here


@pytest.mark.parametrize(
    ("wrong", "name", "fact"),
    [
        ({"adds": False}, "equal hosts", "rank 1 should return [2] but returns [1]\n"),
        ({"own": True}, "wrong first rank", "rank 0 should return [0, 1] but returns [2, 3]\n"),
        ({"as_list": tuple}, "no list", "rank 0 should return [0, 1] but returns (0, 1)\n"),
    ],
)
def test_ranks_that_are(wrong, name, fact):
    case = "ranks_here(store, host, local_world_size) on 2 ranks: wrong result\nrank "
    assert_mistake(kit.check.exercise_11_3, counting(**wrong), name, case, fact)


def test_ranks_that_wait_for_a_number_that_no_host_sets(monkeypatch):
    monkeypatch.setattr(torchrun, "STORE_LIMIT", timedelta(seconds=3))
    fact = "on 2 ranks: it raised an error\n"
    assert_mistake(kit.check.exercise_11_3, counting(sets=False), "not set", fact)


@pytest.mark.parametrize(
    ("grade", "answer"),
    [
        (kit.check.exercise_11_1, placing()),
        (kit.check.exercise_11_2, resuming()),
        (kit.check.exercise_11_3, counting()),
    ],
)
def test_the_right_answers(grade, answer, capsys):
    before = os.environ.copy()
    grade(answer)
    assert ": right on 1, 2, 3, 4 and 5 " in capsys.readouterr().out
    assert os.environ == before
