"""Device meshes on the CPU: DTensor and tensor parallel."""

from __future__ import annotations

import textwrap

from program import DEADLOCK, MISMATCH, RAISED, Program, program

MESH = """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world_size,))
"""


def on_mesh(name: str, wrong: str, expected: str, size: int, body: str, **more) -> Program:
    """Return a program that begins with MESH."""
    body = MESH + textwrap.dedent(body).strip("\n")
    return program(name, "DTensor and tensor parallel", wrong, expected, size, body, **more)


PROGRAMS = [
    on_mesh(
        "full_tensor_on_rank_0_only",
        "Rank 0 gathers the whole tensor to print it.",
        DEADLOCK,
        2,
        """
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        if rank == 0:
            tensor.full_tensor().sum()  # fault: 0; absent: 1
        """,
    ),
    on_mesh(
        "redistribute_on_one_rank",
        "Only rank 1 redistributes.",
        DEADLOCK,
        2,
        """
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        if rank == 1:
            tensor.redistribute(mesh, [Replicate()]).to_local().sum()  # fault: 1; absent: 0
        """,
    ),
    on_mesh(
        "distribute_tensor_on_one_rank",
        "Only rank 0 distributes its tensor.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            distribute_tensor(torch.ones(4), mesh, [Shard(0)])  # fault: 0; absent: 1
        """,
    ),
    on_mesh(
        "redistribute_to_other_placements",
        "Rank 0 replicates the tensor, rank 1 shards it by columns.",
        MISMATCH,
        2,
        """
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        placement = [Replicate(), Shard(1)][rank]
        tensor.redistribute(mesh, [placement]).to_local().sum()  # fault: all
        """,
        unseen="on the CPU, PyTorch begins both with one all_gather of the same shapes",
    ),
    on_mesh(
        "sum_redistributed_to_other_placements",
        "Rank 0 replicates the sum, rank 1 shards it.",
        MISMATCH,
        2,
        """
        from torch.distributed.tensor import Partial
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Partial()])
        placement = [Replicate(), Shard(0)][rank]
        tensor.redistribute(mesh, [placement]).to_local().sum()  # fault: all
        """,
    ),
    on_mesh(
        "local_parts_of_other_shapes",
        "The part of rank 1 has one column more.",
        MISMATCH,
        2,
        """
        tensor = DTensor.from_local(torch.ones(2, 4 + rank), mesh, [Shard(0)], run_check=False)
        tensor.full_tensor().sum()  # fault: all
        """,
    ),
    on_mesh(
        "sum_of_a_sharded_tensor_on_one_rank",
        "Only rank 0 needs the sum, which takes an all_reduce.",
        DEADLOCK,
        2,
        """
        tensor = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        if rank == 0:
            tensor.sum().full_tensor().item()  # fault: 0; absent: 1
        """,
    ),
    on_mesh(
        "functional_all_reduce_skipped",
        "Rank 1 skips the functional all_reduce.",
        DEADLOCK,
        2,
        """
        from torch.distributed import _functional_collectives as functional
        if rank == 0:
            total = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)  # fault: 0
            total.sum().item()  # fault: 0; absent: 1
        """,
    ),
    on_mesh(
        "functional_all_reduce_of_other_shapes",
        "Rank 0 reduces 4 numbers, rank 1 five.",
        MISMATCH,
        2,
        """
        from torch.distributed import _functional_collectives as functional
        tensor = torch.ones(4 + rank)
        total = functional.all_reduce(tensor, "sum", dist.group.WORLD)  # fault: all
        total.sum().item()
        """,
    ),
    on_mesh(
        "tensor_parallel_layer_called_by_one_rank",
        "Rank 1 skips the forward of a layer whose output is reduced.",
        DEADLOCK,
        2,
        """
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
        layer = parallelize_module(layer, mesh, {"0": RowwiseParallel()})
        if rank == 0:
            layer(torch.ones(2, 2)).sum().item()  # fault: 0; absent: 1
        """,
    ),
    on_mesh(
        "tensor_parallel_with_other_batches",
        "In tensor parallel all ranks need the same batch; rank 1 has one row more.",
        MISMATCH,
        2,
        """
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
        layer = parallelize_module(layer, mesh, {"0": RowwiseParallel()})
        layer(torch.ones(2 + rank, 2)).sum().item()  # fault: all
        """,
    ),
    on_mesh(
        "replicas_that_differ",
        "The tensor is said to be replicated, but every rank has its own numbers.",
        MISMATCH,
        2,
        """
        mine = torch.full((4,), float(rank))
        DTensor.from_local(mine, mesh, [Replicate()]).full_tensor()  # fault: all
        """,
        unseen="nothing is communicated, and what should be equal is known to nobody",
    ),
    program(
        "mesh_created_by_one_rank",
        "DTensor and tensor parallel",
        "Only rank 0 creates the mesh of two dimensions, whose groups need all ranks.",
        DEADLOCK,
        4,
        """
        from torch.distributed.device_mesh import init_device_mesh
        if rank == 0:
            init_device_mesh("cpu", (2, 2))  # fault: 0; absent: 1, 2, 3
        """,
    ),
    program(
        "mesh_larger_than_the_world",
        "DTensor and tensor parallel",
        "The mesh has 4 places for 2 ranks.",
        RAISED,
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        init_device_mesh("cpu", (2, 2))  # fault: all
        """,
    ),
    program(
        "meshes_of_other_shapes",
        "DTensor and tensor parallel",
        "Rank 0 makes a mesh of 2 by 2, the others of 4 by 1.",
        MISMATCH,
        4,
        """
        from torch.distributed.device_mesh import init_device_mesh
        init_device_mesh("cpu", (2, 2) if rank == 0 else (4, 1))  # fault: 0; held up: 1, 2, 3
        """,
    ),
    program(
        "reduced_along_other_dimensions",
        "DTensor and tensor parallel",
        "Rank 3 reduces along the rows of the mesh, the others along the columns.",
        DEADLOCK,
        4,
        """
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        name = "row" if rank == 3 else "column"
        dist.all_reduce(torch.ones(2), group=mesh.get_group(name))  # fault: 2, 3; absent: 1
        """,
    ),
]
