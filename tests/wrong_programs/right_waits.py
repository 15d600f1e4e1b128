"""Right programs that wait for futures, for keys of a store, and go on."""

from __future__ import annotations

import textwrap

from program import NONE, Program, program

STORE = "import time\nstore = dist.distributed_c10d._get_default_store()\n"


def waits(name: str, what: str, body: str, seconds: float = 2) -> Program:
    """Return a right program of two ranks that begins with STORE."""
    body = STORE + textwrap.dedent(body).strip("\n")
    return program(name, "waits without wait()", what, NONE, 2, body, seconds=seconds)


FUTURES = [
    waits(
        "future_of_a_late_all_reduce",
        "Rank 0 waits for the future of an all_reduce that rank 1 joins after 2 s.",
        """
        time.sleep(2 * rank)
        dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
        """,
    ),
    waits(
        "future_of_a_callback",
        "Rank 0 waits for what a callback makes of a late all_reduce.",
        """
        time.sleep(2 * rank)
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        halves = future.then(lambda done: done.value()[0] / 2)
        assert halves.wait().sum() == 4
        """,
    ),
    waits(
        "futures_of_two_late_all_reduces",
        "Rank 0 waits for several futures at once, and rank 1 comes late to each.",
        """
        works = []
        for _ in range(2):
            time.sleep(rank)
            works.append(dist.all_reduce(torch.ones(4), async_op=True))
        torch.futures.wait_all([work.get_future() for work in works])
        """,
    ),
    waits(
        "future_set_by_a_thread",
        "Rank 1 waits for a future of its own, which a thread sets after 2 s.",
        """
        import threading
        future = torch.futures.Future()
        if rank == 1:
            threading.Timer(2, future.set_result, (1,)).start()
            future.wait()
        dist.barrier()
        """,
    ),
]

KEYS = [
    waits(
        "key_set_by_a_thread",
        "Both ranks wait for a key that a thread of rank 0 sets after 2 s.",
        """
        import threading
        if rank == 0:
            threading.Timer(2, store.set, ("set_by_a_thread", "here")).start()
        assert store.get("set_by_a_thread") == b"here"
        """,
    ),
    waits(
        "key_set_by_a_child_process",
        "Both ranks wait for a key that a child process of rank 0 sets after 2 s.",
        """
        import multiprocessing

        def later():
            time.sleep(2)
            store.set("set_by_a_child", "here")

        if rank == 0:
            child = multiprocessing.get_context("fork").Process(target=later)
            child.start()
        assert store.get("set_by_a_child") == b"here"
        if rank == 0:
            child.join()
        """,
    ),
    waits(
        "keys_set_in_turn",
        "Each rank waits for the other's key, and sets its own a second later.",
        """
        for step in range(2):
            if step or rank:
                store.wait([f"turn_{step - 1 + rank}_{1 - rank}"])
            time.sleep(1)
            store.set(f"turn_{step}_{rank}", "yes")
        """,
        4,
    ),
]

PROGRAMS = [*FUTURES, *KEYS]
