"""Objects that travel, coalesced calls, stores, and barriers."""

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

STORE = "store = dist.distributed_c10d._get_default_store()"
STORES = [
    program(
        "key_that_nobody_sets",
        "stores and barriers",
        "Rank 1 gets a key that rank 0 never sets.",
        DEADLOCK,
        2,
        f"""
        {STORE}
        if rank == 1:
            store.get("address")  # fault: 1
        """,
    ),
    program(
        "key_that_is_misspelled",
        "stores and barriers",
        "Rank 0 sets 'adress', rank 1 waits for 'address'.",
        DEADLOCK,
        2,
        f"""
        {STORE}
        if rank == 0:
            store.set("adress", "here")
        else:
            store.wait(["address"])  # fault: 1
        """,
    ),
    program(
        "keys_that_wait_for_each_other",
        "stores and barriers",
        "Each rank waits for the other's key before it sets its own.",
        DEADLOCK,
        2,
        f"""
        {STORE}
        store.wait([f"ready_{{1 - rank}}"])  # fault: all
        store.set(f"ready_{{rank}}", "yes")
        """,
    ),
    program(
        "key_set_after_the_barrier",
        "stores and barriers",
        "Rank 1 gets a key before the barrier, and rank 0 sets it after the barrier.",
        DEADLOCK,
        2,
        f"""
        {STORE}
        if rank == 1:
            store.get("address")  # fault: 1
        dist.barrier()  # fault: 0
        if rank == 0:
            store.set("address", "here")
        """,
    ),
    program(
        "key_awaited_with_a_time_limit",
        "stores and barriers",
        "Rank 1 waits at most 2 s for a key that nobody sets.",
        DEADLOCK,
        2,
        f"""
        from datetime import timedelta
        {STORE}
        if rank == 1:
            store.wait(["address"], timedelta(seconds=2))  # fault: 1
        """,
        seconds=2,
    ),
    program(
        "counter_polled_for_one_rank_too_many",
        "stores and barriers",
        "Both ranks poll a counter until it is 3, but there are 2 ranks.",
        DEADLOCK,
        2,
        f"""
        import time
        {STORE}
        store.add("arrived", 1)
        while store.add("arrived", 0) < 3:  # fault: all
            time.sleep(0.05)
        """,
        unseen="a loop over short calls may end: nothing says what it waits for",
    ),
    program(
        "flag_file_polled",
        "stores and barriers",
        "Rank 1 waits for a file that rank 0 never writes.",
        DEADLOCK,
        2,
        """
        import os, tempfile, time
        flag = os.path.join(tempfile.gettempdir(), "a-flag-that-nobody-writes")
        while rank == 1 and not os.path.exists(flag):  # fault: 1
            time.sleep(0.05)
        """,
        unseen="a loop that computes may end: nothing says what it waits for",
    ),
    program(
        "monitored_barrier_skipped",
        "stores and barriers",
        "Rank 1 never comes to the monitored_barrier, which gives up after 2 s.",
        DEADLOCK,
        2,
        """
        from datetime import timedelta
        if rank == 0:
            dist.monitored_barrier(timeout=timedelta(seconds=2))  # fault: 0; absent: 1
        """,
        seconds=2,
    ),
    program(
        "barrier_against_monitored_barrier",
        "stores and barriers",
        "Rank 0 calls barrier where rank 1 calls monitored_barrier.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            dist.barrier()  # fault: 0
        else:
            dist.monitored_barrier()  # fault: 1
        """,
    ),
    program(
        "barrier_in_a_branch_of_rank_0",
        "stores and barriers",
        "The barrier after saving is inside the branch of rank 0.",
        DEADLOCK,
        3,
        """
        state = {"weight": torch.ones(3)}
        if rank == 0:
            total = sum(tensor.sum() for tensor in state.values())
            dist.barrier()  # fault: 0; absent: 1, 2
        """,
    ),
    program(
        "barrier_skipped_by_an_early_return",
        "stores and barriers",
        "Rank 2 has no work, and returns before the barrier.",
        DEADLOCK,
        3,
        """
        work = list(range(2))[rank : rank + 1]
        if not work:
            return
        dist.barrier()  # fault: 0, 1; absent: 2
        """,
    ),
    program(
        "second_barrier_in_a_handler",
        "stores and barriers",
        "Rank 0 calls the barrier again while it handles its own error.",
        DEADLOCK,
        2,
        """
        try:
            dist.barrier()
            if rank == 0:
                raise ValueError("bad sample")
        except ValueError:
            dist.barrier()  # fault: 0; absent: 1
        """,
    ),
    program(
        "error_hidden_by_a_barrier_in_finally",
        "stores and barriers",
        "Rank 1 raises a KeyError, and its finally waits in a barrier that rank 0 has passed.",
        MISMATCH,
        2,
        """
        try:
            if rank == 1:
                {}["missing"]
            dist.all_reduce(torch.ones(2))  # fault: 0
        finally:
            dist.barrier()  # fault: 1
        """,
    ),
]

PROGRAMS = [*OBJECTS, *COALESCED, *STORES]
