"""Init methods: what each rendezvous that fails says."""

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


def words(pool, *case):
    """Return what each rank says."""
    with pytest.raises(kit.RankError) as caught:
        pool.run(init_methods.attempt, *case)
    return {rank: failure.message for rank, failure in caught.value.failures.items()}


def test_a_rendezvous_that_fails_says_what_the_lessons_table_has(tmp_path):
    here = [f"tcp://127.0.0.1:{port}" for port in init_methods.free_ports(3)]
    with kit.WorkerPool(2, init=False) as pool, socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for rank, fragment, *case in (
            (0, "Wait timeout", f"file://{tmp_path}/alone", [(0, 2, 1), None]),
            (1, "Wait timeout", f"file://{tmp_path}/twice", [(0, 2, 1), (0, 2, 1)]),
            (1, "ait timeout", f"file://{tmp_path}/size", [(0, 2, 30), (1, 3, 3)]),
            (0, "clients joined", here[0], [(0, 2, 1), None]),
            (1, "trying to connect to", here[1], [None, (1, 2, 1)]),
            (1, "EADDRINUSE", here[2], [(0, 2, 30), (0, 2, 30)], 5.0),
            (0, "EADDRINUSE", taken, [(0, 2, 30), (1, 2, 30)]),
        ):
            assert fragment in words(pool, *case)[rank]


def test_the_file_of_a_killed_run_has_addresses_where_nobody_is(tmp_path):
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
        said = words(pool, f"file://{path}", [(0, 2, 0.5), None])[0]
    assert "onnect" in said  # "Connection refused" or "Connect timeout"


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


@pytest.mark.parametrize(
    ("message", "shown"),
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
def test_words_that_differ_from_run_to_run(message, shown):
    assert init_methods.own_words(message) == shown


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
