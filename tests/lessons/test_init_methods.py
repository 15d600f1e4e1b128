"""Init methods: each rendezvous that fails is explained."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

import pytest
import torch

import ddp_kit as kit
from ddp_kit.lessons import init_methods

pytestmark = pytest.mark.usefixtures("forked_ranks")


def explained(pool, worker, *args):
    with pytest.raises(kit.RankError) as caught:
        pool.run(worker, *args)
    return init_methods.explain(caught.value)


def meaning(fragment):
    return "\n    ".join(init_methods.MEANINGS[fragment])


def test_each_rendezvous_that_fails_is_explained(tmp_path):
    here = [f"tcp://127.0.0.1:{port}" for port in init_methods.free_ports(3)]
    with kit.WorkerPool(2, init=False) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        explanations = [
            explained(pool, init_methods.attempt, *case)
            for case in (
                (f"file://{tmp_path}/alone", [(0, 2, 1), None]),
                (f"file://{tmp_path}/twice", [(0, 2, 1), (0, 2, 1)]),
                (f"file://{tmp_path}/size", [(0, 2, 30), (1, 3, 3)]),
                (here[0], [(0, 2, 1), None]),
                (here[1], [None, (1, 2, 1)]),
                (here[2], [(0, 2, 30), (0, 2, 30)], 5.0),
                (taken, [(0, 2, 30), (1, 2, 30)]),
            )
        ]
        assert explanations == [
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
    def killed(rank, world_size, path):
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size
        )
        torch.distributed.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # its process cleans up nothing
        torch.distributed.barrier()

    path = tmp_path / "met"
    with kit.WorkerPool(2, init=False) as pool:
        with pytest.raises(kit.RankDiedError):
            pool.run(killed, path)
        assert path.exists()
        explanation = explained(pool, init_methods.attempt, f"file://{path}", [(0, 2, 0.5), None])
    assert explanation == "rank 0: " + meaning("onnect")


def test_no_limit_of_the_group_holds_where_a_folder_is_missing(tmp_path):
    url = f"file://{tmp_path}/misspelt/met"
    with kit.WorkerPool(2, init=False) as pool, pytest.raises(kit.RunTimeoutError):
        pool.run(init_methods.attempt, url, [(0, 2, 0.5), (1, 2, 0.5)], timeout=3)


def test_own_address_is_one_on_which_this_process_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1].to_bytes(2, "big")
        written = {"key": b"before" + port + socket.inet_aton("127.0.0.1") + b"after"}
        assert init_methods.own_address(written) == "127.0.0.1:PORT"
        assert init_methods.own_address({"key": port}) == "nothing"
        assert init_methods.own_address({"key": socket.inet_aton("127.0.0.1")}) == "nothing"
    assert init_methods.own_address(written) != "127.0.0.1:PORT"


def failure(rank, message):
    return kit.RankFailure(rank, "RuntimeError", message)


def test_only_the_cause_is_explained_where_one_failure_brought_another():
    both = [failure(0, "Read error: Connection reset by peer"), failure(1, "Wait timeout")]
    explanation = init_methods.explain(kit.RankError(dict(enumerate(both))))
    assert explanation == "rank 1: " + meaning("Wait timeout")
    assert "rank 0: " in init_methods.explain(kit.RankError({0: both[0]}))
    unknown = init_methods.explain(kit.RankError({1: failure(1, "smoke at port 4711")}))
    assert unknown.startswith("rank 1: RuntimeError, which this lesson does not explain")
    assert "4711" not in unknown


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Wait timeout", "Wait timeout"),
        ("port: 20021, useIpv6: false, code: -98", "port: PORT, code: -98"),
        ("timed out after 1000ms (127.0.0.1, 45044).", "timed out after 1000ms (127.0.0.1, PORT)."),
        (
            "failed with [/src/gloo/pair.cc:152] refused, remote=[127.0.0.1]:19894$0",
            "failed with refused, remote=[127.0.0.1]:PORT",
        ),
    ],
)
def test_words_that_differ_from_run_to_run(message, words):
    assert init_methods.own_words(message) == words


def test_a_rendezvous_that_failed_does_not_count_in_the_next_run(tmp_path):
    """The keys contain the group's name, and the lesson reads them."""

    def fail(rank, world_size, path):
        if rank == 0:
            with suppress(RuntimeError):
                init_methods.attempt(0, 2, f"file://{path}", [(0, 2, 0.5), None])
        return torch.distributed.distributed_c10d._world.group_count

    with kit.WorkerPool(2, init=False) as pool:
        assert list(pool.run(fail, tmp_path / "one")) == [1, 0]
        assert list(pool.run(fail, tmp_path / "two")) == [1, 0]
