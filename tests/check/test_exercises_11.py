"""Wrong answers to the exercises of lesson 11, and the errors that the learner gets."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from answers import error_text

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
    ("wrong", "words"),
    [
        ({"local": "RANK"}, "RANK counts over all hosts, and no host has so many GPUs. Take LOCAL"),
        ({"host": "LOCAL_RANK"}, "GROUP_RANK is the number of the host; LOCAL_RANK counts the"),
        ({"number": str}, "Environment variables are strings. Convert the number of the host with"),
        ({"cpu": ""}, 'A host without GPUs has the device "cpu".'),
    ],
)
def test_a_place_that_is(wrong, words):
    text = error_text(kit.check.exercise_11_1, placing(**wrong))
    assert text.startswith("exercise 11.1, my_place(")
    assert "on 4 ranks: wrong result\nrank " in text
    assert words in text


@pytest.mark.parametrize("value", ["cuda:0", None, (0, "cuda:0", 1)])
def test_a_place_that_is_not_two_values(value):
    text = error_text(kit.check.exercise_11_1, lambda gpus: value)
    assert text.endswith("Return two values: the number of the host, and the name of the device.")


def test_a_device_without_its_number():
    text = error_text(kit.check.exercise_11_1, lambda gpus: (int(os.environ["GROUP_RANK"]), "cuda"))
    assert text.endswith('own GPU on its host, such as "cuda:1".')


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
EVERYBODY = "Only rank 0 finds the file. All ranks must call the same broadcast, whatever they find"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"loads": lambda rank: True, "share": "never"}, f"rank 1 {HOLDS}\n{EVERYBODY}"),
        ({"share": "if found"}, f"on 2 ranks: it deadlocks\n{EVERYBODY}"),
        ({"copy": False}, f"rank 1 {HOLDS}\nChange the tensor in place: "),
        ({"late": 1}, "should return 3 but returns 4\nrank 1 should return 3 but returns 4\nThe"),
        ({"missing": 1}, "return 0 but returns 1\nWithout a checkpoint, the next step is 0."),
    ],
)
def test_a_resumption_that_is(wrong, words):
    text = error_text(kit.check.exercise_11_2, resuming(**wrong))
    assert text.startswith("exercise 11.2, resume with")
    assert words in text


def test_a_resumption_that_loads_what_only_rank_0_has():
    def resume(folder, weights):
        return torch.load(Path(folder, "checkpoint.pt"))["step"]

    text = error_text(kit.check.exercise_11_2, resume)
    assert "resume with a checkpoint on 2 ranks: it raised an error\n" in text
    assert EVERYBODY in text


def test_a_resumption_that_forgets_the_weights():
    text = error_text(kit.check.exercise_11_2, lambda folder, weights: 3)
    assert f"rank 0 {HOLDS}\nrank 1 {HOLDS}\nChange the tensor in place: " in text


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
    ("wrong", "words"),
    [
        ({"adds": False}, "equally many ranks. Add up those before yours."),
        ({"own": True}, "The first rank of a host is the number of all ranks on the hosts before"),
        ({"as_list": tuple}, "Return a list of whole numbers."),
    ],
)
def test_ranks_that_are(wrong, words):
    text = error_text(kit.check.exercise_11_3, counting(**wrong))
    assert "ranks_here(store, host, local_world_size) on 2 ranks: wrong result\nrank " in text
    assert words in text


def test_ranks_that_wait_for_a_number_that_no_host_sets(monkeypatch):
    monkeypatch.setattr(torchrun, "STORE_LIMIT", timedelta(seconds=3))
    text = error_text(kit.check.exercise_11_3, counting(sets=False))
    assert "on 2 ranks: it raised an error\nSet the number of your own ranks in the" in text


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
