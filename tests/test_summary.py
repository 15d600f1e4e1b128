"""The summary of a trace counts calls, bytes and times, and gloo sends what its formulas say."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from traces import MS, Script

import ddp_kit as kit
from ddp_kit.error_text import Frame
from ddp_kit.lessons.device_mesh import sent_by_tcp
from ddp_kit.trace import Group, RankTrace, Trace
from ddp_kit.trace.collectives import bytes_sent

pytestmark = pytest.mark.usefixtures("forked_ranks")


def rows(trace, **given):
    """Return the rows by call and rank."""
    return {(row.call, row.rank): row for row in trace.summary(**given).rows}


# --- the table -----------------------------------------------------------------------------


def training():
    script = Script(3)
    script.collective("broadcast", root=0, nbytes=600)
    for _ in range(4):
        for nbytes in (600, 30):
            script.collective("all_reduce", nbytes=nbytes, inputs=((nbytes,),))
    script.message(0, 2, nbytes=8)
    return script.trace()


def test_the_text_of_a_summary():
    text = """
3 ranks, 4 steps of 2 calls

call        ranks  calls  calls/step  bytes   sent  sent/step  formula
broadcast       0      1           0    600  1,200          0  tree: children * bytes
broadcast     1-2      1           0    600      0          0  tree: children * bytes
all_reduce    0-2      8           2  2,520  3,360        840  ring: 2(n-1)/n * bytes
send            0      1           0      8      8          0  bytes
recv            2      1           0      8      0          0

sent: what a rank sends by the formula, with the bytes of its tensors and n ranks.
A backend may use another algorithm."""
    assert str(training().summary()) == repr(training().summary()) == text.lstrip()


def test_a_first_step_with_other_calls_is_named():
    script = Script(2)
    line = Frame("Cell In[1]", 9, "worker", "loss.backward()", True)
    for number in range(3):
        for nbytes in [80, 80] if number else []:
            for rank in range(2):
                given = {"waited": None, "nbytes": nbytes, "inputs": ((20,),), "where": line}
                script.add(rank, "DDP all_reduce", "collective", 1, **given)
        script.collective("DDP all_reduce", nbytes=8, inputs=((2,),), where=line)
    heading = str(script.trace().summary()).splitlines()[0]
    assert heading == "2 ranks, 3 steps of 3 calls, except 1 call in the first"


def test_a_group_is_named_and_what_differs_has_a_row_of_its_own():
    script = Script(4)
    script.collective("all_reduce", ranks=(0, 2), group=Group("1", (0, 2)))
    script.collective("all_reduce", nbytes=4)
    text = str(script.trace().summary())
    assert "all_reduce in ranks 0 and 2   0, 2" in text
    assert "all_reduce                     0-3" in text


def test_one_rank_can_be_chosen():
    summary = training().summary(rank=2)
    assert {row.rank for row in summary.rows} == {2}
    assert str(summary).startswith("rank 2, 4 steps of 2 calls\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 3}, "there is no rank 3: the ranks of this run"),
        ({"rank": "0"}, "there is no rank '0': the ranks of this run"),
        ({"timed": "yes"}, "timed must be True or False, got 'yes'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(given, message):
    with pytest.raises(kit.TraceError, match=message):
        training().summary(**given)


def test_an_empty_trace_says_that_nothing_was_sent():
    summary = Trace(2).summary(timed=True)
    assert (str(summary), summary.rows, summary.steps) == ("2 ranks: nothing sent", (), 0)
    assert summary._repr_html_() == "<p>2 ranks: nothing sent</p>"


def test_what_was_dropped_is_said():
    trace = replace(training(), dropped=(5, 0, 2))
    last = str(trace.summary()).splitlines()[-1]
    assert last == "Not counted: 7 older calls of ranks 0 and 2."
    assert "Not counted" not in str(trace.summary(rank=1))


def test_the_html_has_the_cells_of_the_text():
    html = training().summary()._repr_html_()
    cells = [line.replace("<td", "\n<td").splitlines()[1:] for line in html.splitlines()[2:-3]]
    shown = [[cell.partition(">")[2].partition("<")[0] for cell in line] for line in cells]
    assert shown[2] == ["all_reduce", "0-2", "8", "2", "2,520", "3,360", "840", shown[2][-1]]
    assert len(shown) == 5
    script = Script(2)
    script.collective("<b>")
    assert "<b>" not in script.trace().summary()._repr_html_()


# --- times ---------------------------------------------------------------------------------


def test_waiting_is_what_blocked_says_and_its_share_is_of_the_steps():
    trace = training()
    found = rows(trace, timed=True)
    for rank in range(3):
        own = [row for (_, of), row in found.items() if of == rank]
        assert sum(row.waiting for row in own) == pytest.approx(trace.blocked(rank))
    row = found["all_reduce", 1]
    assert row.waiting == pytest.approx(8e-3)
    assert row.share == pytest.approx(8 / (8 + 8 * 0.1))  # 0.1 ms pass between two calls
    assert found["broadcast", 1].share == 0
    text = str(trace.summary(timed=True))
    assert "A step takes 2.20 ms, the median of each rank." in text
    lines = [line.split()[:2] for line in text.splitlines() if line.startswith("all_reduce")]
    assert lines == [["all_reduce", rank] for rank in "012"]


def test_hidden_is_the_time_of_a_call_in_which_its_rank_did_not_wait():
    script = Script(1)
    start = script.now[0]

    def add(begin, waited, end, **given):
        times = {"start": begin, "waited": waited, "end": end}
        times = {key: at and start + at * MS for key, at in times.items()}
        script.add(0, given.pop("op", "all_reduce"), "collective", **times, **given)

    add(1, 6, 8)  # computing until 6, except from 3 to 4
    add(2, 3, 4, op="all_gather", blocking=True)
    add(2, 9, None, op="reduce")  # it is not known when that was complete
    found = rows(replace(script.trace(), spans=((start, start + 10 * MS),)), timed=True)
    assert found["all_reduce", 0].hidden == pytest.approx(3e-3)  # not from 2 to 4
    assert found["all_reduce", 0].waiting == pytest.approx(2e-3)
    assert found["all_reduce", 0].share == pytest.approx(0.2)
    assert found["all_gather", 0].hidden == found["reduce", 0].hidden == 0


def test_buckets_are_hidden_until_the_last_one_is_sent():
    script = Script(1)
    start = script.now[0]
    for begin, waited, end in ((0, None, 7), (4, None, 8), (6, 7, 9)):
        times = {"start": start + begin * MS, "end": start + end * MS}
        times["waited"] = waited and start + waited * MS
        script.add(0, "DDP all_reduce", "collective", **times)
    assert rows(script.trace(), timed=True)["DDP all_reduce", 0].hidden == pytest.approx(6e-3)


# --- real runs -----------------------------------------------------------------------------


def train(rank, world_size, steps):
    torch.manual_seed(0)
    layers = torch.nn.Linear(50, 20), torch.nn.ReLU(), torch.nn.Linear(20, 40)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    for _ in range(steps):
        model(torch.randn(4, 50)).square().mean().backward()


def test_ddp_calls_and_sends_what_the_size_of_its_model_predicts(tmp_path):
    nbytes = 4 * (50 * 20 + 20 + 20 * 40 + 40)
    result = kit.run(train, 6, world_size=2)
    summary = result.trace.summary()
    found = rows(result.trace)
    assert summary.steps == 6
    for rank in range(2):
        reduced = found["DDP all_reduce", rank]
        assert reduced.calls_in_step == 2
        assert reduced.calls == 1 + 5 * 2  # the first backward has one bucket
        assert reduced.nbytes == reduced.sent == 6 * nbytes  # 2(n-1)/n is 1
        assert reduced.sent_in_step == nbytes
        sent = found["DDP broadcast", rank]
        assert (sent.calls, sent.nbytes, sent.sent) == (1, nbytes, nbytes if rank == 0 else 0)
        assert all(row.sent == 0 for row in summary.rows if not row.formula)
        waited = [event for event in result.trace if event.rank == rank and event.waited]
        assert sum(row.hidden > 0 for row in summary.rows if row.rank == rank) <= 1
        assert all(event.blocking or event.op == "DDP all_reduce" for event in waited)
    assert str(summary) == str(kit.run(train, 6, world_size=2).trace.summary())
    (tmp_path / "run-00-train").mkdir()
    for rank in range(2):
        file = tmp_path / "run-00-train" / f"rank-{rank}.jsonl"
        RankTrace.of(result.trace, rank).write(file)
    assert str(kit.load_trace(tmp_path).summary()) == str(summary)


def test_the_trace_of_an_error_has_a_summary():
    def worker(rank, world_size):
        for _ in range(4):
            dist.all_reduce(torch.zeros(4))
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(kit.DeadlockError) as caught:
        kit.run(worker, world_size=2)
    summary = caught.value.trace.summary()
    assert [(row.call, row.calls, row.sent) for row in summary.rows] == [
        *[("all_reduce", 4, 64)] * 2,
        *[("recv", 1, 0)] * 2,
    ]
    assert summary.steps == 4


def send_in_every_way(rank, world_size, size):
    def ones(times=1):
        return torch.ones(times * size)

    def several(root=True):
        return [ones() for _ in range(world_size)] if root else None

    # The parts of a list add up to different sizes, as all_to_all_single allows.
    to = [size * (1 + (rank + other) % 2) for other in range(world_size)]
    calls = (
        lambda: dist.all_reduce(ones()),
        lambda: dist.broadcast(ones(), src=1),
        lambda: dist.reduce(ones(), dst=1),
        lambda: dist.all_gather(several(), ones()),
        lambda: dist.gather(ones(), several(rank == 1), dst=1),
        lambda: dist.scatter(ones(), several(rank == 1), src=1),
        lambda: dist.all_to_all_single(ones(world_size), ones(world_size)),
        lambda: dist.all_to_all_single(torch.ones(sum(to)), torch.ones(sum(to)), to, to),
        lambda: dist.send(ones(), 1) if rank == 0 else rank == 1 and dist.recv(ones(), 0),
        lambda: dist.reduce_scatter(ones(), several()),
    )
    counted = []
    for call in calls:
        dist.barrier()
        before = sent_by_tcp()
        call()
        dist.barrier()  # whoever has passed it has received everything
        counted.append((sent_by_tcp() - before).total())
    return counted


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a connection")
@pytest.mark.parametrize("n", [2, 3, 4])
def test_gloo_sends_what_the_formulas_say(n):
    result = kit.run(send_in_every_way, 12_000, world_size=n)
    for rank, counted in enumerate(result):
        assert any(counted), "the system does not count them"
        events = [e for e in result.trace if e.rank == rank and e.op != "barrier"]
        predicted = [bytes_sent(event) for event in events]
        if len(predicted) < len(counted):  # neither sender nor receiver of the message
            predicted.insert(-1, 0)
        predicted[-1] *= 2  # its reduce_scatter is an all_reduce
        for sent, bytes_predicted in zip(counted, predicted, strict=True):
            # There are headers, in more and smaller messages for more ranks.
            assert bytes_predicted <= sent <= 1.05 * bytes_predicted + 2000


# --- messages ------------------------------------------------------------------------------


def test_an_empty_list_of_messages_says_where_the_collectives_are():
    script = Script(2)
    for _ in range(30):
        script.collective("all_reduce")
    messages = script.trace().messages()
    left_out = "no messages between two ranks; 30 collectives in trace.collectives"
    assert repr(messages) == f"[]  # {left_out}"
    assert isinstance(messages, list)
    assert messages == []
    assert [*messages, 1] == [1]
    messages.append(1)
    assert repr(messages) == "[1]"
    assert repr(Trace(2).messages()) == "[]"
    assert type(training().messages(src=1)) is list
