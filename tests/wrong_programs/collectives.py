"""Collectives that ranks skip, repeat, swap, or call with different arguments."""

from __future__ import annotations

from calls import ALL, BARRIER, REDUCE, REDUCING, ROOTED, ROOTED_OBJECT, UNROOTED, WITH_TENSORS
from program import DEADLOCK, MISMATCH, each, fill, program

MATCHING = [
    *each(
        ALL,
        "${name}_skipped_by_rank_0",
        "call matching",
        "Rank 0 never calls $name, and rank 1 waits for it.",
        DEADLOCK,
        2,
        """
        $setup
        if rank == 1:
            $call  # fault: 1; absent: 0
        """,
    ),
    *each(
        ALL,
        "${name}_skipped_by_rank_1",
        "call matching",
        "Rank 1 never calls $name, and rank 0 waits for it.",
        DEADLOCK,
        2,
        """
        $setup
        if rank == 0:
            $call  # fault: 0; absent: 1
        """,
    ),
    *each(
        ALL,
        "${name}_repeated_by_rank_0",
        "call matching",
        "Rank 0 calls $name once more than rank 1.",
        DEADLOCK,
        2,
        """
        $setup
        $call
        if rank == 0:
            $call  # fault: 0; absent: 1
        """,
    ),
    *each(
        [call for call in ALL if call is not BARRIER],
        "${name}_swapped_with_barrier",
        "call matching",
        "Rank 0 calls $name before the barrier, rank 1 after it.",
        MISMATCH,
        2,
        """
        $setup
        if rank == 0:
            $call  # fault: 0
            dist.barrier()
        else:
            dist.barrier()  # fault: 1
            $call
        """,
    ),
    *each(
        UNROOTED,
        "${name}_in_a_shorter_loop",
        "call matching",
        "Rank 1 makes one step less than the others.",
        DEADLOCK,
        3,
        """
        $setup
        for _ in range(3 - (rank == 1)):
            $call  # fault: 0, 2; absent: 1
        """,
    ),
    *(
        program(
            f"{one.name}_against_{other.name}",
            "call matching",
            f"Rank 0 calls {one.name} where rank 1 calls {other.name}.",
            MISMATCH,
            2,
            fill("if rank == 0:\n    $setup\n    $call  # fault: 0\n", one.fields)
            + fill("else:\n    $setup\n    $call  # fault: 1\n", other.fields),
        )
        for one, other in zip(ALL, [*ALL[1:], ALL[0]], strict=True)
    ),
]

INPUT_DEPENDENT = [
    *each(
        [*UNROOTED, ROOTED[0]],
        "${name}_skipped_if_the_loss_is_nan",
        "input-dependent matching",
        "The loss of rank 1 is not a number, so it leaves the loop before $name.",
        DEADLOCK,
        2,
        """
        $setup
        losses = [[2.0, 1.0, 0.5], [2.0, float("nan"), 0.5]][rank]
        for loss in losses:
            if loss != loss:
                break
            $call  # fault: 0; absent: 1
        """,
    ),
    *each(
        UNROOTED[:4],
        "${name}_skipped_for_an_empty_batch",
        "input-dependent matching",
        "Rank 2 has no batch in the last step, and continues without $name.",
        DEADLOCK,
        3,
        """
        $setup
        for batch in torch.arange(8).split(3):
            if rank < len(batch):
                $call  # fault: 0, 1; absent: 2
        """,
    ),
    *each(
        [UNROOTED[0], BARRIER, ROOTED[0]],
        "${name}_not_called_with_other_data",
        "input-dependent matching",
        "A rank whose data is all negative would skip $name, but here none is.",
        DEADLOCK,
        2,
        """
        $setup
        data = torch.arange(4) - rank
        if data.max() > 0:
            $call  # fault: all
        """,
        unseen="no rank takes the wrong branch in this run",
    ),
    program(
        "early_stopping_by_the_own_loss",
        "input-dependent matching",
        "Each rank stops when its own loss is small, so rank 0 stops first.",
        DEADLOCK,
        2,
        """
        loss = torch.tensor(1.0 + rank)
        while loss > 0.5:
            loss = loss / 2
            mean = loss.clone()
            dist.all_reduce(mean)  # fault: 1; absent: 0
        """,
    ),
    program(
        "exception_swallowed_before_all_reduce",
        "input-dependent matching",
        "Rank 1 fails on its data, ignores that, and so skips the all_reduce.",
        DEADLOCK,
        2,
        """
        data = [["1", "2"], ["3", "four"]][rank]
        for text in data:
            try:
                tensor = torch.tensor(int(text))
                dist.all_reduce(tensor)  # fault: 0; absent: 1
            except ValueError:
                continue
        """,
    ),
]

ROOT = each(
    [*ROOTED, *ROOTED_OBJECT],
    "${name}_with_two_roots",
    "root",
    "Each rank believes that it is the root of $name.",
    MISMATCH,
    2,
    """
    $setup
    root = rank
    $root  # fault: all
    """,
)

OP = [
    *each(
        [*REDUCING, REDUCE],
        "${name}_with_sum_and_max",
        "op",
        "Rank 1 asks $name for MAX, the others for SUM.",
        MISMATCH,
        3,
        """
        $setup
        if rank == 1:
            $as_max  # fault: 1
        else:
            $call  # held up: 0, 2
        """,
    ),
    *each(
        [*REDUCING, REDUCE],
        "${name}_with_avg_on_one_rank",
        "op",
        "Rank 0 asks $name for AVG, rank 1 for SUM.",
        MISMATCH,
        2,
        """
        $setup
        op = dist.ReduceOp.AVG if rank == 0 else dist.ReduceOp.SUM
        $with_op  # fault: all
        """,
    ),
]

DTYPE = [
    *each(
        WITH_TENSORS,
        "${name}_of_float_and_double",
        "dtype",
        "Rank 0 has float32, rank 1 float64.",
        MISMATCH,
        2,
        """
        dtype = torch.float32 if rank == 0 else torch.float64
        $typed
        $call  # fault: all
        """,
    ),
    *each(
        WITH_TENSORS[::2],
        "${name}_of_float_and_int",
        "dtype",
        "Rank 0 has float32, rank 1 int32: as many bytes, so $name ends with wrong numbers.",
        MISMATCH,
        2,
        """
        dtype = torch.float32 if rank == 0 else torch.int32
        $typed
        $call  # fault: all
        """,
    ),
]

SHAPE = [
    *each(
        WITH_TENSORS,
        "${name}_of_4_and_5",
        "count and shape",
        "Rank 0 has 4 numbers for each rank, rank 1 has 5.",
        MISMATCH,
        2,
        """
        count = 4 + rank
        $sized
        $call  # fault: all
        """,
    ),
    *each(
        [WITH_TENSORS[0], WITH_TENSORS[3], ROOTED[0]],
        "${name}_of_a_last_smaller_batch",
        "count and shape",
        "The last batch of rank 2 is smaller than those of the others.",
        MISMATCH,
        3,
        """
        batches = [8, 8, 8 - 4 * (rank == 2)]
        for count in batches:
            $sized
            $call  # fault: 2; held up: 0, 1
        """,
    ),
    program(
        "all_to_all_single_with_splits_that_do_not_fit",
        "count and shape",
        "Rank 0 sends two rows to rank 1, which expects one.",
        MISMATCH,
        2,
        """
        sent, received = torch.ones(4 + rank), torch.ones(4)
        here, there = [[2, 2], [2, 3]][rank], [[2, 2], [1, 3]][rank]
        dist.all_to_all_single(received, sent, there, here)  # fault: all
        """,
    ),
]

PROGRAMS = [*MATCHING, *INPUT_DEPENDENT, *ROOT, *OP, *DTYPE, *SHAPE]
