"""Which one when: data, tensor, pipeline and context parallelism, planned and combined.

A GPT trained on a mesh of two dimensions, data parallel along one and tensor parallel along the
other, by hand and with PyTorch's own, beside one process. What it sends and holds is compared with
`ddp_kit.model`, which then plans for thousands of accelerators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ddp_kit import compare, model
from ddp_kit.launch import lesson_parser, open_ranks, prove, run_as_script
from ddp_kit.lessons._gpt import Config, make_gpt
from ddp_kit.lessons._planned_by_hand import (  # noqa: F401 - the notebook uses them
    dp_by_hand,
    layer_by_hand,
    layer_keeps,
    memory_by_hand,
    plans_by_hand,
    stage_by_hand,
    states_by_hand,
    step_by_hand,
    tflops,
)
from ddp_kit.lessons._published import (  # noqa: F401
    FLOAT32_GRADIENTS,
    LLAMA_3,
    MEGATRON,
    fit_efficiency,
    llama,
    megatron,
    with_efficiency,
)
from ddp_kit.lessons._two_dimensions import (  # noqa: F401
    Kept,
    calls_along,
    hold,
    parallelize_2d,
    train_2d,
    train_by_hand,
)
from ddp_kit.lessons.device_mesh import pieces
from ddp_kit.lessons.zero import ADAM, BATCH, SGD, filled_bytes, train_alone
from ddp_kit.model import Accelerator, Cluster, Link, Plan, Transformer
from ddp_kit.notebook.controls import Explorer

# Of a block: dimension 0 of a Linear's weight is its output, so 0 means column parallel.
CUT = {"query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1}
# With it, the seconds of `model.step` are bytes: nothing else takes time.
BYTES = Cluster(Accelerator(1, 1e30, 1e30), 1, Link(0, 1), Link(0, 1))
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def as_transformer(config: Config) -> Transformer:
    """Return the sizes of the lessons' GPT for `ddp_kit.model`."""
    sizes = (config.layers, config.width, config.heads, config.vocabulary, config.context)
    return Transformer(*sizes, tied=config.tied, linear_bias=False)


def bytes_along(dp: int, tp: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step of `train_2d`, by formula, along dp and tp.

    Along tp: four all_reduces for each block. Along dp: blocks are gathered before forward and
    before backward, all else is gathered once, and the gradients of both are reduced once.
    """
    gpt, blocks, rest = make_gpt(), [], []
    for name, parameter in gpt.named_parameters():
        dim = CUT.get(name.split(".")[-2])
        part = parameter if dim is None else pieces(parameter, dim, tp)[0]
        (blocks if name.startswith("blocks") else rest).append(part)
    sharded = 3 * filled_bytes(blocks, dp) + 2 * filled_bytes(rest, dp)
    plan = Plan(dp=dp, tp=tp, micro_batch=BATCH // dp, sequence_parallel=False)
    along_tp = model.step(as_transformer(Config()), plan, BYTES, model.FP32)["tp"]
    return {"dp": (dp - 1) / dp * sharded, "tp": along_tp}


def bytes_per_step(run: Callable, tp: int, recompute: bool = False) -> dict[str, Counter[str]]:
    """Return the bytes that rank 0 sends in a step of `train_2d` along each dimension, by call.

    run: calls a worker on all ranks, such as `kit.run`. A step is what two have more than one.
    """
    one, two = (calls_along(run(train_2d, SGD, tp, steps, recompute).trace, tp) for steps in (1, 2))
    return {name: two[name] - one[name] for name in two}


def explore(
    tp: int = 2, recompute: str = "none", dtype: str = "float32", world_size: int = 4
) -> Explorer:
    """Train a GPT on a mesh of world_size / tp times tp ranks, and draw what each rank holds.

    recompute: "none" or "full". dtype: of forward and backward, "float32" or "bfloat16". In
    JupyterLab, controls follow. Raises PoolError for an invalid choice.
    """
    from ddp_kit import plot  # ranks do not need it

    def choices(settings: dict) -> dict:
        several = [str(each) for each in (1, 2, 4) if settings["world_size"] % each == 0]
        kinds = {"tp": several, "recompute": ("none", "full"), "dtype": tuple(DTYPES)}
        return kinds | {"world_size": range(1, 5)}

    def ask(settings: dict) -> tuple:
        again = settings["recompute"] == "full"
        return hold, int(settings["tp"]), again, DTYPES[settings["dtype"]]

    def draw(result, settings: dict):
        moments = [moments for moments, _ in result]
        held = {moment: [each[moment] for each in moments] for moment in moments[0]}
        data = settings["world_size"] // int(settings["tp"])
        title = f"dp {data}, tp {settings['tp']}, recompute {settings['recompute']}"
        return plot.memory(held, title=f"{title}, {settings['dtype']}", name="rank")

    chosen = {"tp": str(tp), "recompute": recompute, "dtype": dtype, "world_size": world_size}
    return Explorer("which_one_when", chosen, choices, ask, draw)


def main(argv: list[str] | None = None) -> None:
    """Train on a mesh, compare with one process and with the formulas, and print one line."""
    options = lesson_parser("which_one_when", __doc__).parse_args(argv or [])
    with open_ranks(options.world_size, options.backend, options.trace) as ranks:
        n = ranks.world_size
        tp = 2 if n % 2 == 0 else 1
        for optimizer_cls in (SGD, ADAM):
            alone = train_alone(optimizer_cls)["parameters"]
            for worker in (train_by_hand, train_2d):
                found = list(ranks(worker, optimizer_cls, tp))
                prove(f"{worker.__name__} trains as one process does", compare(found, alone))
        sent = {name: sum(calls.values()) for name, calls in bytes_per_step(ranks, tp).items()}
        prove("a rank sends what the model says", compare(sent, bytes_along(n // tp, tp)))
        kept, again = (list(ranks(hold, tp, recompute)) for recompute in (False, True))
        same = compare([p for _, p in again], [p for _, p in kept], rtol=0, atol=0)
        prove("recomputation changes no bit", same)
        ranks.say(f"which_one_when: {ranks}, FSDP x TP trains as one process and sends as planned")


if __name__ == "__main__":
    run_as_script(main)
