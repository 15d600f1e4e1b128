"""Right programs that poll in a loop, and leave it in another way or once the work is complete."""

from __future__ import annotations

import textwrap

from program import NONE, Program, program
from right_waits import waits


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


PROGRAMS = [
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
    poll(
        "poll_of_a_property",
        "The work is a property, which gives up after 2 s.",
        """
        class Job:
            def __init__(self, work):
                self._work, self._until = work, time.monotonic() + 2

            @property
            def work(self):
                if time.monotonic() > self._until:
                    raise TimeoutError
                return self._work

        job = Job(work)
        try:
            while not job.work.is_completed():
                time.sleep(0.1)
        except TimeoutError:
            pass
        """,
    ),
    poll(
        "poll_of_an_iterator",
        "The second time that the loop asks, the iterator is at its end.",
        """
        works = iter([work])
        while not all(each.is_completed() for each in works):
            time.sleep(2.5)
        """,
        3,
    ),
    poll(
        "poll_of_another_object",
        "What the loop asks first is a class of the program, which ends it.",
        """
        class Deadline:
            until = time.monotonic() + 2

            def is_completed(self):
                if time.monotonic() > self.until:
                    raise TimeoutError
                return True

        works = [Deadline(), work]
        try:
            while not all(each.is_completed() for each in works):
                time.sleep(0.1)
        except TimeoutError:
            pass
        """,
    ),
    poll(
        "poll_that_prints_an_object",
        "What the loop prints raises after 2 s.",
        """
        class Clock:
            until = time.monotonic() + 2

            def __str__(self):
                if time.monotonic() > self.until:
                    raise TimeoutError
                return "."

        clock = Clock()
        try:
            while not work.is_completed():
                time.sleep(0.1)
                print(f"{clock}", end="")
        except TimeoutError:
            pass
        """,
    ),
    poll(
        "poll_ended_by_a_trace_function",
        "A trace function ends the loop after 2 s.",
        """
        import sys
        until = time.monotonic() + 2

        def trace(frame, event, argument):
            if time.monotonic() > until:
                raise TimeoutError
            return trace

        sys._getframe().f_trace = trace
        sys.settrace(trace)
        try:
            while not work.is_completed():
                time.sleep(0.1)
        except TimeoutError:
            pass
        sys.settrace(None)
        """,
    ),
]
