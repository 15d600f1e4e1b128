"""Asynchronous operations: waits that are missing, and tensors that are touched before them."""

from __future__ import annotations

from calls import COLLECTIVES, WITH_TENSORS
from program import DEADLOCK, MISMATCH, UNAWAITED, each, program

NOT_WATCHED = "reading and writing a tensor is plain memory access, which nothing records"

MISSING_WAIT = [
    *each(
        COLLECTIVES,
        "${name}_never_waited_for",
        "missing wait",
        "$name is started with async_op=True, and nobody waits for it.",
        UNAWAITED,
        2,
        """
        $setup
        $async_  # fault: all
        """,
    ),
    program(
        "isend_never_waited_for",
        "missing wait",
        "Rank 0 does not wait for its isend.",
        UNAWAITED,
        2,
        """
        tensor = torch.ones(4)
        if rank == 0:
            work = dist.isend(tensor, 1)  # fault: 0
        else:
            dist.recv(tensor, 0)
        dist.barrier()
        """,
    ),
    program(
        "irecv_never_waited_for",
        "missing wait",
        "Rank 1 does not wait for its irecv.",
        UNAWAITED,
        2,
        """
        tensor = torch.ones(4)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            work = dist.irecv(tensor, 0)  # fault: 1
        dist.barrier()
        """,
    ),
    program(
        "isend_and_irecv_never_waited_for",
        "missing wait",
        "Both ranks start to send and to receive, and return.",
        UNAWAITED,
        2,
        """
        works = [
            dist.isend(torch.ones(4), 1 - rank),  # fault: all
            dist.irecv(torch.ones(4), 1 - rank),  # fault: all
        ]
        dist.barrier()
        """,
    ),
    program(
        "only_the_last_isend_is_waited_for",
        "missing wait",
        "Three isends share one variable: the messages of the first two are dropped with them.",
        DEADLOCK,
        2,
        """
        others = dist.new_group()  # its connections are its own
        if rank == 0:
            for step in range(3):
                work = dist.isend(torch.full((4,), step), 1)  # fault: 0
            dist.barrier(others)
            work.wait()
        else:
            dist.barrier(others)  # a message that is received at once is not lost
            for _ in range(3):
                dist.recv(torch.zeros(4, dtype=torch.int64), 0)  # fault: 1
        """,
    ),
    program(
        "only_the_first_of_a_batch_is_waited_for",
        "missing wait",
        "Rank 0 waits for the first operation of its batch only.",
        UNAWAITED,
        2,
        """
        tensors = [torch.ones(4), torch.zeros(4)]
        works = dist.batch_isend_irecv(  # fault: 0
            [
                dist.P2POp(dist.isend, tensors[0], 1 - rank),
                dist.P2POp(dist.irecv, tensors[1], 1 - rank),
            ]
        )
        for work in works[: 1 + rank]:
            work.wait()
        dist.barrier()
        """,
    ),
    program(
        "batch_never_waited_for",
        "missing wait",
        "Nobody waits for the operations of a batch.",
        UNAWAITED,
        2,
        """
        tensors = [torch.ones(4), torch.zeros(4)]
        works = dist.batch_isend_irecv(  # fault: all
            [
                dist.P2POp(dist.isend, tensors[0], 1 - rank),
                dist.P2POp(dist.irecv, tensors[1], 1 - rank),
            ]
        )
        dist.barrier()
        """,
    ),
    program(
        "gradients_reduced_but_not_waited_for",
        "missing wait",
        "The optimizer steps while the all_reduces of the gradients may still run.",
        UNAWAITED,
        2,
        """
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, async_op=True)  # fault: all
        optimizer.step()
        """,
    ),
    program(
        "batch_thrown_away_before_a_barrier",
        "missing wait",
        "Nothing keeps the operations of the batches, so they are dropped in flight.",
        DEADLOCK,
        2,
        """
        tensors = [torch.ones(4), torch.zeros(4)]
        dist.batch_isend_irecv(  # fault: all
            [
                dist.P2POp(dist.isend, tensors[0], 1 - rank),
                dist.P2POp(dist.irecv, tensors[1], 1 - rank),
            ]
        )
        dist.barrier()  # fault: all
        """,
    ),
    program(
        "isend_thrown_away_before_a_receive_from_any_source",
        "missing wait",
        "Rank 0 waits for the message that rank 1 has dropped, and the one after it is stuck.",
        DEADLOCK,
        2,
        """
        others = dist.new_group()  # its connections are its own
        if rank == 0:
            dist.barrier(others)  # a message that is received at once is not lost
            dist.recv(torch.zeros(4))  # fault: 0
        else:
            dist.isend(torch.ones(4), 0)
            dist.barrier(others)
            dist.send(torch.ones(4), 0)  # held up: 1
        """,
    ),
    program(
        "any_source_irecv_thrown_away_before_a_barrier",
        "missing wait",
        "Nothing keeps the irecv of rank 0, whose message then blocks the connection.",
        DEADLOCK,
        2,
        """
        others = dist.new_group()  # its connections are its own
        if rank == 0:
            dist.irecv(torch.zeros(4))  # fault: 0
            dist.barrier(others)
        else:
            dist.barrier(others)  # a message that is received at once is not lost
            dist.send(torch.ones(4), 0)
        dist.barrier()  # held up: 0, 1
        """,
    ),
    program(
        "first_irecv_thrown_away",
        "missing wait",
        "Nothing keeps the first irecv of rank 1, so its message blocks the second one.",
        DEADLOCK,
        2,
        """
        others = dist.new_group()  # its connections are its own
        if rank == 0:
            dist.barrier(others)  # a message that is received at once is not lost
            for step in range(2):
                dist.isend(torch.ones(4), 1).wait()  # held up: 0
        else:
            dist.irecv(torch.zeros(4), 0)  # fault: 1
            dist.barrier(others)
            dist.irecv(torch.zeros(4), 0).wait()  # fault: 1
        """,
    ),
    program(
        "isend_thrown_away_before_a_barrier",
        "missing wait",
        "Nothing keeps the isend of rank 0, so its message is dropped before rank 1 receives.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            dist.isend(torch.ones(4), 1)  # fault: 0
        dist.barrier()
        if rank == 1:
            dist.recv(torch.ones(4), 0)  # fault: 1
        """,
    ),
]

TOUCHED = [
    *each(
        WITH_TENSORS[::3],
        "${name}_result_read_before_wait",
        "buffer touched before wait",
        "The result of $name is used before its wait.",
        MISMATCH,
        2,
        """
        $setup
        work = $async_  # fault: all
        total = sum(value.sum() for value in list(locals().values()) if torch.is_tensor(value))
        work.wait()
        """,
        unseen=NOT_WATCHED,
    ),
    program(
        "isend_buffer_overwritten_before_wait",
        "buffer touched before wait",
        "Rank 0 writes into the tensor that it is sending.",
        MISMATCH,
        2,
        """
        tensor = torch.ones(1_000_000)
        if rank == 0:
            work = dist.isend(tensor, 1)  # fault: 0
            tensor.zero_()
            work.wait()
        else:
            dist.recv(tensor, 0)
        """,
        unseen=NOT_WATCHED,
    ),
    program(
        "irecv_buffer_read_before_wait",
        "buffer touched before wait",
        "Rank 1 uses the tensor before the message has arrived.",
        MISMATCH,
        2,
        """
        tensor = torch.zeros(4)
        if rank == 0:
            dist.send(tensor + 1, 1)
        else:
            work = dist.irecv(tensor, 0)  # fault: 1
            total = tensor.sum()
            work.wait()
            return total.item()
        """,
        unseen=NOT_WATCHED,
    ),
    program(
        "one_buffer_for_two_irecvs",
        "buffer touched before wait",
        "Rank 1 receives two messages into one tensor at the same time.",
        MISMATCH,
        2,
        """
        tensor = torch.zeros(4)
        if rank == 0:
            for step in range(2):
                dist.send(tensor + step, 1)
        else:
            works = [dist.irecv(tensor, 0) for _ in range(2)]  # fault: 1
            for work in works:
                work.wait()
        """,
        unseen=NOT_WATCHED,
    ),
]

PROGRAMS = [*MISSING_WAIT, *TOUCHED]
