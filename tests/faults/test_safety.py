"""A run can be reached only by this user's own processes, and reaches nothing else."""

from __future__ import annotations

import os
import pickle
import re
import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_kit as kit
from ddp_kit.pool import pool as pool_module


def total(rank, world_size):
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor)
    return tensor.item()


def listening(rank, world_size):
    dist.all_reduce(torch.ones(1, device=kit.device()))
    pair = dist.new_group([0, 1])
    dist.barrier(pair)
    sockets = psutil.Process().net_connections("inet")
    return [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nccl opens no socket for a single GPU")
def test_ranks_on_gpus_listen_on_loopback_only():
    assert_listen_on_loopback("nccl", torch.cuda.device_count())


def test_ranks_listen_on_loopback_only_and_the_notebook_nowhere():
    before = set(psutil.Process().net_connections("inet"))
    assert_listen_on_loopback("gloo", 2)
    assert set(psutil.Process().net_connections("inet")) <= before


def assert_listen_on_loopback(backend, world_size):
    for addresses in kit.run(listening, world_size=world_size, backend=backend):
        assert addresses, "it listens somewhere; if not, this test looks at the wrong thing"
        assert set(addresses) <= {"127.0.0.1", "::1"}


def test_a_taken_port_stops_nobody(monkeypatch):
    """Ranks find each other through a file: the port that other launchers use may be taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with kit.WorkerPool(2) as pool:
            assert list(pool.run(total)) == [1, 1]


class Bomb:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


def test_nothing_is_unpickled_that_did_not_come_through_the_pools_pipe(tmp_path):
    """Plant a pickle where the rendezvous keeps files; run, fail and die beside it."""
    trace = tmp_path / "went-off"
    bomb = pickle.dumps(Bomb(str(trace)))
    kit.run(total, world_size=2)
    planted = Path(pool_module._shared["spawn"]._processes.folder.path, "bomb")
    planted.write_bytes(bomb)
    with pytest.raises(kit.RankDiedError):
        kit.run(lambda rank, world_size: rank or os._exit(1), world_size=2)
    kit.run(total, world_size=2)
    assert not trace.exists()
    planted.unlink()  # the pool leaves what is not its own, and with it the folder
    pickle.loads(bomb)
    assert trace.exists(), "the bomb itself works"


def test_no_process_is_ended_by_its_name():
    package = Path(kit.__file__).parent
    paths = set(package.rglob("*.py")) - set(package.glob("lessons/*.py"))  # they end nothing
    source = "".join(path.read_text() for path in paths)
    assert "os.kill" in source, "the kit ends processes somewhere"
    assert not re.findall(r"pkill|killall|pgrep|\.name\(\)", source)
