"""Messages of other sizes, to ranks that do not exist, and from whichever rank is first."""

from __future__ import annotations

from calls import FORMS
from program import DEADLOCK, MISMATCH, RAISED, each, program

SIZE = [
    *each(
        FORMS,
        "${name}_into_a_larger_tensor",
        "count and shape",
        "Rank 0 sends 4 numbers, and rank 1 receives into 5.",
        MISMATCH,
        2,
        """
        tensor, peer = torch.ones(4 + rank), 1 - rank
        if rank == 0:
            $send  # fault: 0
        else:
            $recv  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_into_a_smaller_tensor",
        "count and shape",
        "Rank 0 sends 5 numbers, and rank 1 receives into 4.",
        MISMATCH,
        2,
        """
        tensor, peer = torch.ones(5 - rank), 1 - rank
        if rank == 0:
            $send  # fault: 0
        else:
            $recv  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_of_double_into_float",
        "dtype",
        "Rank 0 sends 4 numbers of float64, and rank 1 receives 8 of float32: as many bytes.",
        MISMATCH,
        2,
        """
        tensor, peer = torch.ones(4, dtype=torch.float64), 1 - rank
        if rank == 0:
            $send  # fault: 0
        else:
            tensor = torch.ones(8)
            $recv  # fault: 1
        """,
    ),
]

PEER = [
    *each(
        FORMS,
        "${name}_to_oneself",
        "peer",
        "Each rank sends to itself.",
        RAISED,
        2,
        """
        tensor, peer = torch.ones(4), rank
        $send  # fault: all
        """,
    ),
    *each(
        FORMS,
        "${name}_from_oneself",
        "peer",
        "Each rank receives from itself.",
        RAISED,
        2,
        """
        tensor, peer = torch.ones(4), rank
        $recv  # fault: all
        """,
    ),
    *each(
        FORMS,
        "${name}_to_a_rank_that_does_not_exist",
        "peer",
        "The last rank sends to the next one, which does not exist.",
        RAISED,
        2,
        """
        tensor, peer = torch.ones(4), rank + 1
        if rank == 1:
            $send  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_from_a_rank_that_does_not_exist",
        "peer",
        "Rank 0 receives from a rank that does not exist.",
        RAISED,
        2,
        """
        tensor, peer = torch.ones(4), 2
        if rank == 0:
            $recv  # fault: 0
        """,
    ),
    *each(
        FORMS,
        "${name}_to_a_negative_rank",
        "peer",
        "Rank 0 sends to rank -1, as if ranks were indices of a list.",
        RAISED,
        2,
        """
        tensor, peer = torch.ones(4), rank - 1
        if rank == 0:
            $send  # fault: 0
        """,
    ),
]

ANY_SOURCE = [
    program(
        "receive_from_any_source_that_nobody_sends",
        "message race",
        "Rank 0 receives two messages from any source, and only one is sent.",
        DEADLOCK,
        3,
        """
        tensor = torch.ones(4)
        if rank == 1:
            dist.send(tensor, 0)
        if rank == 0:
            for _ in range(2):
                dist.recv(tensor)  # fault: 0
        """,
    ),
    program(
        "any_source_takes_the_message_of_the_next_receive",
        "message race",
        "Rank 0's receive from any source takes the message that its next receive needs.",
        DEADLOCK,
        3,
        """
        tensor = torch.ones(4)
        if rank == 0:
            dist.recv(tensor)
            dist.send(tensor, 2)
            dist.recv(tensor, 1)  # fault: 0
        elif rank == 1:
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)  # fault: 2
        """,
    ),
    program(
        "all_receive_from_any_source",
        "message race",
        "All ranks receive from any source, and none sends.",
        DEADLOCK,
        3,
        """
        dist.recv(torch.ones(4))  # fault: all
        """,
    ),
    *each(
        FORMS,
        "${name}_raced_by_any_source",
        "message race",
        "Which message the receive from any source takes is left to chance; with one, it hangs.",
        DEADLOCK,
        3,
        """
        tensor, peer = torch.ones(4), 0
        if rank == 0:
            dist.recv(tensor)
            peer = 1
            $recv  # fault: 0
        else:
            $send  # fault: 2
        """,
        unseen="in some runs the messages come in the order that works",
    ),
    program(
        "sum_depends_on_the_order_of_arrival",
        "message race",
        "Rank 0 subtracts what comes second from what comes first.",
        MISMATCH,
        3,
        """
        first, second = torch.zeros(1), torch.zeros(1)
        if rank == 0:
            dist.recv(first)  # fault: 0
            dist.recv(second)
            return (first - second).item()
        dist.send(torch.tensor([float(rank)]), 0)
        """,
        unseen="every run is consistent in itself; only two runs can differ",
    ),
    program(
        "sender_of_any_source_is_not_looked_at",
        "message race",
        "Rank 0 takes the first message for that of rank 1, whoever sent it.",
        MISMATCH,
        3,
        """
        parts = [torch.zeros(1) for _ in range(2)]
        if rank == 0:
            for part in parts:
                dist.recv(part)  # fault: 0
            return [part.item() for part in parts]
        dist.send(torch.tensor([float(rank)]), 0)
        """,
        unseen="every run is consistent in itself; only two runs can differ",
    ),
]

PROGRAMS = [*SIZE, *PEER, *ANY_SOURCE]
