"""Sends and receives that are missing, crossed, or have other tags."""

from __future__ import annotations

from calls import FORMS
from program import DEADLOCK, each, program

MATCHING = [
    *each(
        FORMS,
        "${name}_that_nobody_receives",
        "message matching",
        "Rank 0 sends a message, and rank 1 returns without receiving it.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        if rank == 0:
            $send  # fault: 0; absent: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_that_nobody_sends",
        "message matching",
        "Rank 1 receives a message that rank 0 never sends.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        if rank == 1:
            $recv  # fault: 1; absent: 0
        """,
    ),
    *each(
        FORMS,
        "${name}_both_receive_first",
        "message matching",
        "Both ranks receive before they send.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        $recv  # fault: all
        $send
        """,
    ),
    *each(
        FORMS,
        "${name}_both_send_first",
        "message matching",
        "Both ranks send before they receive, and a send of gloo waits for its receive.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(1_000_000), 1 - rank
        $send  # fault: all
        $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_in_a_ring_of_receives",
        "message matching",
        "Every rank receives from the one before it, and none has sent.",
        DEADLOCK,
        4,
        """
        tensor, peer = torch.ones(4), (rank - 1) % world_size
        $recv  # fault: all
        peer = (rank + 1) % world_size
        $send
        """,
    ),
    *each(
        FORMS,
        "${name}_in_a_ring_of_sends",
        "message matching",
        "Every rank sends to the next, and none receives.",
        DEADLOCK,
        3,
        """
        tensor, peer = torch.ones(4), (rank + 1) % world_size
        $send  # fault: all
        peer = (rank - 1) % world_size
        $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_one_message_too_many",
        "message matching",
        "Rank 0 sends three messages, and rank 1 receives two.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        for _ in range(3 - rank):
            if rank == 0:
                $send  # fault: 0; absent: 1
            else:
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_to_the_wrong_rank",
        "message matching",
        "Rank 0 sends to rank 1, but rank 2 receives.",
        DEADLOCK,
        3,
        """
        tensor = torch.ones(4)
        if rank == 0:
            peer = 1
            $send  # fault: 0; absent: 1
        if rank == 2:
            peer = 0
            $recv  # fault: 2
        """,
    ),
    *each(
        FORMS,
        "${name}_against_barrier",
        "message matching",
        "Rank 0 receives from rank 1, which waits in the barrier first.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        if rank == 0:
            $recv  # fault: 0
        dist.barrier()  # fault: 1
        if rank == 1:
            $send
        """,
    ),
    *each(
        FORMS,
        "${name}_against_all_reduce",
        "message matching",
        "Rank 1 sends to rank 0, which is in an all_reduce.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        if rank == 1:
            $send  # fault: 1
        dist.all_reduce(tensor)  # fault: 0
        """,
    ),
    *each(
        FORMS,
        "${name}_last_of_a_chain_returns",
        "message matching",
        "Messages go from rank to rank, but the last rank returns without receiving.",
        DEADLOCK,
        4,
        """
        tensor = torch.ones(4)
        if rank == 3:
            return
        if rank > 0:
            peer = rank - 1
            $recv
        peer = rank + 1
        $send  # fault: 2; absent: 3
        """,
    ),
    program(
        "relay_through_a_rank_that_waits",
        "message matching",
        "Rank 1 receives before the broadcast what rank 3 sends after it.",
        DEADLOCK,
        4,
        """
        tensor, letter = torch.ones(4), torch.ones(1)
        if rank == 1:
            dist.recv(letter, 3)  # fault: 1
        dist.broadcast(tensor, 0)  # fault: 3; held up: 0, 2
        if rank == 3:
            dist.send(letter, 1)
        """,
    ),
    program(
        "reduce_with_a_rank_that_waits",
        "message matching",
        "Rank 1 receives before the reduce what rank 3 sends after it.",
        DEADLOCK,
        4,
        """
        tensor, letter = torch.ones(4_000), torch.ones(1)
        if rank == 1:
            dist.recv(letter, 3)  # fault: 1
        dist.reduce(tensor, 0)  # fault: 3; held up: 0, 2
        if rank == 3:
            dist.send(letter, 1)
        """,
    ),
    program(
        "reduce_to_a_rank_that_sends_afterwards",
        "message matching",
        "Rank 1 receives before the reduce what rank 3, to which it leads, sends after it.",
        DEADLOCK,
        4,
        """
        tensor, letter = torch.ones(4), torch.ones(1)
        if rank == 1:
            dist.recv(letter, 3)  # fault: 1
        dist.reduce(tensor, 3)  # fault: 3; held up: 0, 2
        if rank == 3:
            dist.send(letter, 1)
        """,
    ),
    program(
        "broadcast_to_a_leaf_that_waits",
        "message matching",
        "Rank 3 receives before the broadcast what rank 1, which relays to it, sends after it.",
        DEADLOCK,
        4,
        """
        tensor, letter = torch.ones(4), torch.ones(1)
        if rank == 3:
            dist.recv(letter, 1)  # fault: 3
        dist.broadcast(tensor, 0)  # fault: 1; held up: 0, 2
        if rank == 1:
            dist.send(letter, 3)
        """,
    ),
    program(
        "two_ranks_stuck_while_two_others_work",
        "message matching",
        "Ranks 0 and 1 receive from each other while ranks 2 and 3 exchange messages.",
        DEADLOCK,
        4,
        """
        import time
        tensor, peer = torch.ones(4), rank ^ 1
        if rank < 2:
            dist.recv(tensor, peer)  # fault: 0, 1
        for _ in range(40):
            if rank == 2:
                dist.send(tensor, peer)  # held up: 2
                time.sleep(0.1)
            if rank == 3:
                dist.recv(tensor, peer)  # held up: 3
        """,
        seconds=4,
    ),
]

TAG = [
    *each(
        FORMS,
        "${name}_with_different_tags",
        "tag",
        "Rank 0 sends with tag 1, and rank 1 receives with tag 2.",
        DEADLOCK,
        2,
        """
        tensor, peer, tag = torch.ones(4), 1 - rank, 1 + rank
        if rank == 0:
            $tagged_send  # fault: 0
        else:
            $tagged_recv  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_with_tags_in_other_order",
        "tag",
        "Rank 0 sends tag 1 and waits for it, but rank 1 receives tag 2 first.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        for tag in [(1, 2), (2, 1)][rank]:
            if rank == 0:
                $tagged_send  # fault: 0
            else:
                $tagged_recv  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_with_the_rank_as_tag",
        "tag",
        "Each rank uses its own number as tag, for sending and for receiving.",
        DEADLOCK,
        2,
        """
        tensor, peer, tag = torch.ones(4), 1 - rank, rank
        for sender in range(world_size):
            if rank == sender:
                $tagged_send  # fault: 0
            else:
                $tagged_recv  # fault: 1
        """,
    ),
]

PROGRAMS = [*MATCHING, *TAG]
