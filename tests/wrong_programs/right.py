"""Right programs, made of the same calls as the wrong ones."""

from __future__ import annotations

from calls import ALL, COLLECTIVES, FORMS, REDUCE, REDUCING, ROOTED, ROOTED_OBJECT, WITH_TENSORS
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

GROUPS = [
    *each(
        ALL,
        "${name}_in_overlapping_groups",
        "group",
        "Ranks 0 and 1 call $name in one group, then ranks 1 and 2 in another.",
        NONE,
        3,
        """
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        world_size = 2
        for first, group in enumerate(groups):
            if rank in (first, first + 1):
                $setup
                $in_pair
        """,
    ),
    *each(
        COLLECTIVES,
        "${name}_in_two_groups_at_once",
        "group",
        "$name runs in two groups of the same ranks at once; rank 1 starts them in other order.",
        NONE,
        2,
        """
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        works = []
        for group in groups if rank == 0 else groups[::-1]:
            $setup
            works.append($async_in_group)
        for work in works:
            work.wait()
        """,
    ),
]

MESSAGES = [
    *each(
        FORMS,
        "${name}_in_a_ring",
        "message matching",
        "Even ranks send first, odd ones receive first.",
        NONE,
        4,
        """
        tensor, after, before = torch.ones(4), (rank + 1) % world_size, (rank - 1) % world_size
        for turn in range(2):
            if turn == rank % 2:
                peer = after
                $send
            else:
                peer = before
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_between_two_collectives",
        "message matching",
        "Messages go forth and back between two barriers.",
        NONE,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        dist.barrier()
        for sender in (0, 1, 1, 0):
            if rank == sender:
                $send
            else:
                $recv
        dist.barrier()
        """,
    ),
    *each(
        FORMS,
        "${name}_with_many_tags",
        "tag",
        "Every message has a tag of its own, and both ranks know the order.",
        NONE,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        for tag in (5, 3, 1000, 0):
            if rank == 0:
                $tagged_send
            else:
                $tagged_recv
        """,
    ),
    *each(
        FORMS,
        "${name}_of_many_sizes",
        "count and shape",
        "The size changes from message to message, also to no numbers at all.",
        NONE,
        2,
        """
        peer = 1 - rank
        for size in (1, 0, 1000, 3):
            tensor = torch.ones(size)
            if rank == 0:
                $send
            else:
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_into_another_shape",
        "count and shape",
        "Rank 0 sends the shape (2, 3), and rank 1 receives into (6,).",
        NONE,
        2,
        """
        tensor, peer = torch.ones(2, 3), 1 - rank
        if rank == 0:
            $send
        else:
            tensor = torch.zeros(6)
            $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_inside_a_group",
        "group",
        "Ranks 1 and 2 exchange a message in their group, rank 0 is no member.",
        NONE,
        3,
        """
        group = dist.new_group([1, 2])
        tensor, peer = torch.ones(4), 3 - rank
        if rank == 1:
            $send_in_group
        elif rank == 2:
            $recv_in_group
        """,
    ),
    *each(
        FORMS,
        "${name}_to_the_last_rank",
        "peer",
        "Every rank sends to the last one.",
        NONE,
        4,
        """
        tensor = torch.ones(4)
        if rank < world_size - 1:
            peer = world_size - 1
            $send
        else:
            for peer in range(world_size - 1):
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_collected_from_any_source",
        "message race",
        "Rank 0 takes messages as they come, and replies to each sender.",
        NONE,
        4,
        """
        tensor, peer = torch.ones(4), 0
        if rank == 0:
            for _ in range(world_size - 1):
                peer = dist.recv(tensor)
                $send
        else:
            $send
            $recv
        """,
    ),
]

PROGRAMS = [
    *MATCHING,
    *INPUT_DEPENDENT,
    *ROOT,
    *OP,
    *DTYPE,
    *SHAPE,
    *WAITS,
    *GROUPS,
    *MESSAGES,
]
