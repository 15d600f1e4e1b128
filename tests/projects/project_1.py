"""A solution of project 1, for teachers and tests: torchrun --nproc-per-node 2 project_1.py FOLDER

Learners do not get it. The model and the data are those of the start.
"""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

STEPS = 60
BATCH = 48  # sequences in a step, on however many ranks
CONTEXT = 32  # characters in a sequence
WIDTH, HEADS, LAYERS = 64, 4, 2
RATE, WARM_UP = 3e-3, 10  # the largest learning rate, and the steps until then
EVERY = 5  # steps between two checkpoints


def write_text(lines=3000):
    """Return lines such as "17+25=42", the same ones every time."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(100), numbers.randrange(100)) for _ in range(lines)]
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


class Data:
    """Sequences of a text, as numbers of its characters."""

    def __init__(self, text):
        self.characters = sorted(set(text))
        number = {character: place for place, character in enumerate(self.characters)}
        self.tokens = torch.tensor([number[character] for character in text])
        self.generator = torch.Generator().manual_seed(1)

    def batch(self):
        """Return the sequences of the next step, and for each character the one after it."""
        last = len(self.tokens) - CONTEXT - 1
        starts = torch.randint(last, (BATCH,), generator=self.generator)
        places = starts[:, None] + torch.arange(CONTEXT + 1)
        chosen = self.tokens[places]
        return chosen[:, :-1], chosen[:, 1:]


class Block(nn.Module):
    """A layer: attention to what came before, then two linear layers, each added to its input."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        """Let each character look at those before it."""
        count, length, _ = x.shape
        qkv = self.qkv(x).view(count, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(count, length, WIDTH))

    def forward(self, x):
        """Return what the layer makes of its input, which has the same shape."""
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next character after each character of a sequence."""

    def __init__(self, characters):
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        """Return a score for every character that may come next, at each place."""
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def rate_of(step):
    """Return the learning rate of a step: it grows at first, and then falls to nearly zero."""
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return RATE * 0.5 * (1 + math.cos(math.pi * done))


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
        group["lr"] = rate_of(step)
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
    data = Data(write_text())
    model = GPT(len(data.characters))
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
