"""FLOPs and activations of a step, without, with selective and with full recomputation."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

LAYERS, WIDTH, TOKENS = 4, 128, 256


def keep_products(context, op, *args, **kwargs):
    keep = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def step(recompute):
    torch.manual_seed(0)
    layers, x = [MLP() for _ in range(LAYERS)], torch.randn(TOKENS, WIDTH, requires_grad=True)
    for layer in layers:
        x = layer(x) if recompute is None else recompute(layer, x)
    x.square().mean().backward()
    return torch.stack([layer.up.weight.grad.norm() for layer in layers])


if __name__ == "__main__":
    full = partial(checkpoint, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    ways = {"none": None, "selective": partial(full, context_fn=contexts), "full": full}
    formula = 6 * LAYERS * 8 * WIDTH**2 * TOKENS
    print(f"by formula {formula:,} FLOPs")
    for name, recompute in ways.items():
        with FlopCounterMode(display=False) as counter:
            norms = step(recompute)
        same = torch.equal(norms, step(None))
        flops = counter.get_total_flops()
        print(f"{name:9} {flops:,} FLOPs, gradients {'equal' if same else 'differ'}")
