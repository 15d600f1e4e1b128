"""DistributedDataParallel: ranks that train other models, other batches, or in another way."""

from __future__ import annotations

import textwrap

from program import DEADLOCK, MISMATCH, RAISED, Program, program

MODEL = """\
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
"""


def ddp(name: str, wrong: str, expected: str, world_size: int, body: str, **more) -> Program:
    """Return a program that begins with MODEL."""
    body = MODEL + textwrap.dedent(body).strip("\n")
    return program(name, "DDP", wrong, expected, world_size, body, **more)


PROGRAMS = [
    ddp(
        "uneven_batches",
        "Rank 0 has one batch more than rank 1.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        for _ in range(3 - rank):
            model(torch.ones(1, 2)).sum().backward()  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "uneven_batches_then_an_all_reduce",
        "Rank 1 has one batch less, and goes on to reduce the loss.",
        MISMATCH,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        loss = torch.ones(1)
        for _ in range(3 - rank):
            model(torch.ones(1, 2)).sum().backward()  # fault: 0
        dist.all_reduce(loss)  # fault: 1
        """,
    ),
    ddp(
        "backward_skipped_by_one_rank",
        "Rank 1 skips the backward of the second step, as if its loss were not finite.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        for step in range(2):
            loss = model(torch.ones(1, 2)).sum()
            if step < 1 or rank == 0:
                loss.backward()  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "backward_on_rank_0_only",
        "Only rank 0 calls backward.",
        DEADLOCK,
        3,
        """
        model = DDP(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank == 0:
            loss.backward()  # fault: 0; absent: 1, 2
        """,
    ),
    ddp(
        "ddp_on_one_rank",
        "Only rank 1 wraps its model.",
        DEADLOCK,
        2,
        """
        if rank == 1:
            DDP(torch.nn.Linear(2, 2))  # fault: 1; absent: 0
        """,
    ),
    ddp(
        "ddp_on_one_rank_then_a_barrier",
        "Only rank 1 wraps its model; rank 0 waits in the barrier.",
        MISMATCH,
        2,
        """
        if rank == 1:
            DDP(torch.nn.Linear(2, 2))  # fault: 1
        dist.barrier()  # fault: 0
        """,
    ),
    ddp(
        "no_sync_on_one_rank",
        "Rank 1 calls its only backward inside no_sync.",
        DEADLOCK,
        2,
        """
        from contextlib import nullcontext
        model = DDP(torch.nn.Linear(2, 2))
        with model.no_sync() if rank == 1 else nullcontext():
            model(torch.ones(1, 2)).sum().backward()  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "accumulation_over_other_steps",
        "Rank 0 synchronizes every second step, rank 1 every third.",
        DEADLOCK,
        2,
        """
        from contextlib import nullcontext
        model = DDP(torch.nn.Linear(2, 2))
        for step in range(1, 5):
            last = step % (2 + rank) == 0
            with nullcontext() if last else model.no_sync():
                model(torch.ones(1, 2)).sum().backward()  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "unused_parameters",
        "A layer takes no part in the loss, so the second step never gets its gradient.",
        RAISED,
        2,
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

            def forward(self, x):
                return self.used(x)

        model = DDP(Net())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()  # fault: all
        """,
    ),
    ddp(
        "parameters_unused_on_one_rank",
        "Rank 1 skips a layer, so the next forward of rank 1 raises and rank 0 waits.",
        RAISED,
        2,
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

            def forward(self, x):
                return self.first(x) if rank == 1 else self.second(self.first(x))

        model = DDP(Net())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()  # fault: 1; held up: 0
        """,
    ),
    ddp(
        "one_parameter_more_on_one_rank",
        "The model of rank 1 has one layer more.",
        RAISED,
        2,
        """
        layers = [torch.nn.Linear(2, 2) for _ in range(1 + rank)]
        DDP(torch.nn.Sequential(*layers))  # fault: all
        """,
    ),
    ddp(
        "parameters_of_other_shapes",
        "The layer has 3 outputs on rank 0 and 4 on rank 1.",
        RAISED,
        2,
        """
        DDP(torch.nn.Linear(2, 3 + rank))  # fault: 1; held up: 0
        """,
    ),
    ddp(
        "parameters_in_another_order",
        "Rank 1 creates the two layers in the other order.",
        RAISED,
        2,
        """
        sizes = [(2, 3), (3, 2)] if rank == 0 else [(3, 2), (2, 3)]
        DDP(torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes))  # fault: 1; held up: 0
        """,
    ),
    ddp(
        "parameters_of_one_shape_in_another_order",
        "Rank 1 registers two layers of one shape in the other order: their gradients mix.",
        MISMATCH,
        2,
        """
        names = ["first", "second"][:: 1 - 2 * rank]
        model = torch.nn.ModuleDict()
        for name in names:
            model[name] = torch.nn.Linear(2, 2)
        model.forward = lambda x: model["second"](model["first"](x).relu())
        DDP(model)(torch.ones(1, 2)).sum().backward()  # fault: all
        """,
        unseen="the names of the parameters are not communicated, and all their shapes agree",
    ),
    ddp(
        "a_layer_frozen_on_one_rank",
        "Rank 1 freezes the bias.",
        RAISED,
        2,
        """
        model = torch.nn.Linear(2, 2)
        model.bias.requires_grad = rank == 0
        DDP(model)  # fault: all
        """,
    ),
    ddp(
        "evaluation_through_ddp_on_rank_0",
        "Rank 0 evaluates the wrapped model, whose buffers are broadcast to ranks that do not.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        model(torch.randn(4, 2)).sum().backward()
        if rank == 0:
            model(torch.randn(4, 2))  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "loss_reduced_on_rank_0_for_the_log",
        "Only rank 0 reduces the loss, before its backward.",
        MISMATCH,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank == 0:
            dist.all_reduce(loss.detach().clone())  # fault: 0
        loss.backward()  # fault: 1
        """,
    ),
    ddp(
        "step_skipped_by_an_exception",
        "Rank 1 catches an error of its second batch and skips the step.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        for batch in [["1 2", "3 4"], ["1 2", "3 x"]][rank]:
            try:
                inputs = torch.tensor([[float(text) for text in batch.split()]])
            except ValueError:
                continue
            model(inputs).sum().backward()  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "other_dtypes_of_the_model",
        "The model of rank 1 is float64, which DDP does not verify.",
        MISMATCH,
        2,
        """
        model = torch.nn.Linear(2, 2).to([torch.float32, torch.float64][rank])
        DDP(model)  # fault: all
        """,
    ),
    ddp(
        "find_unused_parameters_on_one_rank",
        "Rank 1 looks for unused parameters, which takes an all_reduce more.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2), find_unused_parameters=rank == 1)
        model(torch.ones(1, 2)).sum().backward()  # fault: 1; absent: 0
        """,
    ),
    ddp(
        "gradient_averaged_by_hand_on_one_rank",
        "Rank 0 averages gradients that DDP has averaged already.",
        DEADLOCK,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        if rank == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # fault: 0; absent: 1
        """,
    ),
    ddp(
        "model_without_parameters_that_need_a_gradient",
        "All parameters are frozen, so there is nothing to reduce.",
        RAISED,
        2,
        """
        model = torch.nn.Linear(2, 2).requires_grad_(False)
        DDP(model)  # fault: all
        """,
    ),
    ddp(
        "wrapped_model_not_called",
        "The loss is computed with the module instead of the DDP model: nothing is reduced.",
        MISMATCH,
        2,
        """
        module = torch.nn.Linear(2, 2)
        model = DDP(module)
        module(torch.full((1, 2), rank + 1.0)).sum().backward()  # fault: all
        """,
        unseen="each rank trains alone, as it may: which model was meant is not communicated",
    ),
    ddp(
        "seed_set_after_ddp",
        "Every rank shuffles with one seed, so all of them train on the same batches.",
        MISMATCH,
        2,
        """
        model = DDP(torch.nn.Linear(2, 2))
        order = torch.randperm(8)[:4]  # fault: all
        model(order.float().view(2, 2)).sum().backward()
        """,
        unseen="the batches are data, and equal batches may be meant",
    ),
    ddp(
        "join_used_by_one_rank",
        "Only rank 0 trains inside model.join, which makes calls of its own.",
        MISMATCH,
        2,
        """
        from contextlib import nullcontext
        model = DDP(torch.nn.Linear(2, 2))
        with model.join() if rank == 0 else nullcontext():
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()  # fault: all
        """,
    ),
]
