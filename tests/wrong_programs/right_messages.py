"""Right programs of groups, of messages, and of ranks that keep each other waiting."""

from __future__ import annotations

from calls import ALL, COLLECTIVES, FORMS, ROOTED, ROOTED_OBJECT
from program import NONE, each, program

GROUPS = [
    *each(
        ALL,
        "${name}_in_overlapping_groups",
        "group",
        "Ranks 0 and 1 call $name in one group, then ranks 1 and 2 in another.",
        NONE,
        3,
        """
        groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        world_size = 2
        for first, group in enumerate(groups):
            if rank in (first, first + 1):
                $setup
                $in_pair
        """,
    ),
    *each(
        COLLECTIVES,
        "${name}_in_two_groups_at_once",
        "group",
        "$name runs in two groups of the same ranks at once; rank 1 starts them in other order.",
        NONE,
        2,
        """
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        works = []
        for group in groups if rank == 0 else groups[::-1]:
            $setup
            works.append($async_in_group)
        for work in works:
            work.wait()
        """,
    ),
]

MESSAGES = [
    *each(
        FORMS,
        "${name}_in_a_ring",
        "message matching",
        "Even ranks send first, odd ones receive first.",
        NONE,
        4,
        """
        tensor, after, before = torch.ones(4), (rank + 1) % world_size, (rank - 1) % world_size
        for turn in range(2):
            if turn == rank % 2:
                peer = after
                $send
            else:
                peer = before
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_between_two_collectives",
        "message matching",
        "Messages go forth and back between two barriers.",
        NONE,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        dist.barrier()
        for sender in (0, 1, 1, 0):
            if rank == sender:
                $send
            else:
                $recv
        dist.barrier()
        """,
    ),
    *each(
        FORMS,
        "${name}_with_many_tags",
        "tag",
        "Every message has a tag of its own, and both ranks know the order.",
        NONE,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        for tag in (5, 3, 1000, 0):
            if rank == 0:
                $tagged_send
            else:
                $tagged_recv
        """,
    ),
    *each(
        FORMS,
        "${name}_of_many_sizes",
        "count and shape",
        "The size changes from message to message, also to no numbers at all.",
        NONE,
        2,
        """
        peer = 1 - rank
        for size in (1, 0, 1000, 3):
            tensor = torch.ones(size)
            if rank == 0:
                $send
            else:
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_into_another_shape",
        "count and shape",
        "Rank 0 sends the shape (2, 3), and rank 1 receives into (6,).",
        NONE,
        2,
        """
        tensor, peer = torch.ones(2, 3), 1 - rank
        if rank == 0:
            $send
        else:
            tensor = torch.zeros(6)
            $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_inside_a_group",
        "group",
        "Ranks 1 and 2 exchange a message in their group, rank 0 is no member.",
        NONE,
        3,
        """
        group = dist.new_group([1, 2])
        tensor, peer = torch.ones(4), 3 - rank
        if rank == 1:
            $send_in_group
        elif rank == 2:
            $recv_in_group
        """,
    ),
    *each(
        FORMS,
        "${name}_to_the_last_rank",
        "peer",
        "Every rank sends to the last one.",
        NONE,
        4,
        """
        tensor = torch.ones(4)
        if rank < world_size - 1:
            peer = world_size - 1
            $send
        else:
            for peer in range(world_size - 1):
                $recv
        """,
    ),
    *each(
        FORMS,
        "${name}_collected_from_any_source",
        "message race",
        "Rank 0 takes messages as they come, and replies to each sender.",
        NONE,
        4,
        """
        tensor, peer = torch.ones(4), 0
        if rank == 0:
            for _ in range(world_size - 1):
                peer = dist.recv(tensor)
                $send
        else:
            $send
            $recv
        """,
    ),
]

SIDE_BY_SIDE = [
    *each(
        [*ROOTED, *ROOTED_OBJECT],
        "${name}_with_a_slow_leaf",
        "slow and busy ranks",
        "Rank 3 comes late to $name, and the others go on to the next one as far as they can.",
        NONE,
        4,
        """
        import time
        for step in range(2):
            time.sleep(1.3 * (rank == 3))
            $setup
            $call
        """,
        seconds=3,
    ),
    *each(
        ROOTED,
        "${name}_of_large_tensors_with_a_slow_relay",
        "slow and busy ranks",
        "Rank 1 comes late to $name of 20 MB, and rank 0 is not the root.",
        NONE,
        4,
        """
        import time
        root, count = 2, 5_000_000
        time.sleep(1.3 * (rank == 1))
        $sized
        $root
        """,
        seconds=3,
    ),
    program(
        "a_pair_waits_while_another_exchanges",
        "slow and busy ranks",
        "Rank 0 computes for 3 s before it sends, while ranks 2 and 3 exchange with pauses.",
        NONE,
        4,
        """
        import time
        tensor, peer = torch.ones(4), rank ^ 1
        if rank < 2:
            time.sleep(3 * (rank == 0))
            dist.send(tensor, peer) if rank == 0 else dist.recv(tensor, peer)
            return
        for step in range(20):
            time.sleep([0.05, 0.05, 0.05, 1.2][step % 4] * (rank == 2) / 2)
            dist.send(tensor, peer) if rank == 2 else dist.recv(tensor, peer)
        """,
        seconds=4,
    ),
    program(
        "ranks_wait_for_one_that_is_busy_with_another",
        "slow and busy ranks",
        "Rank 0 waits for rank 1, which waits for rank 2, which serves rank 3 for 3 s first.",
        NONE,
        4,
        """
        import time
        tensor = torch.ones(4)
        if rank < 2:
            dist.recv(tensor, rank + 1)
        for _ in range(60 if rank > 1 else 0):
            time.sleep(0.05)
            dist.recv(tensor, 3) if rank == 2 else dist.send(tensor, 2)
        if 0 < rank < 3:
            dist.send(tensor, rank - 1)
        """,
        seconds=4,
    ),
    program(
        "groups_of_different_speed",
        "slow and busy ranks",
        "One pair reduces often, the other pair rarely, and all meet in a barrier.",
        NONE,
        4,
        """
        import time
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for _ in range(60 if rank < 2 else 2):
            time.sleep(0.05 if rank == 0 else 1.5 if rank == 3 else 0)
            dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
        dist.barrier()
        """,
        seconds=4,
    ),
]

PROGRAMS = [*GROUPS, *MESSAGES, *SIDE_BY_SIDE]
