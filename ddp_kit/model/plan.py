"""How the ranks of a training share the work, and when a model cannot be shared so."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.errors import ModelError
from ddp_kit.model.communication import check_count, check_times
from ddp_kit.model.transformer import Transformer

RECOMPUTE = ("none", "attention", "selective", "full")


@dataclass(frozen=True)
class Precision:
    """Bytes for each number.

    parameters, gradients: as the forward and the backward use them. optimizer: all that the
    optimizer keeps for a parameter. activations: between the layers.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    def __post_init__(self) -> None:
        check_times(**vars(self))


MIXED = Precision(2, 2, 12, 2)  # Adam with a float32 copy, as in ZeRO's section 3.1
FP32 = Precision(4, 4, 8, 4)  # Adam


@dataclass(frozen=True)
class Plan:
    """How many ranks share what. There are dp * tp * pp * cp ranks.

    dp: data parallel. zero: stage of ZeRO among these and the cp ranks; 0: none. tp: tensor
    parallel. pp: pipeline stages. cp: parts of each sequence, context parallel.

    micro_batch: sequences in a micro-batch of one of the dp groups. micro_batches: how many of them
    in a step. chunks: parts of the model on each stage of an interleaved pipeline, 1F1B if 1.
    recompute: "none"; "attention": what lies between queries and the output of the attention;
    "selective": all but the input, the attention's output and every second matrix product, as in
    torchtitan; "full": a layer keeps its input only. flash: the attention keeps no scores.
    sequence_parallel: the tp ranks also share what they would all keep of a sequence. overlap: dp
    communicates while backward computes.

    As text: "dp 8, ZeRO 3, 16 micro-batches of 1", without what is 1 or off.

    Neighbours in a tp group are neighbouring ranks; then cp, pp and dp follow, as in Llama 3.
    """

    dp: int = 1
    zero: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    micro_batches: int = 1
    micro_batch: int = 1
    chunks: int = 1
    recompute: str = "none"
    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "micro_batches", "micro_batch", "chunks"):
            check_count(name, getattr(self, name))
        if self.zero not in (0, 1, 2, 3):
            raise ModelError(f"zero must be 0, 1, 2 or 3, got {self.zero!r}")
        if self.recompute not in RECOMPUTE:
            kinds = ", ".join(map(repr, RECOMPUTE[:-1]))
            raise ModelError(f"recompute must be {kinds} or 'full', got {self.recompute!r}")

    @property
    def ranks(self) -> int:
        """The number of ranks, one for each accelerator."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        """Sequences in a step of all ranks together."""
        return self.dp * self.micro_batches * self.micro_batch

    def __str__(self) -> str:
        sizes = [f"{name} {getattr(self, name)}" for name in ("dp", "tp", "pp", "cp")]
        shown = [size for size in sizes if not size.endswith(" 1")] or ["1 rank"]
        if self.chunks > 1:
            shown.append(f"{self.chunks} chunks")
        if self.zero:
            shown.append(f"ZeRO {self.zero}")
        if self.recompute != "none":
            shown.append(f"recompute {self.recompute}")
        many = "micro-batch" if self.micro_batches == 1 else "micro-batches"
        return ", ".join([*shown, f"{self.micro_batches} {many} of {self.micro_batch}"])


def objection(transformer: Transformer, plan: Plan) -> tuple[str, str] | None:
    """Return what does not divide, and a sentence that says so; None if all is well."""
    sizes = {
        "heads": transformer.heads,
        "kv_heads": transformer.key_value_heads,
        "inner": transformer.mlp_width,
    }  # a vocabulary that does not divide is filled up
    for name, size in sizes.items():
        if size % plan.tp:
            return name, f"tp={plan.tp} does not divide {name}={size:,}"
    if transformer.context % plan.cp:
        return "context", f"cp={plan.cp} does not divide context={transformer.context:,}"
    try:
        counts = stages(transformer.layers, plan.pp)
    except ModelError as error:
        return "layers", str(error)
    if plan.chunks > 1 and (plan.pp == 1 or max(counts) % plan.chunks):
        return "chunks", f"stages of {max(counts)} layers cannot be cut into {plan.chunks} chunks"
    if plan.chunks > 1 and plan.micro_batches % plan.pp:
        wanted = f"must be a multiple of pp={plan.pp}, got {plan.micro_batches}"
        return "chunks", f"with chunks={plan.chunks}, micro_batches {wanted}"
    if plan.zero and plan.dp * plan.cp == 1:
        return "ZeRO", "ZeRO needs several ranks that hold the same: dp or cp above 1"
    return None


def check_plan(transformer: Transformer, plan: Plan) -> None:
    """Raise ModelError if a model cannot be shared so."""
    found = objection(transformer, plan)
    if found:
        raise ModelError(found[1])


def stages(layers: int, pp: int) -> list[int]:
    """Return how many layers each pipeline stage has.

    All have equally many. If that is impossible, the first and the last stage may have one less, as
    they also have the embedding and the head: Llama 3 has 126 layers on 16 stages so. Raises
    ModelError if that is impossible, too.
    """
    check_count("layers", layers)
    check_count("pp", pp)
    if layers % pp == 0:
        return [layers // pp] * pp
    most, left = divmod(layers + 2, pp)
    if left or most < 2:
        raise ModelError(f"{layers} layers cannot be cut into pp={pp} equal stages")
    return [most - 1, *[most] * (pp - 2), most - 1]
