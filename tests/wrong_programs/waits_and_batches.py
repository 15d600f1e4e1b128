"""Waits in other ways than wait(), and batches of sends and receives."""

from __future__ import annotations

from calls import COLLECTIVES
from program import DEADLOCK, MISMATCH, RAISED, each, program

NEVER_DONE = [
    program(
        "irecv_polled_forever",
        "waits without wait()",
        "Rank 0 polls an irecv whose message is never sent.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            work = dist.irecv(torch.zeros(4), 1)  # fault: 0
            while not work.is_completed():  # fault: 0; absent: 1
                pass
        """,
    ),
    program(
        "all_reduce_polled_with_sleeps",
        "waits without wait()",
        "Rank 0 polls an all_reduce that rank 1 never joins.",
        DEADLOCK,
        2,
        """
        import time
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)  # fault: 0
            while not work.is_completed():  # fault: 0; absent: 1
                time.sleep(0.01)
        """,
    ),
    program(
        "future_of_all_reduce_waited_for",
        "waits without wait()",
        "Rank 0 waits for the future of an all_reduce that rank 1 never joins.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)  # fault: 0
            work.get_future().wait()  # fault: 0; absent: 1
        """,
    ),
    program(
        "wait_in_a_thread",
        "waits without wait()",
        "A thread of rank 0 receives what nobody sends, and rank 0 joins the thread.",
        DEADLOCK,
        2,
        """
        import threading
        if rank == 0:
            thread = threading.Thread(target=dist.recv, args=(torch.ones(4), 1))
            thread.start()  # fault: 0
            thread.join()  # fault: 0; absent: 1
        """,
    ),
    program(
        "wait_in_a_thread_pool",
        "waits without wait()",
        "A task of rank 0 joins a barrier that rank 1 never calls.",
        DEADLOCK,
        2,
        """
        from concurrent.futures import ThreadPoolExecutor
        if rank == 0:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(dist.barrier).result()  # fault: 0; absent: 1
        """,
    ),
    program(
        "wait_with_a_time_limit",
        "waits without wait()",
        "Rank 0 waits at most 3 s for a message that rank 1 never sends.",
        DEADLOCK,
        2,
        """
        from datetime import timedelta
        if rank == 0:
            work = dist.irecv(torch.zeros(4), 1)  # fault: 0
            work.wait(timedelta(seconds=3))  # fault: 0; absent: 1
        dist.barrier()  # held up: 1
        """,
        seconds=3,
    ),
    *each(
        COLLECTIVES[::3],
        "${name}_started_once_too_often",
        "waits without wait()",
        "Rank 0 starts $name twice and rank 1 once; rank 0 waits in the end.",
        DEADLOCK,
        2,
        """
        $setup
        works = []
        for _ in range(2 - rank):
            works.append($async_)  # fault: 0
        for work in works:
            work.wait()  # fault: 0; absent: 1
        """,
    ),
]

BATCH = [
    program(
        "batch_lacks_the_receive",
        "batch_isend_irecv",
        "Rank 1 leaves the receive out of its batch.",
        DEADLOCK,
        2,
        """
        peer = 1 - rank
        batch = [dist.P2POp(dist.isend, torch.ones(4), peer)]
        if rank == 0:
            batch.append(dist.P2POp(dist.irecv, torch.ones(4), peer))
        for work in dist.batch_isend_irecv(batch):  # fault: 0
            work.wait()  # fault: 0; absent: 1
        """,
    ),
    program(
        "batch_of_receives_only",
        "batch_isend_irecv",
        "Every batch receives from both neighbours, and nobody sends.",
        DEADLOCK,
        3,
        """
        neighbours = [(rank - 1) % world_size, (rank + 1) % world_size]
        batch = [dist.P2POp(dist.irecv, torch.ones(4), peer) for peer in neighbours]
        for work in dist.batch_isend_irecv(batch):  # fault: all
            work.wait()  # fault: all
        """,
    ),
    program(
        "batch_in_the_wrong_direction",
        "batch_isend_irecv",
        "All ranks send to the next rank and receive from the next, too.",
        DEADLOCK,
        3,
        """
        peer = (rank + 1) % world_size
        batch = [
            dist.P2POp(dist.isend, torch.ones(4), peer),
            dist.P2POp(dist.irecv, torch.ones(4), peer),
        ]
        for work in dist.batch_isend_irecv(batch):  # fault: all
            work.wait()  # fault: all
        """,
    ),
    program(
        "batch_with_crossed_sizes",
        "batch_isend_irecv",
        "Rank 0 sends 4 and 8 numbers, and rank 1 receives 8 and 4.",
        MISMATCH,
        2,
        """
        function = [dist.isend, dist.irecv][rank]
        batch = [
            dist.P2POp(function, torch.ones(size), 1 - rank) for size in [(4, 8), (8, 4)][rank]
        ]
        for work in dist.batch_isend_irecv(batch):  # fault: all
            work.wait()  # fault: all
        """,
    ),
    program(
        "empty_batch",
        "batch_isend_irecv",
        "The last rank has nobody to send to, and passes an empty batch.",
        RAISED,
        2,
        """
        batch = [dist.P2POp(dist.isend, torch.ones(4), 1)] if rank == 0 else []
        for work in dist.batch_isend_irecv(batch):  # fault: 1
            work.wait()  # held up: 0
        """,
    ),
    program(
        "batch_of_blocking_sends",
        "batch_isend_irecv",
        "A batch is made with dist.send instead of dist.isend.",
        RAISED,
        2,
        """
        dist.P2POp(dist.send, torch.ones(4), 1 - rank)  # fault: all
        """,
    ),
    program(
        "batch_of_works",
        "batch_isend_irecv",
        "The batch holds works instead of P2POps.",
        RAISED,
        2,
        """
        works = [dist.isend(torch.ones(4), 1 - rank), dist.irecv(torch.ones(4), 1 - rank)]
        dist.batch_isend_irecv(works)  # fault: all
        """,
    ),
    program(
        "ring_batch_skipped_by_one_rank",
        "batch_isend_irecv",
        "Rank 2 does not take part in the ring.",
        DEADLOCK,
        3,
        """
        if rank == 2:
            return
        batch = [
            dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % world_size),
            dist.P2POp(dist.irecv, torch.ones(4), (rank - 1) % world_size),
        ]
        for work in dist.batch_isend_irecv(batch):  # fault: 0, 1
            work.wait()  # fault: 0, 1; absent: 2
        """,
    ),
]

PROGRAMS = [*NEVER_DONE, *BATCH]
