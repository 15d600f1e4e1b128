# Made from notebooks/13_one_rank_first.ipynb by `make editions`: edit that, not this.
"""One rank first: what a step costs before it is shared."""

import weakref
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ddp_kit as kit
from ddp_kit import model as formulas
from ddp_kit.lessons._gpt import loss_of, make_gpt
from ddp_kit.lessons._launch import run_as_script
from ddp_kit.lessons._one_rank_first import count_step, main


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, d = config.heads, config.width
        self.query, self.key = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.value, self.out = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def split(self, x):  # (batch, length, width) becomes (batch, heads, length, width / heads)
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):  # (batch, length, width), and so is the result
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.width
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def flops_per_token(layers, width, context, vocabulary):
    P = 12 * layers * width**2 + vocabulary * width
    return 6 * P + 12 * layers * width * context


def count_flops(model, batch):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, *batch).backward()
    return counter.get_total_flops()


SMALL = formulas.Transformer(2, 64, 4, 128, 64, linear_bias=False)


LLAMA_8B = formulas.Transformer(
    32,
    4096,
    32,
    128_256,
    8192,
    kv_heads=8,
    inner=14_336,
    gated=True,
    tied=False,
    positions=False,
    linear_bias=False,
    norm_bias=False,
)


def storages(values):
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return {tensor.untyped_storage() for tensor in tensors}


class Kept(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = weakref.WeakSet()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        made = storages(result if isinstance(result, tuple | list) else [result])
        self.made |= made - storages(args)  # a view has no memory of its own
        return result

    @property
    def nbytes(self):
        return sum(storage.nbytes() for storage in self.made)


def layer_keeps(tokens, width, heads, size=4):
    norms = 2 * (width + 2)
    attention = width + 4 * width + heads
    mlp = width + 4 * width + 4 * width
    return tokens * (norms + attention + mlp) * size


def kept_by(model, batch, enabled=False):
    cast = torch.autocast(kit.device().type, torch.bfloat16, enabled=enabled)
    with Kept() as kept, cast:
        loss = loss_of(model, *batch)
    return kept.nbytes, loss.item()


def accumulate(model, inputs, targets, micro_batches):
    total = 0.0
    for part in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches)):
        loss = loss_of(model, *part) / micro_batches
        loss.backward()
        total += loss.item()
    return total


def keep_products(context, op, *args, **kwargs):
    product = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
    keep = product or "attention" in str(op)  # the kernel's name depends on the device
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block, policy=keep_products):
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_wrapper(block, context_fn=contexts)


def recomputing(wrap):
    model = make_gpt()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(block)
    return model


if __name__ == "__main__":
    run_as_script(main)
