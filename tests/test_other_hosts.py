"""What the notebook concludes from what observers of ranks on other hosts write into the store."""

from __future__ import annotations

import builtins
import pickle
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from ddp_kit import settings
from ddp_kit.error_text import Frame, RankFailure
from ddp_kit.errors import PoolError, RankDiedError, RankError
from ddp_kit.pool.other_hosts import OtherHosts
from ddp_kit.pool.rank import torchrun_environment, torchrun_worker
from ddp_kit.pool.result import Reports
from ddp_kit.pool.wire import torchrun_store
from ddp_kit.pool.wire.torchrun_store import Answer, RemoteReport, Sign, decode, encode
from ddp_kit.trace import Board, Snapshot
from ddp_kit.trace.board import Head


class Far:
    """The store as the observers of ranks 2 and 3, on host 1, see it, and the notebook's view."""

    def __init__(self):
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        at = "127.0.0.1", self.server.port
        self.store = torchrun_store.connect(*at, seconds=10)
        self.hosts = OtherHosts(*at, 2, 2)
        self.signs = {2: 0, 3: 0}

    def sign(self, rank, shown=True, **head):
        self.signs[rank] += 1
        sign = Sign(self.signs[rank], shown, Head(**{"run": 1} | head))
        self.store.set(f"sign {rank}", encode(sign))
        self.arrive()

    def show(self, rank, board):
        self.store.set(f"board {rank}", encode(board.read()))
        self.sign(rank, **board.head()._asdict())

    def end(self, rank, how, report=None):
        if report is not None:
            self.store.set(f"report {rank}", encode(report))
        self.store.append("ends", f"{rank} {how}\n")
        self.arrive()
        self.hosts.look()

    def arrive(self):
        """Wait until the store has what was written: set and append return without an answer."""
        self.store.num_keys()

    def error(self):
        return self.hosts.error(Reports())


@pytest.fixture
def far():
    return Far()


def waiting_board(line="", rows=1):
    board = Board()
    board.begin(1, 5)
    board.add_text(["group", "world", [0, 1, 2, 3]])
    call = ["call", "recv", "recv", "recv", 1, None, "float32", [], [[1]], [], "", 4, "cpu", []]
    what = board.add_text(call)
    where = board.add_text(["line", __file__, 1, "worker", line])
    for _ in range(rows):
        index = board.post((what, where, 0, 0, 0), -1, 0, 7)
    board.begin_wait(index, 8, limited=False, shown=True)
    return board


def test_what_is_sent_arrives_as_it_was():
    board = waiting_board().read()
    assert decode(encode(board)) == board
    sign, answer = Sign(3, True, board.head), Answer(4, 0.5, STACKS)
    assert decode(encode(sign)) == sign
    assert decode(encode(answer)) == answer


@pytest.mark.parametrize("rows", [10, settings.EVENTS_KEPT + 10])
def test_a_board_travels_with_its_newest_events(rows):
    board = waiting_board(rows=rows).read()
    kept = Snapshot(2, torchrun_store.newest(board, 3))
    assert [event.index for event in kept.events] == [rows - 3, rows - 2, rows - 1]
    assert kept.waiting == Snapshot(2, board).waiting
    earlier = board._replace(head=board.head._replace(waiting=rows - 5))
    first = Snapshot(2, torchrun_store.newest(earlier, 3))
    assert first.waiting.index == rows - 5


def test_a_rank_whose_board_is_out_of_date_seems_to_move(far):
    board = waiting_board()
    far.sign(2, shown=False, moves=board.head().moves, waiting=0)
    far.hosts.look()
    (remote, _) = far.hosts.boards
    first = remote.head()
    assert first.waiting == -1
    far.sign(2, shown=False, moves=board.head().moves, waiting=0)
    far.hosts.look()
    assert remote.head().moves != first.moves  # as if it moved all the time
    far.show(2, board)
    far.hosts.look()
    assert remote.head() == board.head()
    assert remote.read().rows == board.read().rows
    far.sign(2, **board.head()._replace(moves=99)._asdict())
    far.hosts.look()
    assert Snapshot(2, remote.read()).waiting is None


def test_a_line_that_only_the_notebook_can_read_is_added(far):
    far.show(2, waiting_board(line=""))
    far.hosts.look()
    where = Snapshot(2, far.hosts.boards[0].read()).waiting.where
    assert where.source.startswith('"""What the notebook concludes')


LIBRARY = Frame(threading.__file__, 2, "run", "", own=False)
STACKS = [[Frame(__file__, 1, "worker", "recv()", own=True), LIBRARY]]


def test_a_library_of_another_host_is_that_of_this_one(monkeypatch):
    there = replace(LIBRARY, file="/elsewhere/python/threading.py")
    with monkeypatch.context() as patched:
        patched.setattr(torchrun_store, "_NAMES", {"/elsewhere/python": "<stdlib>"})
        sent = encode(Answer(7, 1.0, [[STACKS[0][0], there]]))
    assert decode(sent).stacks == STACKS


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(7, 60.0, STACKS), [STACKS]),
        (Answer(8, 60.0, STACKS), None),
        (Answer(7, 0.0, STACKS), None),
        (None, None),
    ],
    ids=["waits", "has moved", "has just moved", "does not answer"],
)
def test_only_a_rank_that_has_not_moved_is_called_stuck(answer, found, far, monkeypatch):
    monkeypatch.setattr(settings, "HOSTS_CONFIRM_WITHIN", 0.1 if answer is None else 60)
    far.sign(2, moves=7)
    far.hosts.look()
    if answer is not None:
        far.store.set("answer 1 2", encode(answer))
    assert far.hosts.ask_for_stacks([2]) == found


def test_a_host_that_gives_no_more_signs_is_lost(far, monkeypatch):
    monkeypatch.setattr(settings, "HOST_LOST_AFTER", 0.2)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        far.sign(2)
        far.hosts.look()
        time.sleep(0.02)
    assert far.hosts.failed == 0
    while far.hosts.failed == 0:
        assert time.monotonic() < deadline + 10
        far.hosts.look()
        time.sleep(0.02)
    assert isinstance(far.error(), PoolError)
    assert str(far.error()).startswith("host 1 (ranks 2 and 3) has not answered for 0.2 s")


def test_a_rank_has_given_a_sign_when_its_worker_begins(far, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(far.server.port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(builtins, "display", None, raising=False)  # it is put back
    monkeypatch.setattr(Board, "answer_with_stacks", lambda board: None)
    monkeypatch.setattr(torchrun_worker, "Observer", Mock())  # one that has not begun yet
    monkeypatch.setattr(torchrun_environment, "end_with_agent", lambda: None)
    monkeypatch.setattr(torchrun_environment, "rank_info", Mock())
    far.store.set(torchrun_store.OVER, "")

    def call(rank, world_size):
        return torchrun_environment.own_store().check([f"sign {rank}"]), None

    torchrun_worker._run_elsewhere(torchrun_worker.pack(SimpleNamespace(call=call)), 2)
    assert pickle.loads(decode(far.store.get("report 2")).value) is True


def test_the_reason_is_the_rank_that_failed_by_itself(far):
    cut, raised = RankFailure(2, "RuntimeError", "closed"), RankFailure(3, "ValueError", "boom")
    far.end(2, "cut", RemoteReport(failure=cut))
    assert far.hosts.unfinished == [3]
    assert far.error().failures == {2: cut}
    far.end(3, "raised", RemoteReport(failure=raised))
    error = far.error()
    assert isinstance(error, RankError)
    assert error.failures == {3: raised}
    assert far.hosts.unfinished == []


def test_the_rank_that_died_is_named_and_not_the_one_that_torchrun_ended(far):
    far.end(2, "terminated")
    far.end(3, "died")
    error = far.error()
    assert isinstance(error, RankDiedError)
    assert (error.rank, error.host) == (3, 1)
    assert pickle.loads(pickle.dumps(error)).host == 1


def test_the_end_of_torchrun_on_this_host_is_reported(far):
    far.sign(2)
    far.hosts.look()
    del far.server
    deadline = time.monotonic() + 10
    while far.hosts.failed == 0:
        assert time.monotonic() < deadline
        far.hosts.look()
    assert str(far.error()) == (
        "torchrun has ended on this host before ranks 2 and 3 on other hosts had returned; "
        "try again"
    )


def test_a_store_that_is_gone_is_reported(monkeypatch):
    monkeypatch.setattr(settings, "STORE_ANSWERS_WITHIN", 1)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    del server
    with pytest.raises(PoolError, match=f"torchrun's store at 127.0.0.1:{port} does not answer"):
        OtherHosts("127.0.0.1", port, 2, 2)
