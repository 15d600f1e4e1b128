"""What a GPU does in a training step: its roofline, a GPT's memory and time.

gpu.py runs these functions, each as `python gpu_training.py NAME`. Where there is no GPU they run
on the CPU, smaller: that shows whether they work, and not what a GPU does.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_checks import MIB
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddp_kit import model
from ddp_kit.lessons._gpt import GPT, Config

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
GPT_SIZES = (
    {"width": 2048, "heads": 16, "context": 2048, "vocabulary": 50304}
    if ON_GPU
    else {"width": 64, "heads": 4, "context": 64, "vocabulary": 128}
)
FEW, MANY, BATCH = 4, 24, 4  # layers of the two GPTs, whose difference is one layer; sequences
# What selective recomputation keeps: what is dear to compute. All else is computed again.
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if ON_GPU:
        torch.cuda.synchronize()


def median(call: Callable[[], object], rounds: int = 20) -> float:
    """Return the median seconds of a call, after three that warm up."""
    times = []
    for _ in range(rounds + 3):
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def product_flops(dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of a product of two square matrices."""
    left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / median(lambda: left @ right)


def roofline() -> None:
    """Print the FLOP/s of matrix products and the bytes/s of a copy, medians of 20."""
    size = 8192 if ON_GPU else 256
    rates = {
        "bf16": product_flops(torch.bfloat16, size),
        "float32": product_flops(torch.float32, size),
    }
    source = torch.randn(4 * size * size, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median(lambda: target.copy_(source))
    shown = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items())
    print(
        f"roofline: products of {size} x {size} in TFLOP/s: {shown}; "
        f"a copy {copied / 1e12:.3g} TB/s"
    )
    print(
        f"bf16 needs {rates['bf16'] / copied:.0f} FLOPs for each byte of memory to be at its peak"
    )


def recompute(gpt: GPT, how: str) -> GPT:
    """Let each block of a GPT recompute what its backward needs: "none", "selective" or "full"."""

    def policy(context, operator, *args, **kwargs):
        keep = operator in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if how != "none":
        for block in gpt.blocks:
            block.forward = partial(checkpoint, block.forward, **options)
    return gpt


def kept(layers: int, how: str, autocast: bool) -> dict[str, float]:
    """Train a GPT; return its bytes by kind, the most that it held, and the seconds of a step."""
    cuda = torch.cuda  # without a GPU, it counts 0 bytes
    torch.manual_seed(0)
    gc.collect()  # a block that recomputes refers to itself
    cuda.empty_cache()
    start = cuda.memory_allocated()
    with DEVICE:
        gpt = GPT(Config(layers=layers, **GPT_SIZES))
    gpt = recompute(gpt if autocast else gpt.to(torch.bfloat16), how)
    cuda.empty_cache()
    parameters = cuda.memory_allocated() - start
    optimizer = torch.optim.AdamW(gpt.parameters(), fused=ON_GPU)
    shape = BATCH, GPT_SIZES["context"] + 1
    tokens = torch.randint(GPT_SIZES["vocabulary"], shape, device=DEVICE)

    def forward() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            logits = gpt(tokens[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = cuda.memory_allocated() - start - parameters - tokens.nbytes
    seconds = median(step, rounds=5)
    if ON_GPU:
        cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    loss = forward()
    activations = cuda.memory_allocated() - before
    loss.backward()
    return {
        "parameters": parameters,
        "gradients": cuda.memory_allocated() - before - loss.nbytes,
        "optimizer": states,
        "activations": activations,
        "peak": cuda.max_memory_allocated() - start,
        "seconds": seconds,
    }


def gpt() -> None:
    """Print a GPT's memory and time on one device, beside the formulas of kit.model."""
    shape = model.Transformer(layers=MANY, linear_bias=False, **GPT_SIZES)
    tokens = BATCH * GPT_SIZES["context"]
    print(
        f"gpt: {shape.parameters / 1e6:,.0f} million parameters, {MANY} layers of width "
        f"{shape.width}, {BATCH} sequences of {shape.context} tokens; MiB, and (the formula's)"
    )
    columns = "parameters", "gradients", "optimizer", "one layer", "head", "peak"
    header = "".join(f"{column:>16}" for column in columns)
    print(f"{'numbers':9}{'recompute':11}{header}{'ms':>7}{'TFLOP/s':>9}")
    kinds = (
        ("bf16", False, model.Precision(2, 2, 4, 2)),
        ("autocast", True, model.Precision(4, 4, 8, 2)),
    )
    for name, autocast, precision in kinds:
        for how in ("none", "selective", "full"):
            small, large = (kept(layers, how, autocast) for layers in (FEW, MANY))
            plan = model.Plan(micro_batch=BATCH, recompute="full" if how == "full" else "none")
            told = model.memory(shape, plan, precision)
            layer = (large["activations"] - small["activations"]) / (MANY - FEW)
            one = model.activations(shape, plan, precision)
            # After forward, the loss keeps a third of the logits that backward needs.
            head = told["activations"] - MANY * one + told["logits"] / 3
            pairs = [
                *((large[kind], told[kind]) for kind in ("parameters", "gradients", "optimizer")),
                (layer, one),
                (large["activations"] - MANY * layer, head),
                (large["peak"], sum(told.values())),
            ]
            cells = "".join(f"{f'{a / MIB:,.0f} ({b / MIB:,.0f})':>16}" for a, b in pairs)
            rate = shape.flops_per_token * tokens / large["seconds"] / 1e12
            print(f"{name:9}{how:11}{cells}{1e3 * large['seconds']:7.0f}{rate:9.4g}", flush=True)


if __name__ == "__main__":
    {"roofline": roofline, "gpt": gpt}[sys.argv[1]]()
