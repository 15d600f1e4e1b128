"""Wrong answers to the exercises of lesson 05, and the errors that the learner gets."""

from __future__ import annotations

import pytest
import torch
from answers import error_text

import ddp_kit as kit


def placing(
    number="LOCAL_RANK", ranks="LOCAL_WORLD_SIZE", alone=True, convert=True, one="nccl", parts=2
):
    """Return an answer to 5.1; each argument can make it wrong in one way."""

    def answer(environ, gpus):
        rank = environ.get(number, "0") if alone else environ[number]
        here = environ.get(ranks, "1") if ranks else 1
        if gpus >= (int(here) if convert else here):
            return (f"cuda:{rank}", "nccl")[:parts]
        return ("cpu", "gloo")[:parts]

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"number": "RANK"}, "RANK counts the ranks of all hosts. Choose the GPU by LOCAL_RANK."),
        ({"ranks": None}, "nccl needs a GPU for each rank: compare gpus with LOCAL_WORLD_SIZE."),
        ({"ranks": "WORLD_SIZE"}, "There is a GPU for each rank on this host"),
        ({"alone": False}, "a process alone has none of them."),
        ({"convert": False}, "The values in environ are strings"),
        ({"parts": 1}, 'Return two strings: the device, such as "cuda:1", and the backend.'),
    ],
)
def test_a_place_that_is(wrong, words):
    text = error_text(kit.check.exercise_5_1, placing(**wrong))
    assert text.startswith("exercise 5.1, place(")
    assert words in text


def test_a_place_of_a_process_that_expects_company():
    def place(environ, gpus):
        return placing()(environ, gpus) if environ else ("cpu", "gloo")

    text = error_text(kit.check.exercise_5_1, place)
    assert "place({}, gpus=2) on 1 rank: wrong result\nrank 0 should return ('cuda:0', " in text
    assert text.endswith("it is the only rank on its host.")


def test_a_device_may_be_a_torch_device():
    def place(environ, gpus):
        device, backend = placing()(environ, gpus)
        return torch.device(device), backend

    kit.check.exercise_5_1(place)


def sharing(ranks="LOCAL_WORLD_SIZE", least=1, divide=int.__floordiv__, sets=True, alone=True):
    """Return an answer to 5.2; each argument can make it wrong in one way."""

    def answer(environ, cores):
        here = int(environ.get(ranks, 1) if alone else environ[ranks]) if ranks else 1
        threads = max(least, divide(cores, here))
        if sets:
            torch.set_num_threads(threads)
        return threads

    return answer


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sets": False}, "The number of threads did not change: call torch.set_num_threads."),
        ({"ranks": "WORLD_SIZE"}, "LOCAL_WORLD_SIZE of them share cores."),
        ({"ranks": None}, "All 2 ranks of a host take all of its cores, so it is oversubscribed."),
        ({"least": 0}, "share_cores(environ, cores=4), 1 host on 5 ranks: it raised an error"),
        ({"divide": int.__truediv__}, "takes a whole number of at least 1: divide with //."),
        ({"divide": lambda a, b: -(-a // b)}, "LOCAL_WORLD_SIZE, and round down."),
        ({"alone": False}, "A process alone has no variables in environ."),
    ],
)
def test_shared_cores_that_are(wrong, words):
    text = error_text(kit.check.exercise_5_2, sharing(**wrong))
    assert text.startswith("exercise 5.2, share_cores(")
    assert words in text


def test_shared_cores_are_right_and_the_ranks_keep_their_threads(capsys):
    before = list(kit.run(lambda rank, n: torch.get_num_threads(), world_size=2, backend="gloo"))
    kit.check.exercise_5_2(sharing())
    assert capsys.readouterr().out.startswith("Exercise 5.2: right for 1 to 5 ranks on a host")
    after = list(kit.run(lambda rank, n: torch.get_num_threads(), world_size=2, backend="gloo"))
    assert after == before
