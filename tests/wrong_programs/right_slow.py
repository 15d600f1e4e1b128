"""Right programs that look wrong: slow ranks, threads, long calls, many ranks and messages."""

from __future__ import annotations

import textwrap

from program import NONE, Program, program

SLOW = "slow and busy ranks"


def slow(name: str, what: str, world_size: int, body: str, seconds: float = 0) -> Program:
    """Return a right program that takes its time."""
    return program(name, SLOW, what, NONE, world_size, body, seconds=seconds)


THREADS = "import threading, time\nfrom concurrent.futures import ThreadPoolExecutor\n"


def threads(name: str, what: str, body: str, seconds: float = 0) -> Program:
    """Return a right program of two ranks that begins with THREADS."""
    body = THREADS + textwrap.dedent(body).strip("\n")
    return program(name, "threads", what, NONE, 2, body, seconds=seconds)


PROGRAMS = [
    slow(
        "a_rank_sleeps_before_it_sends",
        "Rank 0 sleeps for 3 s while rank 1 waits.",
        2,
        """
        import time
        if rank == 0:
            time.sleep(3)
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.zeros(4), 0)
        """,
        3,
    ),
    slow(
        "a_rank_computes_in_python",
        "Rank 0 counts for a while before the barrier.",
        3,
        """
        import time
        until = time.monotonic() + 2
        while rank == 0 and time.monotonic() < until:
            pass
        dist.barrier()
        """,
        2,
    ),
    slow(
        "a_rank_is_in_one_long_call",
        "Rank 1 is in native code for seconds, which answers nothing meanwhile.",
        2,
        """
        import ctypes
        if rank == 1:
            ctypes.PyDLL(None).sleep(3)
        dist.all_reduce(torch.ones(4))
        """,
        3,
    ),
    slow(
        "a_rank_multiplies_matrices",
        "Rank 1 multiplies large matrices while the others wait.",
        3,
        """
        if rank == 1:
            matrix = torch.rand(1000, 1000)
            for _ in range(20):
                matrix = matrix.matmul(matrix).clamp(0, 1)
        dist.barrier()
        """,
        2,
    ),
    slow(
        "a_rank_reads_a_pipe",
        "Rank 0 waits for a process of its own.",
        2,
        """
        import subprocess
        if rank == 0:
            subprocess.run(["sleep", "2"], check=True)
        dist.all_reduce(torch.ones(4))
        """,
        2,
    ),
    slow(
        "ranks_take_turns_with_sleeps",
        "Each rank sleeps for a second before it passes the message on.",
        4,
        """
        import time
        tensor = torch.ones(4)
        if rank > 0:
            dist.recv(tensor, rank - 1)
        time.sleep(1)
        if rank < world_size - 1:
            dist.send(tensor, rank + 1)
        dist.barrier()
        """,
        4,
    ),
    slow(
        "two_pairs_of_different_speed",
        "Ranks 0 and 1 exchange slowly, ranks 2 and 3 wait for them in the barrier.",
        4,
        """
        import time
        tensor, peer = torch.ones(4), rank ^ 1
        for _ in range(10 if rank < 2 else 1):
            if rank % 2 == 0:
                time.sleep(0.2)
                dist.send(tensor, peer)
            else:
                dist.recv(tensor, peer)
        dist.barrier()
        """,
        2,
    ),
    slow(
        "a_message_of_many_megabytes",
        "One message of 80 MB.",
        2,
        """
        tensor = torch.ones(20_000_000)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        """,
        1,
    ),
    slow(
        "a_wait_with_a_limit_that_suffices",
        "Rank 0 waits at most 20 s for a message that comes after 2 s.",
        2,
        """
        import time
        from datetime import timedelta
        tensor = torch.ones(4)
        if rank == 0:
            dist.irecv(tensor, 1).wait(timedelta(seconds=20))
        else:
            time.sleep(2)
            dist.send(tensor, 0)
        """,
        2,
    ),
    slow(
        "a_limit_that_is_caught",
        "Rank 0 asks the store for a key for 1 s, catches the error, and goes on.",
        2,
        """
        from datetime import timedelta
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            try:
                store.wait(["never"], timedelta(seconds=1))
            except RuntimeError:
                pass
        dist.barrier()
        """,
        1,
    ),
    slow(
        "ranks_that_return_early",
        "Ranks 2 and 3 return at once, ranks 0 and 1 go on for a while.",
        4,
        """
        import time
        for _ in range(4):
            if rank < 2:
                time.sleep(0.4)
                tensor = torch.ones(4)
                dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        """,
        2,
    ),
    slow(
        "32_ranks_reduce",
        "32 ranks call all_reduce and barrier.",
        32,
        """
        tensor = torch.ones(4)
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.barrier()
        """,
        20,
    ),
    slow(
        "32_ranks_in_a_ring",
        "32 ranks pass messages around the ring.",
        32,
        """
        works = [
            dist.isend(torch.ones(4), (rank + 1) % world_size),
            dist.irecv(torch.ones(4), (rank - 1) % world_size),
        ]
        for work in works:
            work.wait()
        """,
        20,
    ),
    slow(
        "100_000_messages",
        "Rank 0 sends 100,000 messages to rank 1.",
        2,
        """
        tensor = torch.ones(1)
        for _ in range(100_000):
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
        """,
        120,
    ),
    slow(
        "5_000_all_reduces",
        "Two ranks call all_reduce 5,000 times.",
        2,
        """
        tensor = torch.ones(1)
        for _ in range(5_000):
            dist.all_reduce(tensor)
        """,
        20,
    ),
    slow(
        "2_000_messages_at_once",
        "2,000 isends are in flight before the first is waited for.",
        2,
        """
        function = [dist.isend, dist.irecv][rank]
        works = [function(torch.ones(1), 1 - rank) for _ in range(2_000)]
        for work in works:
            work.wait()
        """,
        3,
    ),
    threads(
        "a_thread_sends_while_the_main_thread_waits",
        "On each rank a thread sends what the other's main thread waits for.",
        """
        tensor, peer = torch.ones(4), 1 - rank
        thread = threading.Thread(target=dist.send, args=(tensor, peer))
        thread.start()
        dist.recv(torch.zeros(4), peer)
        thread.join()
        """,
    ),
    threads(
        "a_thread_sends_later",
        "A thread of rank 1 sleeps for 2 s and then sends what both main threads need.",
        """
        def later():
            time.sleep(2)
            dist.send(torch.ones(4), 0, tag=7)

        thread = threading.Thread(target=later)
        if rank == 1:
            thread.start()
            dist.recv(torch.zeros(4), 0)
            thread.join()
        else:
            dist.recv(torch.zeros(4), 1, tag=7)
            dist.send(torch.ones(4), 1)
        """,
        2,
    ),
    threads(
        "a_thread_pool_sends_later",
        "Tasks of a thread pool sleep in the standard library and send afterwards.",
        """
        tensor, peer = torch.ones(4), 1 - rank
        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 2)
            sent = pool.submit(dist.send, tensor, peer)
            dist.recv(torch.zeros(4), peer)
            sent.result()
        """,
        2,
    ),
    threads(
        "a_timer_sends_later",
        "A timer sends after 2 s what the main threads wait for.",
        """
        timer = threading.Timer(2, dist.send, (torch.ones(4), 1 - rank))
        timer.start()
        dist.recv(torch.zeros(4), 1 - rank)
        timer.join()
        """,
        2,
    ),
    threads(
        "a_thread_that_only_sleeps",
        "A daemon thread sleeps in a loop beside an ordinary exchange.",
        """
        end = threading.Event()
        thread = threading.Thread(target=end.wait, daemon=True)
        thread.start()
        tensor = torch.ones(4)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        end.set()
        thread.join()
        """,
    ),
    threads(
        "two_threads_with_groups_of_their_own",
        "Each thread reduces in a group of its own.",
        """
        groups = [dist.new_group([0, 1]) for _ in range(2)]

        def reduce(group):
            for _ in range(5):
                dist.all_reduce(torch.ones(4), group=group)

        workers = [threading.Thread(target=reduce, args=(group,)) for group in groups]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        """,
    ),
]
