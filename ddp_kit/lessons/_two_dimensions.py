"""A GPT on a mesh of two dimensions: data parallel along one, tensor parallel along the other.

By hand with the groups of the mesh, and with PyTorch's parallelize_module and fully_shard; with
activation checkpointing and bfloat16, and what a rank then holds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ddp_kit import device
from ddp_kit.lessons._gpt import GPT, batches, loss_of, make_gpt, part_of
from ddp_kit.lessons.tensor_parallel import cut_block, gather_parameters
from ddp_kit.lessons.zero import ADAM, BATCH, SGD, memory
from ddp_kit.trace import Trace
from ddp_kit.trace.bytes_sent import bytes_sent

# It warns in each process, with the time, that a parameter cut twice is gathered in two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

Tensors = dict[str, torch.Tensor]


def train_by_hand(
    rank: int, world_size: int, optimizer_cls: Callable = SGD, tp: int = 2, steps: int = 3
) -> Tensors:
    """Train a GPT on a mesh of world_size / tp times tp ranks; return its whole parameters."""
    mesh = init_device_mesh(device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh.get_group("dp"), mesh.get_group("tp")
    model = make_gpt()
    for block in model.blocks:
        cut_block(block, group=tensor)
    optimizer = optimizer_cls(model.parameters())
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        loss_of(model, *mine).backward()
        for parameter in model.parameters():
            parameter.grad /= mesh["dp"].size()
            dist.all_reduce(parameter.grad, group=data)
        optimizer.step()
    return gather_parameters(model, tensor)


def parallelize_2d(
    model: GPT, mesh: DeviceMesh, recompute: bool = False, dtype: torch.dtype | None = None
) -> GPT:
    """Make a GPT tensor parallel along mesh["tp"], and shard it along mesh["dp"]; return it.

    recompute: each block keeps its input only, and computes the rest again in backward. dtype: of
    forward and backward; None: that of the parameters.
    """
    same = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {"attention": same, "attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    for name in ("attention.query", "attention.key", "attention.value", "up"):
        plan[name] = ColwiseParallel()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        if recompute:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=torch.float32)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def train_2d(
    rank: int,
    world_size: int,
    optimizer_cls: Callable = SGD,
    tp: int = 2,
    steps: int = 3,
    recompute: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensors:
    """Train as `train_by_hand` does, with fully_shard and parallelize_module.

    recompute, dtype: as in `parallelize_2d`.
    """
    mesh = init_device_mesh(device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_2d(make_gpt(), mesh, recompute, dtype)
    optimizer = optimizer_cls(model.parameters())
    for batch in batches(BATCH, steps):
        optimizer.zero_grad()
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        loss_of(model, *mine).backward()
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


class Kept:
    """Counts the memory of what autograd keeps for the backward while the block runs.

    Several views of one memory count once. Memory that is freed meanwhile does not count: FSDP
    frees the whole parameters of a block after its forward.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor.detach())
        return tensor

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def nbytes(self, seen: set[int]) -> int:
        """Return the bytes that are in memory now, but not those that were `seen` elsewhere."""
        return sum(memory(tensor, seen) for tensor in self.tensors)


def hold(
    rank: int,
    world_size: int,
    tp: int = 2,
    recompute: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, dict[str, int]], Tensors]:
    """Return the bytes that this rank holds in its second step with Adam, and its parameters.

    The bytes are by moment and kind. recompute, dtype: as in `parallelize_2d`. The parameters are
    whole.
    """
    mesh = init_device_mesh(device().type, (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_2d(make_gpt(), mesh, recompute, dtype)
    optimizer, moments = ADAM(model.parameters()), {}
    sharded = [parameter.to_local() for parameter in model.parameters()]

    def note(moment: str, kept: Kept | None = None) -> None:
        seen: set[int] = set()
        states = [value for state in optimizer.state.values() for value in state.values()]
        kinds = {
            "parameters": sharded,
            "gathered parameters": list(model.parameters()),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "optimizer": [state for state in states if state.ndim],  # step counts are tiny
        }
        moments[moment] = {kind: sum(memory(t, seen) for t in kinds[kind]) for kind in kinds}
        moments[moment]["activations"] = kept.nbytes(seen) if kept else 0

    for batch in batches(BATCH, 2):
        optimizer.zero_grad()
        note("before")
        mine = part_of(batch, mesh.get_local_rank("dp"), mesh["dp"].size())
        with Kept() as kept:
            loss = loss_of(model, *mine)
        note("after forward", kept)
        del kept
        loss.backward()
        note("after backward")
        optimizer.step()
    return moments, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def calls_along(trace: Trace, tp: int, rank: int = 0) -> dict[str, Counter[str]]:
    """Return the bytes that a rank sent along "dp" and "tp", by call; new_group does not count."""
    found: dict[str, Counter[str]] = {"dp": Counter(), "tp": Counter()}
    for event in trace:
        if event.rank == rank and event.op != "new_group":
            ranks = event.group.ranks
            along = "tp" if len(ranks) == tp and ranks[-1] - ranks[0] == tp - 1 else "dp"
            found[along][event.op] += round(bytes_sent(event))
    return found
