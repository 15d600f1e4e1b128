"""Right programs: functional collectives, DTensor, tensor parallel and FSDP2 on meshes."""

from __future__ import annotations

import textwrap

from fsdp_and_pipelines import fsdp
from meshes import on_mesh
from program import NONE, Program, program

SQUARE = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
"""
FUNCTIONAL = """\
from torch.distributed import _functional_collectives as functional
world, mine = dist.group.WORLD, torch.arange(4.0) + rank
"""


def functional(name: str, wrong: str, size: int, body: str, **more) -> Program:
    """Return a right program that begins with FUNCTIONAL."""
    body = FUNCTIONAL + textwrap.dedent(body).strip("\n")
    return program(name, "functional collectives", wrong, NONE, size, body, **more)


def on_square(name: str, category: str, wrong: str, body: str, **more) -> Program:
    """Return a right program that begins with SQUARE, a mesh of 2 by 2 ranks."""
    body = SQUARE + textwrap.dedent(body).strip("\n")
    return program(name, category, wrong, NONE, 4, body, **more)


PROGRAMS = [
    functional(
        "functional_collectives_by_all",
        "All ranks call the functional collectives and use what they return.",
        2,
        """
        functional.broadcast(mine, 1, world).sum().item()
        functional.all_reduce(mine, "avg", world).sum().item()
        functional.all_gather_single(mine, 0, world).sum().item()
        functional.reduce_scatter_single(mine, "sum", 0, world).sum().item()
        functional.all_to_all_single(mine, [2, 2], [2, 2], world).sum().item()
        functional.permute_tensor(mine, [1, 0], world).sum().item()
        for some in (
            functional.all_reduce_coalesced([mine, mine[:2]], "max", world),
            functional.all_gather_single_coalesced([mine, mine[:2]], world),
            functional.reduce_scatter_single_coalesced([mine, mine], "sum", [0, 0], world),
        ):
            assert len([one.sum().item() for one in some]) == 2
        """,
    ),
    functional(
        "functional_results_used_in_any_order",
        "Three all_reduces run at once, and each rank uses the results in its own order.",
        3,
        """
        totals = [functional.all_reduce(mine + n, "sum", world) for n in range(3)]
        for total in totals[rank:] + totals[:rank]:
            total.sum().item()
        """,
    ),
    functional(
        "functional_all_to_all_with_uneven_splits",
        "What a rank sends fits what the other expects, although no two splits are equal.",
        2,
        """
        sent, expected = [[1, 2], [3, 4]][rank], [[1, 3], [2, 4]][rank]
        functional.all_to_all_single(torch.ones(sum(sent)), expected, sent, world).sum().item()
        """,
    ),
    functional(
        "functional_and_plain_all_reduce",
        "Rank 0 calls the functional all_reduce, rank 1 the plain one, which fits.",
        2,
        """
        if rank == 0:
            functional.all_reduce(mine, "sum", world).sum().item()
        else:
            dist.all_reduce(mine)
        """,
    ),
    functional(
        "functional_collectives_in_groups_that_overlap",
        "Each pair of neighbours has a group, and every rank reduces in both of its own.",
        3,
        """
        pairs = [dist.new_group([n, (n + 1) % 3]) for n in range(3)]
        for n, pair in enumerate(pairs):
            if rank in (n, (n + 1) % 3):
                functional.all_reduce(mine, "max", pair).sum().item()
        """,
    ),
    functional(
        "functional_all_reduce_with_a_slow_rank",
        "Rank 1 computes for 3 s before it joins.",
        2,
        """
        import time
        time.sleep(3 * rank)
        functional.all_reduce(mine, "sum", world).sum().item()
        """,
        seconds=3,
    ),
    functional(
        "functional_all_reduce_with_a_gradient",
        "The backward of a functional all_reduce is another one.",
        2,
        """
        weight = torch.ones(4, requires_grad=True)
        total = functional.all_reduce(weight * mine, "sum", world)
        total.sum().backward()
        assert weight.grad.tolist() == (2 * mine).tolist()
        """,
    ),
    functional(
        "functional_all_reduces_in_place",
        "Both halves of a tensor are reduced at once, and one wait is for both.",
        2,
        """
        ops = vars(torch)["ops"]._c10d_functional  # which cloudpickle does not search
        for half in mine.split(2):
            ops.all_reduce_(half, "sum", world.group_name)
        assert ops.wait_tensor(mine).sum() == 16
        """,
    ),
    on_mesh(
        "redistribute_between_all_placements",
        "All ranks change the placement of a tensor from each to each.",
        NONE,
        2,
        """
        from torch.distributed.tensor import Partial
        for before in (Shard(0), Shard(1), Replicate(), Partial()):
            for after in (Shard(0), Shard(1), Replicate()):
                tensor = DTensor.from_local(torch.ones(2, 2), mesh, [before])
                tensor.redistribute(mesh, [after]).to_local().sum().item()
        """,
    ),
    on_mesh(
        "uneven_shards",
        "Five rows on three ranks: the last one has fewer.",
        NONE,
        3,
        """
        tensor = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
        assert tensor.full_tensor().sum() == 10
        assert tensor.sum().full_tensor() == 10
        """,
    ),
    on_mesh(
        "full_tensor_used_on_rank_0_only",
        "All ranks gather the tensor, and only rank 0 looks at it.",
        NONE,
        2,
        """
        full = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).full_tensor()
        if rank == 0:
            full.sum().item()
        """,
    ),
    on_mesh(
        "tensor_parallel_layers_trained",
        "Two layers, one split by columns and one by rows, are trained on the same batches.",
        NONE,
        2,
        """
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    ),
    on_mesh(
        "tensor_parallel_output_that_nobody_uses",
        "All ranks call the layer once before they begin, and drop what it returns.",
        NONE,
        2,
        """
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
        parallelize_module(layer, mesh, {"0": RowwiseParallel()})
        layer(torch.ones(2, 2))
        dist.barrier()
        """,
    ),
    on_mesh(
        "sequence_parallel_norm",
        "A norm works on parts of the sequence, and the layers around it on all of it.",
        NONE,
        2,
        """
        from torch.distributed.tensor.parallel import (
            PrepareModuleInput,
            SequenceParallel,
            parallelize_module,
        )
        model = torch.nn.Sequential(torch.nn.LayerNorm(4))
        parallelize_module(model, mesh, {"0": SequenceParallel()})
        model(torch.ones(1, 4, 4)).redistribute(mesh, [Replicate()]).sum().backward()
        """,
    ),
    fsdp(
        "sharded_norm_on_all_ranks",
        "All ranks clip the gradients of a sharded model.",
        NONE,
        2,
        """
        model(torch.ones(1, 4)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        print(norm.full_tensor().item())
        """,
    ),
    fsdp(
        "sharded_state_gathered_by_all",
        "All ranks gather the whole state, which only rank 0 keeps.",
        NONE,
        2,
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        assert len(state) == (2 if rank == 0 else 0)
        """,
    ),
    on_square(
        "redistribute_along_both_dimensions",
        "DTensor and tensor parallel",
        "A tensor is sharded along both dimensions of the mesh, replicated, and sharded again.",
        """
        tensor = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0), Shard(1)])
        whole = tensor.redistribute(mesh, [Replicate(), Replicate()])
        assert whole.to_local().sum() == 120
        whole.redistribute(mesh, [Shard(1), Shard(0)]).to_local().sum().item()
        assert (tensor @ tensor).sum().full_tensor() > 0
        """,
    ),
    on_square(
        "functional_all_reduces_along_each_dimension",
        "functional collectives",
        "Every rank reduces along its row of the mesh, and then along its column.",
        """
        from torch.distributed import _functional_collectives as functional
        row = functional.all_reduce(torch.ones(2), "sum", (mesh, 1))
        column = functional.all_reduce(torch.ones(2), "sum", (mesh, 0))
        assert (row + column).sum() == 8
        """,
    ),
    on_square(
        "tensor_parallel_within_fsdp",
        "FSDP2",
        "Each layer is split along one dimension of the mesh and sharded along the other.",
        """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["outer"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + rank // 2)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    ),
    on_square(
        "hybrid_sharding",
        "FSDP2",
        "The model is sharded along one dimension of the mesh and replicated along the other.",
        """
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.full_tensor().sum().item()
        """,
    ),
]
