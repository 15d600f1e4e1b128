"""FSDP2 on a mesh of the CPU, and pipelines."""

from __future__ import annotations

import textwrap

from program import DEADLOCK, MISMATCH, RAISED, Program, program

FSDP = """\
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (world_size,))
model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
"""
PIPELINE = """\
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
layer = torch.nn.Linear(4, 4)
"""


def fsdp(name: str, wrong: str, expected: str, size: int, body: str, **more) -> Program:
    """Return a program that begins with FSDP."""
    body = FSDP + textwrap.dedent(body).strip("\n")
    return program(name, "FSDP2", wrong, expected, size, body, **more)


def pipeline(name: str, wrong: str, expected: str, size: int, body: str, **more) -> Program:
    """Return a program that begins with PIPELINE."""
    body = PIPELINE + textwrap.dedent(body).strip("\n")
    return program(name, "pipelining", wrong, expected, size, body, **more)


SHARDED = [
    fsdp(
        "sharded_forward_on_one_rank",
        "Rank 1 skips the forward, which gathers the parameters.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            model(torch.ones(1, 4))  # fault: 0; absent: 1
        """,
    ),
    fsdp(
        "sharded_backward_on_one_rank",
        "Rank 1 skips the backward, which scatters the gradients.",
        DEADLOCK,
        2,
        """
        loss = model(torch.ones(1, 4)).sum()
        if rank == 0:
            loss.backward()  # fault: 0; absent: 1
        """,
    ),
    fsdp(
        "sharded_uneven_batches",
        "Rank 0 has one batch more.",
        DEADLOCK,
        2,
        """
        for _ in range(2 - rank):
            model(torch.ones(1, 4)).sum().backward()  # fault: 0; absent: 1
        """,
    ),
    fsdp(
        "sharded_model_evaluated_on_rank_0",
        "Rank 0 evaluates by itself while rank 1 waits in the barrier.",
        MISMATCH,
        2,
        """
        model(torch.ones(1, 4)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                model(torch.ones(1, 4))  # fault: 0
        dist.barrier()  # fault: 1
        """,
    ),
    fsdp(
        "sharded_weight_saved_on_rank_0",
        "Rank 0 gathers the full weight to save it, and the others do not.",
        DEADLOCK,
        2,
        """
        if rank == 0:
            state = {n: p.full_tensor() for n, p in model.named_parameters()}  # fault: 0; absent: 1
        """,
    ),
    fsdp(
        "sharded_norm_on_rank_0",
        "Rank 0 logs the norm of the gradients, which needs all shards.",
        DEADLOCK,
        2,
        """
        model(torch.ones(1, 4)).sum().backward()
        if rank == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault: 0; absent: 1
        """,
    ),
    program(
        "sharded_models_of_other_shapes",
        "FSDP2",
        "The layer has 4 outputs on rank 0 and 6 on rank 1.",
        MISMATCH,
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (world_size,))
        model = fully_shard(torch.nn.Linear(4, 4 + 2 * rank), mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()  # fault: all
        """,
    ),
    program(
        "sharded_in_other_units",
        "FSDP2",
        "Rank 0 shards each layer by itself, rank 1 both together.",
        MISMATCH,
        2,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (world_size,))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if rank == 0:
            fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()  # fault: all
        """,
    ),
]

STAGES = [
    pipeline(
        "pipeline_without_its_last_stage",
        "The last stage never runs its schedule.",
        DEADLOCK,
        2,
        """
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        if rank == 0:
            schedule.step(torch.ones(4, 4))  # fault: 0; absent: 1
        """,
    ),
    pipeline(
        "pipeline_without_its_first_stage",
        "The first stage has no batch left.",
        DEADLOCK,
        2,
        """
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        if rank == 1:
            schedule.step()  # fault: 1; absent: 0
        """,
    ),
    pipeline(
        "pipeline_with_one_step_more",
        "The last stage makes one step more than the first.",
        DEADLOCK,
        2,
        """
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        for _ in range(1 + rank):
            schedule.step(*[torch.ones(4, 4)] * (rank == 0))  # fault: 1; absent: 0
        """,
    ),
    pipeline(
        "pipeline_with_other_microbatches",
        "The first stage has 2 microbatches, the last one 4.",
        DEADLOCK,
        2,
        """
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2 + 2 * rank)
        schedule.step(*[torch.ones(4, 4)] * (rank == 0))  # fault: 1; absent: 0
        """,
    ),
    pipeline(
        "pipeline_with_two_first_stages",
        "Both ranks take themselves for stage 0.",
        RAISED,
        2,
        """
        stage = PipelineStage(layer, 0, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        schedule.step(torch.ones(4, 4))  # fault: 1; held up: 0
        """,
    ),
    pipeline(
        "pipeline_stage_that_does_not_exist",
        "Stages count from 0, so rank 1 asks for stage 2 of 2.",
        RAISED,
        2,
        """
        if rank == 1:
            PipelineStage(layer, rank + 1, 2, torch.device("cpu"))  # fault: 1
        """,
    ),
]

PROGRAMS = [*SHARDED, *STAGES]
