"""Objects that travel, and coalesced calls."""

from __future__ import annotations

from program import DEADLOCK, MISMATCH, RAISED, UNAWAITED, program

OBJECTS = [
    program(
        "object_lists_of_other_lengths",
        "object collectives",
        "Rank 0 broadcasts two objects, and rank 1 has room for one.",
        MISMATCH,
        2,
        """
        objects = ["a", "b"] if rank == 0 else [None]
        dist.broadcast_object_list(objects, src=0)  # fault: all
        """,
    ),
    program(
        "send_object_list_of_another_length",
        "object collectives",
        "Rank 0 sends two objects, and rank 1 has room for one.",
        MISMATCH,
        2,
        """
        if rank == 0:
            dist.send_object_list(["a", "b"], 1)  # fault: 0
        else:
            dist.recv_object_list([None], 0)  # fault: 1
        """,
    ),
    program(
        "send_object_list_that_nobody_receives",
        "object collectives",
        "Rank 1 returns without receiving the objects.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            dist.send_object_list(["a"], 1)  # fault: 0; absent: 1
        """,
    ),
    program(
        "recv_object_list_that_nobody_sends",
        "object collectives",
        "Rank 0 returns without sending the objects.",
        DEADLOCK,
        2,
        """
        if rank == 1:
            dist.recv_object_list([None], 0)  # fault: 1; absent: 0
        """,
    ),
    program(
        "object_received_as_a_tensor",
        "object collectives",
        "Rank 0 sends an object, which is two messages, and rank 1 receives one tensor.",
        MISMATCH,
        2,
        """
        if rank == 0:
            dist.send_object_list([1.0], 1)  # fault: 0
        else:
            dist.recv(torch.zeros(1), 0)  # fault: 1
        """,
    ),
    program(
        "object_that_cannot_be_pickled",
        "object collectives",
        "Rank 1 gathers a lock, which cannot be pickled.",
        RAISED,
        2,
        """
        import threading
        mine = threading.Lock() if rank == 1 else "fine"
        dist.all_gather_object([None, None], mine)  # fault: 1; held up: 0
        """,
    ),
    program(
        "objects_gathered_into_a_short_list",
        "object collectives",
        "The list has no room for the object of the last rank.",
        RAISED,
        3,
        """
        dist.all_gather_object([None, None], rank)  # fault: all
        """,
    ),
    program(
        "scatter_object_list_of_too_few",
        "object collectives",
        "Rank 0 has one object for two ranks.",
        RAISED,
        2,
        """
        objects = ["a"] if rank == 0 else None
        dist.scatter_object_list([None], objects, src=0)  # fault: 0; held up: 1
        """,
    ),
    program(
        "scatter_object_list_into_nothing",
        "object collectives",
        "Rank 1 has no room for its object.",
        RAISED,
        2,
        """
        mine = [None] if rank == 0 else []
        dist.scatter_object_list(mine, ["a", "b"], src=0)  # fault: 1; held up: 0
        """,
    ),
    program(
        "object_and_tensor_gathered",
        "object collectives",
        "Rank 0 gathers objects, rank 1 tensors.",
        MISMATCH,
        2,
        """
        if rank == 0:
            dist.all_gather_object([None, None], rank)  # fault: 0
        else:
            parts = [torch.zeros(3), torch.zeros(3)]
            dist.all_gather(parts, torch.ones(3))  # fault: 1
        """,
    ),
    program(
        "configuration_read_by_rank_0_only",
        "object collectives",
        "Only rank 0 takes part in the broadcast of its configuration.",
        DEADLOCK,
        3,
        """
        options = [None]
        if rank == 0:
            options = [{"lr": 0.1}]
            dist.broadcast_object_list(options, src=0)  # fault: 0; absent: 1, 2
        """,
    ),
]

COALESCED = [
    program(
        "coalesced_all_reduce_skipped",
        "coalesced calls",
        "Rank 1 never calls all_reduce_coalesced.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])  # fault: 0; absent: 1
        """,
    ),
    program(
        "coalesced_all_reduce_of_other_lists",
        "coalesced calls",
        "Rank 1 reduces one tensor less.",
        MISMATCH,
        2,
        """
        tensors = [torch.ones(2) for _ in range(3 - rank)]
        dist.all_reduce_coalesced(tensors)  # fault: all
        """,
    ),
    program(
        "coalesced_all_reduce_of_other_shapes",
        "coalesced calls",
        "The second tensor has 3 numbers on rank 0 and 4 on rank 1.",
        MISMATCH,
        2,
        """
        tensors = [torch.ones(2), torch.ones(3 + rank)]
        dist.all_reduce_coalesced(tensors)  # fault: all
        """,
    ),
    program(
        "coalesced_all_reduce_of_other_dtypes",
        "coalesced calls",
        "The tensors are float32 on rank 0 and int32 on rank 1.",
        MISMATCH,
        2,
        """
        dtype = [torch.float32, torch.int32][rank]
        dist.all_reduce_coalesced([torch.ones(2, dtype=dtype)])  # fault: all
        """,
    ),
    program(
        "coalesced_all_reduce_with_other_ops",
        "coalesced calls",
        "Rank 0 asks for the sum, rank 1 for the product.",
        MISMATCH,
        2,
        """
        op = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT][rank]
        dist.all_reduce_coalesced([torch.ones(2)], op=op)  # fault: all
        """,
    ),
    program(
        "coalesced_all_reduce_never_waited_for",
        "coalesced calls",
        "Nobody waits for the coalesced all_reduce.",
        UNAWAITED,
        2,
        """
        dist.all_reduce_coalesced([torch.ones(2)], async_op=True)  # fault: all
        """,
    ),
    program(
        "coalesced_against_single_all_reduce",
        "coalesced calls",
        "Rank 0 reduces two tensors in one call, rank 1 in two calls.",
        MISMATCH,
        2,
        """
        tensors = [torch.ones(2), torch.ones(2)]
        if rank == 0:
            dist.all_reduce_coalesced(tensors)  # fault: 0
        else:
            for tensor in tensors:
                dist.all_reduce(tensor)  # fault: 1
        """,
    ),
    program(
        "coalesced_all_gather_skipped",
        "coalesced calls",
        "Rank 1 never calls all_gather_coalesced.",
        DEADLOCK,
        2,
        """
        tensors = [torch.ones(2), torch.ones(3)]
        parts = [[torch.zeros(2), torch.zeros(3)] for _ in range(world_size)]
        if rank == 0:
            dist.all_gather_coalesced(parts, tensors)  # fault: 0; absent: 1
        """,
    ),
]

PROGRAMS = [*OBJECTS, *COALESCED]
