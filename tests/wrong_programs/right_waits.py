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
    program(
        "callback_to_come_sends",
        "waits without wait()",
        "Ranks 0 and 1 receive from each other, but a callback is to send when rank 2 has joined.",
        NONE,
        3,
        """
        import time
        time.sleep(2 * (rank == 2))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        if rank == 0:
            sent = work.get_future().then(lambda done: dist.send(torch.ones(4), 1))
            dist.recv(torch.ones(4), 1)
            sent.wait()
        elif rank == 1:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        work.wait()
        """,
        seconds=2,
    ),
    program(
        "callback_to_come_sends_for_a_joined_thread",
        "waits without wait()",
        "Rank 0 joins a thread that receives, and its callback is to send what rank 1 needs.",
        NONE,
        3,
        """
        import threading, time
        time.sleep(2 * (rank == 2))
        work = dist.all_reduce(torch.ones(4), async_op=True)
        if rank == 0:
            work.get_future().add_done_callback(lambda done: dist.send(torch.ones(4), 1))
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()
            thread.join()
        elif rank == 1:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        work.wait()
        """,
        seconds=2,
    ),
    waits(
        "callback_of_a_rank_that_has_returned_sends",
        "Rank 1 has returned when its callback begins, and sends what rank 0 needs 2 s later.",
        """
        def later(done):
            time.sleep(2)
            dist.send(torch.ones(4), 0)

        time.sleep(1 - rank)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        if rank == 1:
            work.get_future().then(later)
        else:
            work.wait()
            dist.recv(torch.ones(4), 1)
        """,
        3,
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
