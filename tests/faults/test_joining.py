"""A rank of `kit.torchrun` that never communicates ends while others still connect to it."""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from processes import BOUND

from ddp_kit.launch.rank import torchrun_worker

N = 6
TRIES = 200  # with one failure in fifty tries, all of them would pass in 2 % of the runs


def join_and_leave(rank, file):
    """Join a group as a rank of `kit.torchrun` does, and end at once."""
    patience = timedelta(seconds=BOUND)

    def join_group(backend, timeout):
        store = dist.FileStore(file, N)
        dist.init_process_group(backend, None, patience, N, rank, store)

    torchrun_worker.environment.join_group = join_group
    torchrun_worker._join("gloo", patience)
    torchrun_worker._leave_group()


@pytest.mark.skipif(sys.platform != "linux", reason="1,200 processes are quick only if forked")
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_ends_at_once_breaks_the_connections_of_others(tmp_path):
    """Without the all_reduce in `_join`, a try in fifty fails here: Connection closed by peer."""
    context = multiprocessing.get_context("forkserver")
    for number in range(TRIES):
        file = str(tmp_path / f"store{number}")
        ranks = [context.Process(target=join_and_leave, args=(rank, file)) for rank in range(N)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(2 * BOUND)
        assert [rank.exitcode for rank in ranks] == [0] * N, number
