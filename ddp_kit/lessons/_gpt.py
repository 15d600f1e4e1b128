"""A small GPT and the text it learns: the model that lessons 15 to 20 train in parallel.

Tokens are the bytes of the text, all below 128, so that nothing has to be learnt before training
and a vocabulary of 128 divides among 2, 4 or 8 ranks. Source of the model: Radford et al.,
"Language Models are Unsupervised Multitask Learners" (2019). Of the text: the first 12 chapters of
Jane Austen's "Pride and Prejudice" (1813), in the public domain; see
data/text/ORIGIN.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ddp_kit import device
from ddp_kit.errors import PoolError

TEXT = Path(__file__).parent / "data" / "text" / "pride_and_prejudice.txt"
SEED = 1234
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT. The defaults make 111,232 parameters.

    tied: let the last layer use the weight of the token embedding.
    """

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 64
    vocabulary: int = 128
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention. The number of heads is that of the query's output."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the positions of x, which has shape (batch, length, width)."""
        heads = [
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Let each position attend to itself and earlier ones: (batch, heads, length, width)."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """A decoder block: attention, then two layers for each position, each added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform x, which has shape (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the token after each token."""

    def __init__(self, config: Config = Config()) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, length, vocabulary) for tokens (batch, length).

        places: where in the text each token is, from 0; None: they are one after the other.
        """
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(config: Config = Config(), seed: int = SEED) -> GPT:
    """Make a GPT on this rank's device, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(config).to(device())


def batches(size: int, steps: int, context: int = 64, seed: int = SEED) -> Iterator[Batch]:
    """Yield `steps` batches: inputs and targets, each (size, context), the same on every rank."""
    text = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (size,), generator=generator)
        pieces = torch.stack([text[start : start + context + 1] for start in starts]).to(device())
        yield pieces[:, :-1], pieces[:, 1:]


def part_of(batch: Batch, rank: int, world_size: int) -> Batch:
    """Return a rank's part of a batch: its sequences, one after the other.

    Raises PoolError if the ranks cannot have equal parts.
    """
    size = len(batch[0])
    if size % world_size:
        raise PoolError(f"world_size must divide the {size} sequences of a batch, got {world_size}")
    inputs, targets = (both.chunk(world_size)[rank] for both in batch)
    return inputs, targets


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the predictions for a batch."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
