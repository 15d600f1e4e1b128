"""Right programs that wait for their own threads, and go on."""

from __future__ import annotations

from program import NONE, program
from right_waits import waits

PROGRAMS = [
    program(
        "callback_of_a_thread_pool_sends",
        "slow ranks",
        "A thread of a pool runs a function of C, and its callback sends what rank 1 waits for.",
        NONE,
        2,
        """
        import time
        from multiprocessing.pool import ThreadPool
        if rank == 0:
            with ThreadPool(1) as threads:
                send = lambda _: dist.send(torch.ones(4), 1)
                task = threads.apply_async(time.sleep, (2,), callback=send)
                dist.recv(torch.ones(4), 1)
                task.wait()
        else:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        """,
    ),
    program(
        "callback_of_a_process_pool_sends",
        "slow ranks",
        "A process of a pool sleeps, and a callback then sends what rank 1 waits for.",
        NONE,
        2,
        """
        import multiprocessing, time
        if rank == 0:
            with multiprocessing.get_context("fork").Pool(1) as processes:
                send = lambda _: dist.send(torch.ones(4), 1)
                task = processes.apply_async(time.sleep, (2,), callback=send)
                dist.recv(torch.ones(4), 1)
                task.wait()
        else:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        """,
    ),
    waits(
        "a_joined_thread_that_receives_late",
        "Rank 0 joins a thread that receives what rank 1 sends after 2 s.",
        """
        import threading
        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()
            thread.join()
        else:
            time.sleep(2)
            dist.send(torch.ones(4), 0)
        """,
    ),
    waits(
        "one_of_two_threads_goes_on",
        "A thread of rank 0 has a message to come, and then sends what rank 1 needs for the other.",
        """
        from concurrent.futures import ThreadPoolExecutor

        def second():
            time.sleep(2)
            dist.recv(torch.ones(4), 1, tag=2)
            time.sleep(2)
            dist.send(torch.ones(4), 1, tag=3)

        if rank == 0:
            with ThreadPoolExecutor(2) as pool:
                pool.submit(dist.recv, torch.ones(4), 1, tag=1)
                pool.submit(second)
        else:
            dist.send(torch.ones(4), 0, tag=2)
            dist.recv(torch.ones(4), 0, tag=3)
            dist.send(torch.ones(4), 0, tag=1)
        """,
        4,
    ),
    waits(
        "a_thread_is_joined_for_a_while",
        "Rank 0 joins its thread for a second at most, and then sends what rank 1 needs.",
        """
        import threading
        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()
            thread.join(2)
            dist.send(torch.ones(4), 1)
            thread.join()
        else:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        """,
    ),
    waits(
        "a_joined_thread_and_one_that_sleeps",
        "Rank 0 joins a thread that receives, and another thread sleeps before it sends.",
        """
        import queue, threading

        def later():
            try:
                queue.Queue().get(timeout=2)
            except queue.Empty:
                dist.send(torch.ones(4), 1)

        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()
            threading.Thread(target=later).start()
            thread.join()
        else:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        """,
    ),
    waits(
        "a_join_ended_by_an_alarm",
        "An alarm ends the join of a thread that waits, and rank 0 sends what rank 1 needs.",
        """
        import signal, threading

        def ring(*_):
            raise TimeoutError

        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 2)
            try:
                thread.join()
            except TimeoutError:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            dist.send(torch.ones(4), 1)
            thread.join()
        else:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        """,
    ),
    waits(
        "a_thread_waits_for_a_while",
        "The thread that rank 0 joins waits for a second at most, and then sends.",
        """
        import threading
        from datetime import timedelta

        def asks():
            try:
                store.wait(["asked_by_a_thread"], timedelta(seconds=2))
            except RuntimeError:
                dist.send(torch.ones(4), 1)

        if rank == 0:
            thread = threading.Thread(target=asks)
            thread.start()
            thread.join()
        else:
            dist.recv(torch.ones(4), 0)
        """,
    ),
]
