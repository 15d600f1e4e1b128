"""Train a small GPT to add numbers: python 1_from_one_process_to_many.py [FOLDER]

It prints the loss of each step, and writes FOLDER/speed.json at the end. One process trains; your
project is to make it many, under torchrun. Change whatever you like but the training itself.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 60
BATCH = 48  # sequences in a step, on however many ranks
CONTEXT = 32  # characters in a sequence
WIDTH, HEADS, LAYERS = 64, 4, 2
RATE, WARM_UP = 3e-3, 10  # the largest learning rate, and the steps until then


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


def train_step(model, optimizer, data, step):
    """Train on the next batch; return its loss before that."""
    inputs, targets = data.batch()
    for group in optimizer.param_groups:
        group["lr"] = rate_of(step)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def complete(model, data, text):
    """Return a text with the characters that the model puts after it, up to the line's end."""
    with torch.no_grad():
        while len(text) < CONTEXT and not text.endswith("\n"):
            tokens = torch.tensor([[data.characters.index(one) for one in text]])
            text += data.characters[model(tokens)[0, -1].argmax()]
    return text.strip()


def report(folder, steps, seconds):
    """Write how fast the training was: the tokens of all steps, seconds, tokens per second."""
    tokens = steps * BATCH * CONTEXT
    found = {"ranks": 1, "tokens": tokens, "seconds": seconds}
    found["tokens_per_second"] = tokens / seconds
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.json").write_text(json.dumps(found))


def main(folder):
    """Train from the first step to the last."""
    torch.manual_seed(0)
    data = Data(write_text())
    model = GPT(len(data.characters))
    optimizer = torch.optim.AdamW(model.parameters())
    begin = time.perf_counter()
    for step in range(STEPS):
        loss = train_step(model, optimizer, data, step)
        print(f"step {step} loss {loss:.10f}", flush=True)
    report(folder, STEPS, time.perf_counter() - begin)
    print("7+5= is completed as", complete(model, data, "7+5="), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ranks share the cores of this machine
    torch.set_default_dtype(torch.float64)  # rounding then shows in the eleventh digit only
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="run", type=Path, help="for what it writes")
    main(parser.parse_args().folder)
