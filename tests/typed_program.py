"""A learner's program with the public names, which mypy checks in strict mode; it never runs."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import ddp_kit as kit


def worker(rank: int, world_size: int, scale: float = 1.0) -> float:
    tensor = torch.full((2,), scale * rank, device=kit.device())
    dist.all_reduce(tensor)
    for _ in kit.progress(range(3)):
        pass
    return tensor.sum().item()


def run_it() -> list[float]:
    result: kit.Result = kit.run(worker, 2.0, world_size=2, backend="gloo", timeout=60)
    with kit.WorkerPool(2) as pool:
        again: kit.Result = pool.run(worker)
        pool.restart()
    elsewhere: kit.Result = kit.torchrun(worker, nproc_per_node=2)
    found: kit.Comparison = kit.compare(result, elsewhere, rtol=1e-6)
    found.check()
    kit.predict([0.0, 2.0], list(result))
    kit.predict(..., len(result.trace.messages()))
    kit.doctor()
    used: int = kit.status().memory
    assert used >= 0
    print(len(kit.mnist(train=False)))
    printed: tuple[str, ...] = again.output
    first: str = printed[0]
    assert first is not None
    return [*result]


def draw(result: kit.Result, folder: Path) -> list[Figure]:
    trace: kit.Trace = result.trace
    waited: float = trace.summary(timed=True, rank=0).rows[0].waiting
    assert waited >= 0
    trace.to_chrome(folder / "trace.json")
    sizes: list[int] = [message.nbytes for message in trace.messages(src=0)]
    assert sizes == sorted(sizes)
    loaded: kit.Trace = kit.load_trace(folder)
    print(trace.summary())
    return [
        kit.plot.timeline(loaded, timed=True),
        kit.plot.messages(trace),
        kit.plot.losses(result),
    ]


def explain() -> str:
    try:
        kit.run(worker)
    except kit.DeadlockError as error:
        return f"{error.fact} {error.hint} {[wait.rank for wait in error.waits]}"
    except kit.RankError as error:
        return ", ".join(failure.type for failure in error.failures.values())
    except kit.KitError as error:
        return str(error)
    finally:
        kit.shutdown()
    return ""
