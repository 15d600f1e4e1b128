"""Process groups: created by some ranks, in another order, or used by ranks outside them."""

from __future__ import annotations

from calls import ALL, BARRIER, FORMS, GATHERING, REDUCING, ROOTED, UNROOTED
from program import DEADLOCK, MISMATCH, RAISED, each, program

MEMBERS = [
    *each(
        ALL,
        "${name}_skipped_in_a_group",
        "group",
        "Of the group of ranks 0 and 1, only rank 0 calls $name.",
        DEADLOCK,
        3,
        """
        group = dist.new_group([0, 1])
        world_size = 2
        if rank == 0:
            $setup
            $in_group  # fault: 0; absent: 1
        """,
    ),
    *each(
        [*REDUCING[:1], *GATHERING, *ROOTED, BARRIER],
        "${name}_in_the_world_and_in_a_group",
        "group",
        "Rank 0 calls $name in its group, rank 1 in the world: the same ranks, but not the same.",
        DEADLOCK,
        2,
        """
        $setup
        group = dist.new_group([0, 1])
        if rank == 0:
            $in_group  # fault: 0
        else:
            $call  # fault: 1
        """,
    ),
    *each(
        UNROOTED,
        "${name}_in_two_groups_in_other_order",
        "group",
        "Rank 0 calls $name in the first group and then in the second, rank 1 the other way round.",
        DEADLOCK,
        2,
        """
        $setup
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        for group in groups if rank == 0 else groups[::-1]:
            $in_group  # fault: all
        """,
    ),
    *each(
        [REDUCING[0], GATHERING[0], BARRIER],
        "${name}_in_a_ring_of_groups",
        "group",
        "Each rank begins with the group that it shares with the next rank.",
        DEADLOCK,
        3,
        """
        pairs = [dist.new_group([n, (n + 1) % 3]) for n in range(3)]
        world_size = 2
        $setup
        for group in [pairs[rank], pairs[rank - 1]]:
            $in_group  # fault: all
        """,
    ),
    *each(
        FORMS,
        "${name}_in_a_group_and_in_the_world",
        "group",
        "Rank 0 sends in a group, and rank 1 receives in the world.",
        DEADLOCK,
        2,
        """
        tensor, peer = torch.ones(4), 1 - rank
        group = dist.new_group([0, 1])
        if rank == 0:
            $send_in_group  # fault: 0
        else:
            $recv  # fault: 1
        """,
    ),
    *each(
        FORMS,
        "${name}_to_a_rank_outside_the_group",
        "group",
        "Rank 0 sends in its group to rank 2, which is no member.",
        RAISED,
        3,
        """
        tensor, peer = torch.ones(4), 2
        group = dist.new_group([0, 1])
        if rank == 0:
            $send_in_group  # fault: 0
        """,
    ),
    *each(
        ROOTED,
        "${name}_with_a_root_outside_the_group",
        "group",
        "The root of $name, rank 0, is no member of the group.",
        RAISED,
        3,
        """
        group = dist.new_group([1, 2])
        if rank > 0:
            $setup
            $in_group  # fault: 1, 2
        """,
    ),
    program(
        "rank_in_the_group_taken_for_the_rank",
        "group",
        "src is a rank of the world, but is given as the index in the group.",
        RAISED,
        4,
        """
        group = dist.new_group([2, 3])
        if rank >= 2:
            dist.broadcast(torch.ones(4), src=0, group=group)  # fault: 2, 3
        """,
    ),
]

CREATION = [
    program(
        "group_created_by_its_members_only",
        "group",
        "Only the members call new_group, but every rank has to.",
        MISMATCH,
        3,
        """
        if rank < 2:
            dist.new_group([0, 1])  # fault: 0, 1; absent: 2
        """,
    ),
    program(
        "group_created_by_rank_0_only",
        "group",
        "Only rank 0 creates a group, then all ranks meet in a barrier.",
        MISMATCH,
        2,
        """
        if rank == 0:
            dist.new_group([0, 1])  # fault: 0
        dist.barrier()  # fault: 1
        """,
    ),
    program(
        "groups_created_in_other_order",
        "group",
        "Rank 1 creates the two groups in the other order.",
        MISMATCH,
        3,
        """
        pairs = [[0, 1], [1, 2]]
        for pair in pairs[::-1] if rank == 1 else pairs:
            dist.new_group(pair)  # fault: 1; held up: 0, 2
        """,
    ),
    program(
        "groups_created_from_a_set",
        "group",
        "The order of the groups follows the own rank, so no two ranks have the same.",
        MISMATCH,
        3,
        """
        for other in [(rank + 1) % 3, (rank + 2) % 3]:
            dist.new_group(sorted([rank, other]))  # fault: all
        """,
    ),
    program(
        "each_rank_creates_a_group_of_its_own",
        "group",
        "Each rank creates the group of itself alone.",
        MISMATCH,
        2,
        """
        dist.new_group([rank])  # fault: all
        """,
    ),
    program(
        "group_with_a_rank_that_does_not_exist",
        "group",
        "The group includes rank 2 of 2.",
        RAISED,
        2,
        """
        dist.new_group([0, 1, 2])  # fault: all
        """,
    ),
    program(
        "group_with_a_rank_twice",
        "group",
        "The group lists rank 0 twice.",
        RAISED,
        2,
        """
        dist.new_group([0, 0])  # fault: all
        """,
    ),
    program(
        "all_reduce_after_destroy_process_group",
        "group",
        "The last all_reduce comes after destroy_process_group.",
        RAISED,
        2,
        """
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        dist.all_reduce(torch.ones(1))  # fault: all
        """,
    ),
    program(
        "split_by_some_ranks_only",
        "group",
        "new_subgroups_by_enumeration is called by the members of its first group only.",
        MISMATCH,
        4,
        """
        if rank < 2:
            dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])  # fault: 0, 1
        dist.barrier()  # fault: 2, 3
        """,
    ),
    program(
        "subgroups_that_do_not_divide_the_world",
        "group",
        "Three ranks cannot be divided into groups of two.",
        RAISED,
        3,
        """
        dist.new_subgroups(2)  # fault: all
        """,
    ),
]

PROGRAMS = [*MEMBERS, *CREATION]
