"""What a GPU does in a training step: its roofline, a GPT's memory and time, DDP's overlap.

gpu.py runs these functions, each as `python gpu_training.py NAME`. Where there is no GPU they run
on the CPU, smaller: that shows whether they work, and not what a GPU does.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_checks import MIB
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ddp_kit as kit
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


def traced_step(rank: int, world_size: int, width: int, rows: int) -> dict[str, Any]:
    """Train with DDP under the profiler; return the seconds of a step, with and without
    communication, and what the GPU did: (stream, name, start, end) in microseconds."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(kit.device())
    ddp = DistributedDataParallel(net)  # 8 layers in buckets of 25 MiB
    inputs = torch.randn(rows, width, device=kit.device())

    def step() -> None:
        ddp(inputs).square().mean().backward()

    def alone() -> None:
        with ddp.no_sync():
            step()

    for _ in range(2):
        step()
    seconds = {"with": median(step, 5), "without": median(alone, 5)}
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
    with profile(activities=kinds, acc_events=True) as profiler:
        step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        (event["args"]["stream"], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy")
    ]
    return {"seconds": seconds, "events": found, "buckets": ddp._get_ddp_logging_data()}


def covered(spans: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of some spans that lies within the union of others."""
    edges = sorted({edge for span in [*spans, *by] for edge in span})

    def holds(some: Sequence[tuple[float, float]], begin: float, end: float) -> bool:
        return any(first <= begin and end <= last for first, last in some)

    pieces = pairwise(edges)
    return sum(b - a for a, b in pieces if holds(spans, a, b) and holds(by, a, b))


def overlap(*places: str) -> None:
    """Print what DDP's buckets do while backward computes, for each place such as "nccl:1"."""
    width, rows = (4096, 8192) if ON_GPU else (64, 64)
    print(f"overlap: DDP with 8 layers of {width} x {width}, {rows} rows on each rank")
    for place in places:
        backend, _, ranks = place.rpartition(":")
        values = kit.run(traced_step, width, rows, world_size=int(ranks), backend=backend)
        value = values[0]
        slow, fast = (1e3 * value["seconds"][name] for name in ("with", "without"))
        sizes = value["buckets"].get("rebuilt_bucket_sizes", "")
        took = f"a step {slow:.2f} ms, with no_sync {fast:.2f} ms"
        print(f"{backend} on {ranks}: {took}; buckets of {sizes} B")
        streams: dict[int, list] = {}
        for stream, *event in value["events"]:
            streams.setdefault(stream, []).append(event)
        spans = {of: [(a, b) for _, a, b in events] for of, events in streams.items()}
        main = max(spans, key=lambda of: covered(spans[of], spans[of]), default=None)
        for stream, events in sorted(streams.items()):
            busy = covered(spans[stream], spans[stream])
            longest = max(events, key=lambda event: event[2] - event[1])[0][:60]
            line = f"  stream {stream}: {len(events)} operations, {busy / 1e3:.2f} ms"
            if stream != main and busy:
                line += (
                    f", {covered(spans[stream], spans[main]) / busy:.0%} while stream {main} works"
                )
            print(f"{line}; longest: {longest}")


if __name__ == "__main__":
    {"roofline": roofline, "gpt": gpt, "overlap": overlap}[sys.argv[1]](*sys.argv[2:])
