"""Right programs, made of the same collectives as the wrong ones."""

from __future__ import annotations

from calls import ALL, COLLECTIVES, REDUCE, REDUCING, ROOTED, ROOTED_OBJECT, WITH_TENSORS
from program import NONE, each, program

MATCHING = [
    *each(
        ALL,
        "${name}_by_all",
        "call matching",
        "All ranks call $name.",
        NONE,
        3,
        """
        $setup
        $call
        """,
    ),
    *each(
        ALL,
        "${name}_from_two_lines",
        "call matching",
        "All ranks call $name, rank 0 from another line than the others.",
        NONE,
        2,
        """
        $setup
        if rank == 0:
            $call
        else:
            $call
        """,
    ),
    *each(
        ALL,
        "${name}_between_barriers",
        "call matching",
        "Other collectives come before and after $name, in the same order on all ranks.",
        NONE,
        2,
        """
        $setup
        for _ in range(3):
            dist.barrier()
            $call
            dist.all_reduce(torch.ones(2))
        """,
    ),
]

INPUT_DEPENDENT = each(
    COLLECTIVES,
    "${name}_skipped_by_all",
    "input-dependent matching",
    "The ranks agree on the largest loss first, so all of them skip $name in the same step.",
    NONE,
    2,
    """
    $setup
    for step in range(3):
        loss = torch.tensor([[1.0, 5.0, 1.0], [1.0, 1.0, 1.0]][rank][step])
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)
        if loss < 4:
            $call
    """,
)

ROOT = each(
    [*ROOTED, *ROOTED_OBJECT],
    "${name}_with_changing_roots",
    "root",
    "Each rank is the root of $name once.",
    NONE,
    3,
    """
    $setup
    for root in range(world_size):
        $root
    """,
)

OP = [
    *each(
        [*REDUCING, REDUCE],
        "${name}_with_max_on_all_ranks",
        "op",
        "All ranks ask $name for MAX.",
        NONE,
        2,
        """
        $setup
        $as_max
        """,
    ),
    *each(
        [*REDUCING, REDUCE],
        "${name}_with_changing_ops",
        "op",
        "The op changes from call to call, on all ranks alike.",
        NONE,
        2,
        """
        $setup
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.AVG):
            $with_op
        """,
    ),
]

DTYPE = each(
    WITH_TENSORS,
    "${name}_of_many_dtypes",
    "dtype",
    "The dtype changes from call to call, on all ranks alike.",
    NONE,
    2,
    """
    for dtype in (torch.float64, torch.int32, torch.uint8, torch.float16):
        $typed
        $call
    """,
)

SHAPE = [
    *each(
        WITH_TENSORS,
        "${name}_of_many_sizes",
        "count and shape",
        "The size changes from call to call, on all ranks alike.",
        NONE,
        2,
        """
        for count in (1, 1000, 7):
            $sized
            $call
        """,
    ),
    *each(
        [call for call in WITH_TENSORS if call.name in ("all_reduce", "broadcast")],
        "${name}_of_as_many_numbers_in_another_shape",
        "count and shape",
        "Rank 0 has the shape (4,), rank 1 (2, 2): PyTorch asks for as many numbers only.",
        NONE,
        2,
        """
        $setup
        if rank == 1:
            tensor = tensor.view(2, 2)
        $call
        """,
    ),
    program(
        "scalar_and_one_number",
        "count and shape",
        "Rank 0 reduces a scalar, rank 1 a tensor of one number.",
        NONE,
        2,
        """
        tensor = torch.tensor(1.0) if rank == 0 else torch.ones(1)
        dist.all_reduce(tensor)
        """,
    ),
    program(
        "all_to_all_single_with_uneven_splits",
        "count and shape",
        "What a rank sends fits what the other expects, although no two splits are equal.",
        NONE,
        2,
        """
        here, there = [[1, 2], [3, 4]][rank], [[1, 3], [2, 4]][rank]
        sent, received = torch.ones(sum(here)), torch.zeros(sum(there))
        dist.all_to_all_single(received, sent, there, here)
        """,
    ),
]

WAITS = [
    *each(
        COLLECTIVES,
        "${name}_waited_for_later",
        "missing wait",
        "$name is started, the rank computes, then it waits.",
        NONE,
        2,
        """
        $setup
        work = $async_
        torch.ones(50, 50).matmul(torch.ones(50, 50))
        work.wait()
        """,
    ),
    *each(
        COLLECTIVES,
        "${name}_waited_for_in_any_order",
        "missing wait",
        "Three operations run at once; the ranks wait for them in different orders.",
        NONE,
        2,
        """
        works = []
        for _ in range(3):
            $setup
            works.append($async_)
        for work in works if rank == 0 else works[::-1]:
            work.wait()
        """,
    ),
    *each(
        COLLECTIVES[::3],
        "${name}_polled_until_it_is_done",
        "waits without wait()",
        "Both ranks poll $name, then wait.",
        NONE,
        2,
        """
        $setup
        work = $async_
        while not work.is_completed():
            pass
        work.wait()
        """,
    ),
]

PROGRAMS = [*MATCHING, *INPUT_DEPENDENT, *ROOT, *OP, *DTYPE, *SHAPE, *WAITS]
