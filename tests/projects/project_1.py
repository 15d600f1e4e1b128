"""A solution of project 1, for teachers and tests: torchrun --nproc-per-node 2 project_1.py FOLDER

Learners do not get it. The model and the data are those of the start.
"""

import argparse
import json
import os
import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F

START = Path(__file__).parents[2] / "notebooks/projects/1_from_one_process_to_many.py"
start = SimpleNamespace(**runpy.run_path(str(START)))
STEPS, BATCH, CONTEXT = start.STEPS, start.BATCH, start.CONTEXT
EVERY = 5  # steps between two checkpoints


class Sum:
    """Adds up tensors over all ranks, and the seconds that this takes."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self, tensor):
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        self.seconds += time.perf_counter() - begin


def train_step(model, optimizer, data, step, add_up):
    """Train on this rank's part of the next batch; return the loss of the whole batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = (whole.chunk(world_size)[rank] for whole in data.batch())
    for group in optimizer.param_groups:
        group["lr"] = start.rate_of(step)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / world_size
    optimizer.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([loss.detach().view(1), *(gradient.view(-1) for gradient in gradients)])
    add_up(flat)
    loss, *sums = flat.split([1, *(gradient.numel() for gradient in gradients)])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
    optimizer.step()
    return loss.item()


def save(path, step, model, optimizer, data):
    """Save all that the next step depends on, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    state = {"next": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"generator": data.generator.get_state()}, beside)
    os.replace(beside, path)


def load(path, model, optimizer, data):
    """Load what was saved, if anything was; return the next step."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    data.generator.set_state(state["generator"])
    return state["next"]


def report(folder, steps, seconds, waited):
    """Write how fast the training was, with the shares of all ranks."""
    ranks = dist.get_world_size()
    own = steps * BATCH * CONTEXT // ranks
    each = [None] * ranks
    dist.all_gather_object(each, own)
    if dist.get_rank() == 0:
        found = {"ranks": ranks, "tokens": sum(each), "tokens_of_each_rank": each}
        found |= {"seconds": seconds, "tokens_per_second": sum(each) / seconds}
        found |= {"communication_seconds": waited, "communication_share": waited / seconds}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "speed.json").write_text(json.dumps(found))


def main(folder):
    """Train from the step after the last checkpoint to the last one."""
    torch.manual_seed(0)
    data = start.Data(start.write_text())
    model = start.GPT(len(data.characters))
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / "checkpoint.pt"
    first = load(path, model, optimizer, data)
    add_up = Sum()
    begin = time.perf_counter()
    for step in range(first, STEPS):
        loss = train_step(model, optimizer, data, step, add_up)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.10f}", flush=True)
            if (step + 1) % EVERY == 0:
                save(path, step + 1, model, optimizer, data)
    report(folder, STEPS - first, time.perf_counter() - begin, add_up.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="run", type=Path)
    dist.init_process_group("gloo")
    main(parser.parse_args().folder)
    dist.destroy_process_group()
