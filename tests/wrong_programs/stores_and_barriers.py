"""Stores, and barriers in branches, handlers and early exits."""

from __future__ import annotations

from program import DEADLOCK, MISMATCH, program

STORE = "store = dist.distributed_c10d._get_default_store()"
PROGRAMS = [
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
        MISMATCH,
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
