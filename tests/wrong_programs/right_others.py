"""Right programs: order, errors that are handled, stores, objects, models that are trained."""

from __future__ import annotations

import textwrap

from data_parallel import ddp
from fsdp_and_pipelines import fsdp, pipeline
from meshes import on_mesh
from program import NONE, Program, program

LEAVE_WORLD = """\
import time
store = dist.distributed_c10d._get_default_store()
dist.destroy_process_group()
"""


def in_other_worlds(name: str, what: str, size: int, body: str) -> Program:
    """Return a right program whose ranks leave their world, and form others."""
    body = LEAVE_WORLD + textwrap.dedent(body).strip("\n")
    return program(name, "group", what, NONE, size, body)


PROGRAMS = [
    in_other_worlds(
        "world_with_its_ranks_in_reverse",
        "The ranks form a world in which the last one is rank 0, which sends late.",
        3,
        """
        store = dist.PrefixStore("reversed", store)
        dist.init_process_group(
            "gloo", store=store, rank=world_size - 1 - rank, world_size=world_size
        )
        tensor = torch.ones(4)
        dist.broadcast(tensor, 0)
        if dist.get_rank() == 0:
            time.sleep(2)
            dist.send(tensor, 1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, 0)
        """,
    ),
    in_other_worlds(
        "world_without_rank_0",
        "Ranks 1 and 2 form a world of two, and rank 0 returns late.",
        3,
        """
        if rank == 0:
            time.sleep(3)
            return
        store = dist.PrefixStore("without 0", store)
        dist.init_process_group("gloo", store=store, rank=rank - 1, world_size=2)
        time.sleep(2 * (rank == 1))
        dist.all_reduce(torch.ones(4))
        """,
    ),
    in_other_worlds(
        "two_worlds_side_by_side",
        "Two pairs of ranks form a world each, and reduce other tensors.",
        4,
        """
        store = dist.PrefixStore(f"pair {rank // 2}", store)
        dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2)
        dist.all_reduce(torch.ones(4 if rank < 2 else 7))
        if rank >= 2:
            dist.barrier()
        """,
    ),
    program(
        "new_group_that_a_non_member_creates_later",
        "group",
        "Rank 2 creates the group of the others after a message that comes once they have it.",
        NONE,
        3,
        """
        import time
        if rank == 2:
            dist.recv(torch.ones(4), 0)
        time.sleep(2 * (rank == 1))
        dist.new_group([0, 1])
        if rank == 0:
            dist.send(torch.ones(4), 2)
        """,
    ),
    program(
        "the_later_receive_is_waited_for_first",
        "message matching",
        "Two receives from any source are posted, and the second is waited for first.",
        NONE,
        2,
        """
        if rank == 0:
            first, second = dist.irecv(torch.zeros(4)), dist.irecv(torch.zeros(8))
            second.wait()
            first.wait()
        else:
            dist.send(torch.ones(4), 0)
            dist.send(torch.ones(8), 0)
        """,
    ),
    program(
        "tags_in_other_order_with_isend",
        "tag",
        "Rank 1 receives in the other order, and rank 0 has started both sends.",
        NONE,
        2,
        """
        if rank == 0:
            works = [dist.isend(torch.ones(4), 1, tag=tag) for tag in (1, 2)]
            for work in works:
                work.wait()
        else:
            for tag in (2, 1):
                dist.recv(torch.zeros(4), 0, tag=tag)
        """,
    ),
    program(
        "process_group_created_again",
        "group",
        "The ranks leave the process group after an all_reduce, and form a new one.",
        NONE,
        2,
        """
        import tempfile
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        dist.destroy_process_group()
        store = dist.FileStore(folder[0] + "/store", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
        if rank == 0:
            import shutil
            shutil.rmtree(folder[0])
        """,
    ),
    program(
        "group_with_local_synchronization",
        "group",
        "Only the members create the group, as use_local_synchronization allows.",
        NONE,
        3,
        """
        if rank < 2:
            group = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(4), group=group)
        """,
    ),
    program(
        "an_error_that_all_ranks_handle",
        "invalid argument",
        "A refused call is caught, and the ranks go on.",
        NONE,
        2,
        """
        try:
            dist.send(torch.ones(4), rank)
        except ValueError:
            pass
        dist.barrier()
        """,
    ),
    program(
        "a_rank_writes_what_the_other_reads",
        "stores and barriers",
        "Rank 1 waits for a key that rank 0 sets after 2 s.",
        NONE,
        2,
        """
        import time
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            time.sleep(2)
            store.set("address", "here")
        else:
            assert store.get("address") == b"here"
        """,
        seconds=2,
    ),
    program(
        "a_counter_is_polled",
        "stores and barriers",
        "The ranks poll a counter until both have arrived.",
        NONE,
        2,
        """
        import time
        store = dist.distributed_c10d._get_default_store()
        time.sleep(rank)
        store.add("arrived", 1)
        while store.add("arrived", 0) < world_size:
            time.sleep(0.05)
        dist.barrier()
        """,
        seconds=1,
    ),
    program(
        "monitored_barrier_by_all",
        "stores and barriers",
        "All ranks call monitored_barrier, one of them a second late.",
        NONE,
        3,
        """
        import time
        time.sleep(rank == 1)
        dist.monitored_barrier()
        """,
        seconds=1,
    ),
    program(
        "coalesced_all_reduces",
        "coalesced calls",
        "All ranks reduce the same lists.",
        NONE,
        2,
        """
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
        dist.all_reduce_coalesced([torch.ones(2)], async_op=True).wait()
        """,
    ),
    program(
        "object_lists_of_other_contents",
        "object collectives",
        "The objects of the ranks have very different sizes.",
        NONE,
        3,
        """
        objects = [None] * world_size
        dist.all_gather_object(objects, "x" * 10 ** (2 * rank))
        received = [None, None]
        if rank == 0:
            dist.send_object_list(["a", list(range(1000))], 1)
        elif rank == 1:
            dist.recv_object_list(received, 0)
        """,
    ),
    program(
        "a_batch_with_both_neighbours",
        "batch_isend_irecv",
        "Every rank exchanges with both neighbours in one batch.",
        NONE,
        4,
        """
        batch = []
        for step in (-1, 1):
            peer = (rank + step) % world_size
            batch.append(dist.P2POp(dist.isend, torch.ones(4), peer, tag=step + 1))
            batch.append(dist.P2POp(dist.irecv, torch.ones(4), peer, tag=1 - step))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        """,
    ),
    ddp(
        "training_with_ddp",
        "Both ranks train for three steps.",
        NONE,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        """,
    ),
    ddp(
        "uneven_batches_with_join",
        "Rank 0 has one batch more, and join lets it.",
        NONE,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        with model.join():
            for _ in range(3 - rank):
                model(torch.ones(1, 2)).sum().backward()
        """,
    ),
    ddp(
        "uneven_batches_with_join_and_unused_parameters",
        "Rank 0 has one batch more, and DDP looks for unused parameters.",
        NONE,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)
        with model.join():
            for _ in range(3 - rank):
                model(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        """,
    ),
    program(
        "coalesced_all_reduce_asked_later",
        "coalesced calls",
        "The ranks compute, ask whether the all_reduce is done, and only then wait.",
        NONE,
        2,
        """
        future = dist.all_reduce_coalesced([torch.ones(2)], async_op=True)
        torch.ones(50, 50).matmul(torch.ones(50, 50))
        if not future.done():
            torch.futures.wait_all([future])
        """,
    ),
    ddp(
        "accumulation_on_all_ranks",
        "All ranks synchronize in every second step.",
        NONE,
        2,
        """
        from contextlib import nullcontext
        model = DDP(torch.nn.Linear(2, 2))
        for step in range(4):
            with model.no_sync() if step % 2 == 0 else nullcontext():
                model(torch.ones(1, 2)).sum().backward()
        """,
    ),
    ddp(
        "evaluation_of_the_module_on_rank_0",
        "Rank 0 evaluates the module inside the DDP model, which sends nothing.",
        NONE,
        2,
        """
        model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        model(torch.randn(4, 2)).sum().backward()
        if rank == 0:
            model.module(torch.randn(4, 2))
        dist.barrier()
        """,
    ),
    ddp(
        "unused_parameters_that_ddp_looks_for",
        "Each rank uses another layer, and DDP looks for unused parameters.",
        NONE,
        2,
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

            def forward(self, x):
                return self.layers[rank](x)

        model = DDP(Net(), find_unused_parameters=True)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        """,
    ),
    on_mesh(
        "sharded_tensor_gathered_by_all",
        "All ranks gather the whole tensor and redistribute it.",
        NONE,
        2,
        """
        tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        assert tensor.full_tensor().sum() == 28
        assert tensor.redistribute(mesh, [Replicate()]).to_local().sum() == 28
        """,
    ),
    on_mesh(
        "tensor_parallel_layer_called_by_all",
        "All ranks call the layer with the same batch.",
        NONE,
        2,
        """
        from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
        layer = parallelize_module(layer, mesh, {"0": RowwiseParallel()})
        layer(torch.ones(2, 2)).sum().item()
        """,
    ),
    fsdp(
        "training_with_fsdp",
        "Both ranks train a sharded model.",
        NONE,
        2,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
        """,
    ),
    pipeline(
        "pipeline_of_two_stages",
        "Both stages run two steps.",
        NONE,
        2,
        """
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2)
        for _ in range(2):
            schedule.step(*[torch.ones(4, 4)] * (rank == 0))
        """,
    ),
]
