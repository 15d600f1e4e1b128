"""Errors of ranks end with what usually helps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_kit as kit
from ddp_kit.error_hints import hint_for

pytestmark = pytest.mark.usefixtures("forked_ranks")


def model(batch_norm=False):
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2) if batch_norm else nn.Linear(2, 2))


ON_GPUS = {
    "to the rank": lambda rank: torch.ones(1).to(rank),
    "set_device": torch.cuda.set_device,
    "a stream": lambda rank: torch.cuda.Stream(),
    "a type": lambda rank: torch.ones(1).type(torch.cuda.FloatTensor),
    "device_count": lambda rank: rank % torch.cuda.device_count(),
    "pinned": lambda rank: torch.ones(1).pin_memory(),
    "mps": lambda rank: torch.ones(1).to("mps"),
    "a tensor on mps": lambda rank: torch.ones(1, device="mps"),
    "device_ids": lambda rank: DistributedDataParallel(
        model(), device_ids=[rank], output_device=rank
    ),
    "one device_id": lambda rank: DistributedDataParallel(model(), device_ids=[0]),
    "SyncBatchNorm": lambda rank: DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(model(batch_norm=True))
    ),
    "the accelerator": lambda rank: torch.accelerator.current_accelerator().type,
    "nccl": lambda rank: dist.new_group(backend="nccl"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("call", ON_GPUS.values(), ids=ON_GPUS)
def test_code_for_gpus_leads_to_the_device_of_the_kit(call):
    def worker(rank, world_size):
        call(rank)

    with pytest.raises(kit.RankError) as caught:
        kit.run(worker, world_size=2)
    assert str(caught.value).startswith("ranks 0 and 1 raised ")  # as one
    assert "kit.device()" in caught.value.hint
    assert str(caught.value).endswith(f"\n{caught.value.hint}")


def reuse(rank):
    class Twice(nn.Linear):
        def forward(self, x):
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)
            return x

    wrapped = DistributedDataParallel(Twice(2, 2), find_unused_parameters=True)
    wrapped(torch.ones(1, 2, requires_grad=True)).sum().backward()


OF_DDP = {
    "use_reentrant=False": reuse,
    "before DDP wraps": lambda rank: DistributedDataParallel(model().requires_grad_(False)),
    "Build the same model": lambda rank: DistributedDataParallel(nn.Linear(2 + rank, 2)),
    "write .module.weight": lambda rank: DistributedDataParallel(nn.Linear(2, 2)).weight,
    "before DDP wraps it": lambda rank: DistributedDataParallel(model()).load_state_dict(
        model().state_dict()
    ),
    "save model.module": lambda rank: model().load_state_dict(
        DistributedDataParallel(model()).state_dict()
    ),
}


@pytest.mark.parametrize(("hint", "call"), OF_DDP.items(), ids=OF_DDP)
def test_errors_of_ddp_have_a_hint(hint, call):
    def worker(rank, world_size):
        call(rank)

    with pytest.raises(kit.RankError) as caught:
        kit.run(worker, world_size=2)
    assert hint in caught.value.hint


def test_a_parameter_that_is_used_twice_is_named():
    with pytest.raises(kit.RankError, match=r"with name \.(weight|bias) has been marked as ready"):
        kit.run(lambda rank, world_size: reuse(rank), world_size=2)


def test_the_level_of_debugging_stays_as_it_was():
    def worker(rank, world_size):
        DistributedDataParallel(nn.Linear(2, 2))
        return dist.get_debug_level() == dist.DebugLevel.OFF

    assert list(kit.run(worker, world_size=2)) == [True, True]


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("RuntimeError: No CUDA GPUs are available\nNone", "kit.device()"),
        ("AcceleratorError: CUDA error: invalid device ordinal\nNone", "kit.device()"),
        (
            "AttributeError: 'int' object has no attribute 'barrier'\ndist.barrier()",
            "dist is a variable of type int here: give",
        ),
        (
            "UnboundLocalError: cannot access local variable 'dist' where it is not associated "
            "with a value\ndist.barrier()",
            "dist is a local variable",
        ),
        ("AttributeError: 'int' object has no attribute 'barrier'\nother.barrier()", ""),
        ("ValueError: expected 2\nx.to(kit.device())", ""),
    ],
)
def test_a_hint_is_found_by_the_text_and_the_line(error, hint):
    found = hint_for(error)
    assert hint in found if hint else found == ""
