"""Project 2, the start: a GPT in float64 that is too large for one rank.

It runs as it is: python 2_too_large_for_one_rank.py trains in one process, and then on 8 ranks with
a whole model each, which stop at the limit. What is yours stands in the middle.
"""

import random
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ddp_kit as kit
from ddp_kit.check.too_large_for_one_rank import (
    BATCH,
    FLOAT64,
    LIMIT,
    LINK,
    MODEL,
    RANKS,
    STEPS,
    MemoryLimit,
)
from ddp_kit.lessons._gpt import GPT, TEXT, Block, Config
from ddp_kit.model import Plan

# --- given: the model, its first parameters, the data, and the training in one process ------------

CONFIG = Config(MODEL.layers, MODEL.heads, MODEL.width, MODEL.context, MODEL.vocabulary, tied=False)


def fill(module, name=""):
    """Make a part of the GPT float64, with the first parameters; return it.

    name: of the part in the GPT, such as "blocks.3.". So a rank can make its own parts alone.
    """
    module.double()
    with torch.no_grad():
        for own, parameter in module.named_parameters():
            if parameter.ndim > 1:  # those of a norm begin with 1 and 0
                seed = zlib.crc32(f"{name}{own}".encode())
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(seed))
    return module


def batch(step):
    """Return the inputs and targets of a step: BATCH sequences of the text."""
    text, draw = TEXT.read_bytes(), random.Random(step)
    starts = [draw.randrange(len(text) - MODEL.context) for _ in range(BATCH)]
    pieces = torch.tensor([list(text[at : at + MODEL.context + 1]) for at in starts])
    return pieces[:, :-1], pieces[:, 1:]


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)


def train_alone(steps=STEPS):
    """Train in this process, without a limit; return the loss of each step."""
    model, losses = fill(GPT(CONFIG)), []
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- yours: a plan, two predictions, and the training on 8 ranks ----------------------------------

# How the ranks share the work: dp * tp * pp must be RANKS.
PLAN = Plan(dp=8, sequence_parallel=False)


def sent(rank):
    """Return how many bytes a rank sends in one step."""
    raise NotImplementedError("Project 2: predict the bytes that a rank sends")


def seconds():
    """Return how long a step takes on LINK."""
    raise NotImplementedError("Project 2: predict the seconds of a step")


def train(rank, world_size, steps):
    """Train on all ranks; return the loss of each step, or [] on a rank that does not know it.

    A loss is the mean over the whole batch.
    """
    model, losses = fill(GPT(CONFIG)), []
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = (part.chunk(world_size)[rank] for part in batch(step))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        for tensor in [*(parameter.grad for parameter in model.parameters()), loss.detach()]:
            dist.all_reduce(tensor)
            tensor /= world_size
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- given: the run -------------------------------------------------------------------------------


def train_under(rank, world_size, limit, steps=STEPS):
    """Train under a limit; return the losses, and the most bytes that this rank held."""
    with MemoryLimit(limit, rank) as memory:
        losses = train(rank, world_size, steps)
    return losses, memory.peak


if __name__ == "__main__":
    with MemoryLimit(float("inf")) as memory:
        print("one process:", *(f"{loss:.14f}" for loss in train_alone()))
    print(f"which held {memory.peak:,} bytes, and a rank may hold {LIMIT:,}")
    try:
        losses, peaks = zip(*kit.run(train_under, LIMIT, world_size=RANKS), strict=True)
        print("8 ranks:    ", *(f"{loss:.14f}" for loss in next(filter(None, losses))))
        print("which held ", *(f"{peak:,}" for peak in peaks), "bytes")
    except kit.RankError as error:
        print("8 ranks:    ", error.failures[min(error.failures)].message)
