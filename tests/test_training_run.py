"""A learner's first training run, written from scratch in a fresh notebook."""

from __future__ import annotations

import re

import pytest

CELLS = (
    """
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm.auto import tqdm

import ddp_kit as kit

def train(rank, world_size, show):
    digits = kit.mnist()
    batches = DataLoader(digits, batch_size=250, sampler=DistributedSampler(digits))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for images, labels in show(batches):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
""",
    "result = kit.run(train, tqdm, world_size=2)",
    "result = kit.run(train, kit.progress, world_size=2)",
    "result.trace.summary()",
    "kit.plot.timeline(result)",
    'kit.plot.losses(result, xlabel="step")',
)
STEPS, BYTES = 20, (784 + 1) * 10 * 4  # 10,000 digits by 2 ranks by 250; a gradient of float32


@pytest.mark.long
@pytest.mark.usefixtures("forked_spawn")
def test_a_training_run_shows_bars_its_steps_its_bytes_and_its_losses(kernel):
    kernel.set_up = ""
    kernel.run(CELLS[0])
    for cell in map(kernel.run, CELLS[1:3]):
        shown = [
            content["data"].get("text/html", "")
            for content in cell.contents("display_data", "update_display_data")
        ]
        for rank in range(2):
            bar = re.compile(rf"<th>rank&nbsp;{rank}</th>.*<progress.*&nbsp;of&nbsp;{STEPS}\b")
            assert any(map(bar.search, shown)), shown
        assert shown[-1] == ""
        assert cell.stdout == ""
    summary = kernel.run(CELLS[3]).contents("execute_result")[0]["data"]
    assert f"2 ranks, {STEPS} steps of 1 call" in summary["text/plain"]
    all_reduce = next(x for x in summary["text/plain"].splitlines() if "DDP all_reduce" in x)
    assert all_reduce.split()[3:6] == [str(STEPS), "1", f"{STEPS * BYTES:,}"]
    assert "<table" in summary["text/html"]
    picture = kernel.run(CELLS[4]).contents("execute_result")[0]["data"]
    assert f"{STEPS} training steps" in picture["text/plain"]
    assert "image/png" in picture
    losses = kernel.run(CELLS[5]).contents("execute_result")[0]["data"]
    first, last = map(float, re.findall(r"rank 0 +([\d.]+) +([\d.]+)", losses["text/plain"])[0])
    assert last < first / 2
    assert "image/png" in losses
