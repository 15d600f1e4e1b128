"""Arguments that PyTorch refuses. The error has to come through, with its rank and line."""

from __future__ import annotations

from calls import COLLECTIVES, REDUCING, ROOTED
from program import MISMATCH, RAISED, Program, each, program

CATEGORY = "invalid argument"


def refused(name: str, wrong: str, body: str) -> Program:
    """Return a program in which both ranks make the same call that PyTorch refuses."""
    return program(name, CATEGORY, wrong, RAISED, 2, body)


PROGRAMS = [
    *each(
        ROOTED,
        "${name}_with_a_root_that_does_not_exist",
        "root",
        "The root of $name is rank 2 of 2.",
        RAISED,
        2,
        """
        $setup
        root = 2
        $root  # fault: all
        """,
    ),
    *each(
        REDUCING,
        "${name}_with_a_bitwise_op_on_floats",
        "op",
        "BAND needs integers.",
        RAISED,
        2,
        """
        $setup
        op = dist.ReduceOp.BAND
        $with_op  # fault: all
        """,
    ),
    *each(
        REDUCING[:1],
        "${name}_with_the_name_of_an_op",
        "op",
        "The op is given as a string.",
        RAISED,
        2,
        """
        $setup
        op = "sum"
        $with_op  # fault: all
        """,
    ),
    *each(
        COLLECTIVES[:4],
        "${name}_by_one_rank_with_a_number",
        CATEGORY,
        "Rank 1 passes a number instead of a tensor to its first call.",
        RAISED,
        2,
        """
        $setup
        if rank == 1:
            tensor = 1.0
        $call  # fault: 1; held up: 0
        """,
    ),
    refused(
        "all_gather_into_too_few_tensors",
        "The list has one tensor less than there are ranks.",
        "dist.all_gather([torch.ones(4)], torch.ones(4))  # fault: all",
    ),
    refused(
        "all_gather_into_a_tensor_that_is_too_small",
        "The output has room for one rank only.",
        "dist.all_gather_into_tensor(torch.ones(4), torch.ones(4))  # fault: all",
    ),
    refused(
        "reduce_scatter_of_too_few_tensors",
        "The list has one tensor less than there are ranks.",
        "dist.reduce_scatter(torch.ones(4), [torch.ones(4)])  # fault: all",
    ),
    refused(
        "reduce_scatter_tensor_that_does_not_divide",
        "5 numbers cannot be divided among 2 ranks.",
        "dist.reduce_scatter_tensor(torch.ones(4), torch.ones(5))  # fault: all",
    ),
    refused(
        "all_to_all_of_too_few_tensors",
        "The lists have one tensor less than there are ranks.",
        "dist.all_to_all([torch.ones(4)], [torch.ones(4)])  # fault: all",
    ),
    refused(
        "all_to_all_single_with_splits_that_do_not_add_up",
        "The splits fit those of the other rank, but add up to 3, and there are 4 rows.",
        """
        there = [[2, 2], [1, 1]][rank]
        received = torch.ones(sum(there))
        dist.all_to_all_single(received, torch.ones(4), there, [2, 1])  # fault: all
        """,
    ),
    refused(
        "all_reduce_of_a_list",
        "all_reduce takes one tensor.",
        "dist.all_reduce([torch.ones(4)])  # fault: all",
    ),
    refused(
        "all_gather_of_other_dtype_than_its_list",
        "The list has float64, the tensor float32.",
        """
        parts = [torch.ones(4, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(parts, torch.ones(4))  # fault: all
        """,
    ),
    refused(
        "all_reduce_of_a_sparse_tensor_with_max",
        "gloo reduces sparse tensors with SUM only.",
        "dist.all_reduce(torch.eye(2).to_sparse(), op=dist.ReduceOp.MAX)  # fault: all",
    ),
    refused(
        "send_of_a_tensor_that_is_not_contiguous",
        "gloo sends contiguous tensors only.",
        """
        tensor = torch.ones(4, 4).t()[:, :2]
        if rank == 0:
            dist.send(tensor, 1)  # fault: 0
        else:
            dist.recv(torch.ones(4, 2), 0)  # held up: 1
        """,
    ),
    refused(
        "recv_into_a_number",
        "recv takes a tensor.",
        "dist.recv(0.0, 1 - rank)  # fault: all",
    ),
    refused(
        "send_without_a_destination",
        "send needs dst or group_dst.",
        "dist.send(torch.ones(4))  # fault: all",
    ),
    refused(
        "send_to_a_float",
        "A rank is an int.",
        "dist.send(torch.ones(4), 1.0 - rank)  # fault: all",
    ),
    refused(
        "scatter_with_a_list_on_both_ranks",
        "Only the source passes a list; rank 1 passes one, too.",
        """
        parts = [torch.ones(4), torch.ones(4)]
        dist.scatter(torch.ones(4), parts, src=0)  # fault: 1; held up: 0
        """,
    ),
    refused(
        "scatter_without_a_list",
        "The source passes no list.",
        "dist.scatter(torch.ones(4), src=0)  # fault: 0; held up: 1",
    ),
    refused(
        "gather_without_a_list",
        "The destination passes no list.",
        "dist.gather(torch.ones(4), dst=0)  # fault: 0; held up: 1",
    ),
    refused(
        "gather_with_a_list_on_both_ranks",
        "Only the destination passes a list; rank 1 passes one, too.",
        """
        parts = [torch.ones(4), torch.ones(4)]
        dist.gather(torch.ones(4), parts, dst=0)  # fault: 1; held up: 0
        """,
    ),
    refused(
        "group_of_a_list_of_ranks",
        "group takes a ProcessGroup, not a list of ranks.",
        "dist.all_reduce(torch.ones(4), group=[0, 1])  # fault: all",
    ),
    refused(
        "second_init_process_group",
        "The process group exists already.",
        'dist.init_process_group("gloo")  # fault: all',
    ),
    refused(
        "both_src_and_group_src",
        "src and group_src exclude each other.",
        "dist.broadcast(torch.ones(4), src=0, group_src=0)  # fault: all",
    ),
    program(
        "all_gather_into_lists_of_other_shapes",
        "count and shape",
        "Rank 1 expects 5 numbers from each rank, and rank 0 sends 4.",
        MISMATCH,
        2,
        """
        parts = [torch.ones(4 + rank) for _ in range(2)]
        dist.all_gather(parts, torch.ones(4 + rank))  # fault: all
        """,
    ),
]
