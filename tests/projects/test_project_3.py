"""The milestones of project 3: the reference reaches them, and each mistake gets its hint."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.check import a_better_all_reduce as module

sys.path.append(str(Path(__file__).parents[1] / "check"))

from answers import assert_mistake

from ddp_kit.check.a_better_all_reduce import Failed, Ranks
from ddp_kit.lessons.ring_allreduce import chunked_ring, whole_ring

pytestmark = pytest.mark.usefixtures("forked_ranks")
START = Path(kit.__file__).parents[1] / "notebooks/projects/3_a_better_all_reduce.py"
REFERENCE = runpy.run_path(str(Path(__file__).with_name("project_3.py")))
slow = runpy.run_path(str(START))["all_reduce"]


def others():
    rank, n = dist.get_rank(), dist.get_world_size()
    return [(rank + step) % n for step in range(1, n)]


def test_the_reference_reaches_all_milestones(capsys):
    assert kit.check.project_3(REFERENCE["all_reduce"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "Project 3, milestone 1: reached, right on 2 to 5 ranks.",
        "Project 3, milestone 2: reached, right in any order.",
        "Project 3, milestone 3: reached, no more bytes than needed.",
        "Project 3, milestone 4: reached, few rounds for small tensors.",
    ]


def test_the_start_is_right_and_no_more(capsys):
    found = kit.check.credit(kit.check.project_3, slow)
    assert list(found.parts.values()) == [True, True, False, False]


def test_the_start_measures_both_ways(tmp_path):
    text = START.read_text("utf-8").replace("PAIRS = 15", "PAIRS = 2")
    (tmp_path / "mine.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", "mine.py", "report.json"]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, env=own, check=True, timeout=240)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [len(pairs) for pairs in report.values()] == [2, 2]
    assert all(seconds > 0 for pair in report["mine"] for seconds in pair.values())


def gives_up(tensor):
    pass


def keeps_it(tensor):
    if dist.get_rank():
        dist.send(tensor, 0)
        return
    arriving = torch.empty_like(tensor)
    for other in others():
        dist.recv(arriving, other)
        tensor += arriving


def adds_itself_twice(tensor):
    slow(tensor)
    tensor *= 2


def forgets_the_rest(tensor):
    part = tensor.view(-1)[: tensor.numel() // 4 * 4].clone()
    slow(part)
    tensor.view(-1)[: len(part)] = part


def hears_one_other(tensor):
    arriving = torch.empty_like(tensor)
    work = dist.isend(tensor.clone(), others()[0])
    dist.recv(arriving, others()[-1])
    work.wait()
    tensor += arriving


def receives_too_much(tensor):
    slow(tensor.view(-1)[: 1 if dist.get_rank() else None])


def fails(tensor):
    raise KeyError("size")


def calls_gloo(tensor):
    dist.all_reduce(tensor)


def sends_first(tensor):
    passed = tensor.clone()
    for _ in others():
        dist.send(passed, others()[0])
        dist.recv(passed, others()[-1])
        tensor += passed


def adds_while_it_sends(tensor):
    works = [dist.isend(tensor, other) for other in others()]
    arriving = torch.empty_like(tensor)
    total = tensor.clone()
    for other in others():
        dist.recv(arriving, other)
        total += arriving
    tensor.copy_(total)
    for work in works:
        work.wait()


def only_chunks(tensor):
    chunked_ring(tensor)


def one_by_one(tensor):
    if tensor.nbytes > 64_000:
        return chunked_ring(tensor)
    total, mine = tensor.clone(), tensor.clone()
    for step, other in enumerate(others(), 1):
        work = dist.isend(mine, other)
        dist.recv(tensor, (dist.get_rank() - step) % dist.get_world_size())
        work.wait()
        total += tensor
    tensor.copy_(total)


@pytest.mark.parametrize(
    ("answer", "mistake", "facts"),
    [
        (gives_up, "unchanged", ["project 3, all_reduce of 60 numbers on 2 ranks: wrong result"]),
        (keeps_it, "on rank 0 only", ["rank 1 should hold"]),
        (adds_itself_twice, "too often", []),
        (forgets_the_rest, "wrong chunks", ["all_reduce of 7 numbers on 2 ranks"]),
        (hears_one_other, "wrong sum", ["all_reduce of 60 numbers on 3 ranks"]),
        (receives_too_much, "other lengths", []),
        (fails, "raises", ["it raised an error"]),
        (calls_gloo, "collective", ["all_reduce was called"]),
        (sends_first, "waits in a circle", ["it deadlocks"]),  # with many numbers, also under gloo
        (whole_ring, "too many bytes", ["bytes were sent by rank 0"]),
        (only_chunks, "a ring", ["it takes 2 rounds where 1 would be enough"]),
        (one_by_one, "one after the other", ["on 4 ranks", "it takes 3 rounds"]),
    ],
)
def test_a_mistake_gets_its_hint(answer, mistake, facts):
    assert_mistake(kit.check.project_3, answer, mistake, *facts)


def test_an_answer_with_threads_of_its_own_is_refused_in_a_sentence(capsys):
    def in_a_thread(tensor):
        thread = threading.Thread(target=slow, args=(tensor,))
        thread.start()
        thread.join()

    text = "it communicates in a thread of its own, whose turn this check cannot choose"
    assert_mistake(kit.check.project_3, in_a_thread, "", text)
    assert "Traceback" not in capsys.readouterr().out


def test_sends_that_gloo_would_buffer_wait_in_some_order():
    numbers, _, mistake, text = module._try_orders(0, 1, sends_first, 3)
    assert (numbers, mistake) == (module.SMALL, "waits in a circle")
    assert "rank 0 waits to send to rank 1; rank 1 waits to send to rank 2" in text


def test_what_is_written_before_the_wait_is_wrong_in_some_order():
    for ranks in (2, 3, 5):  # on real ranks, it depends on who is late
        _, _, mistake, text = module._try_orders(0, 1, adds_while_it_sends, ranks)
        assert mistake == "written too early"
        assert text.startswith("number 0 of rank ")


def run_in_order(function, ranks=2, seed=0):
    Ranks(ranks, seed).run(function, range(ranks))


def test_an_order_is_the_same_every_time_and_orders_differ():
    def noted(seed):
        seen = []

        def call(own):
            for _ in range(5):
                seen.append(own)
                dist.isend(torch.zeros(1), 1 - own)
                dist.recv(torch.zeros(1), 1 - own)

        run_in_order(call, seed=seed)
        return tuple(seen)

    assert noted(1) == noted(1)
    assert len({noted(seed) for seed in range(10)}) > 5


def test_a_deadlock_is_described_and_torch_is_put_back():
    before = dist.send, dist.get_rank
    with pytest.raises(Failed, match="rank 0 waits for a message from rank 1") as caught:
        run_in_order(lambda own: dist.recv(torch.zeros(1), 1 - own))
    assert caught.value.mistake == "waits in a circle"
    assert (dist.send, dist.get_rank) == before


def test_what_is_written_before_the_wait_may_be_sent():
    arrived = set()

    def call(own):
        tensor = torch.zeros(1)
        if own:
            dist.recv(tensor, 0)
            arrived.add(tensor.item())
        else:
            work = dist.isend(tensor, 1)
            while not work.is_completed():
                tensor += 1
            work.wait()

    for seed in range(20):
        run_in_order(call, seed=seed)
    assert len(arrived) > 1
