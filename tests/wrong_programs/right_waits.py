"""Right programs that wait for futures, for keys of a store and in loops, and go on."""

from __future__ import annotations

import textwrap

from program import NONE, Program, program

STORE = "import time\nstore = dist.distributed_c10d._get_default_store()\n"


def waits(name: str, what: str, body: str, seconds: float = 2) -> Program:
    """Return a right program of two ranks that begins with STORE."""
    body = STORE + textwrap.dedent(body).strip("\n")
    return program(name, "waits without wait()", what, NONE, 2, body, seconds=seconds)


def poll(name: str, what: str, loop: str, seconds: float = 2) -> Program:
    """Return a program in which rank 0 gives up a loop, and rank 1 goes on only after that."""
    body = f"""
if rank == 0:
    work, tries = dist.all_reduce(torch.ones(4), async_op=True), 0
{textwrap.indent(textwrap.dedent(loop).strip(), "    ")}
    store.set("{name}", "now")
    work.wait()
else:
    store.get("{name}")
    dist.all_reduce(torch.ones(4))
"""
    return waits(name, what, body, seconds)


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

POLLS = [
    waits(
        "all_reduce_polled_until_a_late_rank_joins",
        "Rank 0 polls an all_reduce that rank 1 joins after 2 s.",
        """
        time.sleep(2 * rank)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        """,
    ),
    waits(
        "several_works_polled_without_a_pause",
        "Rank 0 polls three works in a tight loop, and rank 1 comes late.",
        """
        time.sleep(2 * rank)
        works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
        while not all(work.is_completed() for work in works):
            pass
        """,
    ),
    poll(
        "poll_with_a_deadline",
        "Rank 0 polls for 2 s at most.",
        """
        until = time.monotonic() + 2
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.01)
        """,
    ),
    poll(
        "poll_with_a_break",
        "Rank 0 leaves the loop after 20 polls.",
        """
        while not work.is_completed():
            tries += 1
            if tries == 20:
                break
            time.sleep(0.1)
        """,
    ),
    poll(
        "poll_with_a_counter",
        "Rank 0 polls 20 times at most.",
        """
        while not work.is_completed() and tries < 20:
            tries += 1
            time.sleep(0.1)
        """,
    ),
    poll(
        "poll_that_ends_with_an_error",
        "The pause of the loop becomes negative, and the error is caught.",
        """
        pause = 2
        try:
            while not work.is_completed():
                time.sleep(pause)
                pause -= 3
        except ValueError:
            pass
        """,
    ),
    poll(
        "poll_ended_by_an_alarm",
        "An alarm ends the loop after 2 s.",
        """
        import signal

        def ring(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 2)
        try:
            while not work.is_completed():
                pass
        except TimeoutError:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        """,
    ),
    program(
        "poll_of_the_first_of_two",
        "waits without wait()",
        "Rank 0 goes on when either of two works is complete, and rank 2 joins one after 2 s.",
        NONE,
        3,
        """
        import time
        first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
        if rank == 0:
            tensor = torch.ones(4)
            works = [dist.all_reduce(tensor, group=g, async_op=True) for g in (first, second)]
            while not (works[1].is_completed() or works[0].is_completed()):
                time.sleep(0.8)
            dist.send(torch.ones(4), 1)
            works[0].wait()
        elif rank == 1:
            dist.recv(torch.ones(4), 0)
            dist.all_reduce(torch.ones(4), group=first)
        else:
            time.sleep(2)
            dist.all_reduce(torch.ones(4), group=second)
        """,
        seconds=2,
    ),
    waits(
        "poll_that_calls_a_function",
        "What rank 0 calls in its loop lets rank 1 go on after 2 s.",
        """
        began = time.monotonic()

        def think():
            time.sleep(0.1)
            if time.monotonic() > began + 2:
                store.set("called_in_a_loop", "now")

        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            while not work.is_completed():
                think()
        else:
            store.get("called_in_a_loop")
            dist.all_reduce(torch.ones(4))
        """,
    ),
    poll(
        "poll_with_a_sleep_of_its_own",
        "The sleep in the loop is a function of the program, and ends the loop.",
        """
        until = time.monotonic() + 2

        def sleep(seconds):
            time.sleep(seconds)
            if time.monotonic() > until:
                raise TimeoutError

        try:
            while not work.is_completed():
                sleep(0.1)
        except TimeoutError:
            pass
        """,
    ),
]

PROGRAMS = [*FUTURES, *KEYS, *POLLS]
