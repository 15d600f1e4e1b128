"""Whether a parallel model is still the same model, and why not."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import nn

from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import CompareError, ProofError
from ddp_kit.pool import Result

# --- values, leaf by leaf ------------------------------------------------------------------------


Path = tuple[Any, ...]  # the keys and indices that lead to a value
Leaves = dict[Path, Any]
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod)\.")  # of DDP and of torch.compile


class Numbers(NamedTuple):
    """Numbers to compare: float64, complex128 or int64 on the CPU, and the dtype they had."""

    values: torch.Tensor
    dtype: torch.dtype


def pair(mine: Any, reference: Any) -> tuple[list, list, bool]:
    """Return the values, what they should be, and whether they belong to ranks.

    If all should be the same, the second list has a single entry. Raises CompareError if the two
    are of different numbers of ranks.
    """
    if isinstance(mine, Result | list | tuple) and _is_by_rank(reference, mine):
        if len(mine) != len(reference):
            raise CompareError(
                f"mine has {count(len(mine), 'value')} and reference has {len(reference)}; "
                "both must have one for each rank"
            )
        return list(mine), list(reference), True
    if isinstance(reference, Result):
        raise CompareError(
            f"reference has values of {count(len(reference), 'rank')}, but mine is a single value; "
            "swap the two, or choose one of these values, such as reference[0]"
        )
    if isinstance(mine, Result) or _depth(mine) == _depth(reference) + 1:
        if not len(mine):
            raise CompareError("mine is an empty list; it must have a value for each rank")
        return list(mine), [reference], True
    return [mine], [reference], False


def _is_by_rank(reference: Any, mine: Any) -> bool:
    if isinstance(reference, Result):
        return True
    return isinstance(mine, Result) and len(mine) > 0 and _depth(reference) == _depth(mine[0]) + 1


def _depth(value: Any) -> int:
    """Return in how many lists the first value that is no list lies."""
    is_list = isinstance(value, list | tuple)
    return 1 + _depth(value[0] if value else None) if is_list else 0


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each value that is no list or dict, with the keys and indices that lead to it."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, f"[{index}]"))
    else:
        yield path, value


def named_alike(values: Leaves, others: Leaves) -> Leaves:
    """Return `values`, without the prefixes that DDP adds if the names then agree better."""
    if values.keys() == others.keys():
        return values
    bare = {
        tuple(_WRAPPERS.sub("", key) if isinstance(key, str) else key for key in path): value
        for path, value in values.items()
    }
    better = len(bare.keys() & others.keys()) > len(values.keys() & others.keys())
    return bare if better and len(bare) == len(values) else values


def format_path(path: Path) -> str:
    """Return the name of a value: "state.0.exp_avg", "losses[2]"; "" if it has none."""
    name = ""
    for key in path:
        index = isinstance(key, str) and key.startswith("[")
        name += f"{key}" if index or not name else f".{key}"
    return name


def read(value: Any, path: Path) -> Numbers | None:
    """Return the numbers in a value; None if it has none, as a string.

    Raises CompareError for a tensor whose numbers this process does not have.
    """
    subject = f"{format_path(path)!r}" if path else "the value"
    if hasattr(value, "full_tensor"):
        raise CompareError(
            f"{subject} is a DTensor, of which each rank has a shard; return "
            "tensor.full_tensor() from every rank, and compare that"
        )
    try:
        if type(value).__module__ == "numpy":
            value = torch.as_tensor(value)
        elif isinstance(value, int | float | complex):  # bool is an int
            return _read_number(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if not isinstance(value, torch.Tensor):
        return None
    try:
        dense = value.dequantize() if value.is_quantized else value.detach()
        dense = (dense if dense.layout is torch.strided else dense.to_dense()).cpu()
        if value.is_complex():
            return Numbers(dense.to(torch.complex128), value.dtype)
        wide = torch.float64 if dense.is_floating_point() else torch.int64
        return Numbers(dense.to(wide), dense.dtype)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise CompareError(f"the numbers of {subject} cannot be read: {reason}") from error


def _read_number(value: complex) -> Numbers:
    if isinstance(value, int):
        return Numbers(torch.tensor(value, dtype=torch.int64), torch.int64)
    # It usually comes from `item()`, and is no more exact than the tensor was.
    default = torch.get_default_dtype()
    if isinstance(value, complex):
        return Numbers(torch.tensor(value, dtype=torch.complex128), default.to_complex())
    return Numbers(torch.tensor(value, dtype=torch.float64), default)


def same(one: Any, other: Any, path: Path) -> bool:
    """Return whether two values without numbers are equal.

    Raises CompareError if they cannot say.
    """
    try:
        return bool(one == other)
    except Exception as error:
        subject = f"{format_path(path)!r}" if path else "the value"
        raise CompareError(
            f"{subject} is of type {type(one).__name__}; it must be a tensor, number, string, "
            "module, or a list or dict of them"
        ) from error


def describe(value: Any, numbers: Numbers | None) -> str:
    """Return a value in a few words: "a float32 tensor of shape (3,)"."""
    if numbers is None or not isinstance(value, torch.Tensor):
        return reprlib.repr(value)
    return f"a {name_dtype(numbers.dtype)} tensor of shape {tuple(numbers.values.shape)}"


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the usual causes ----------------------------------------------------------------------------


MOST_GUESSED = 8  # the largest world size to try if it is unknown
FEW = 8  # fewer numbers may be a multiple of others by chance
COARSE = 1e-3  # slack from which a few numbers show nothing
FINE = 1e-4  # slack up to which a few numbers, if not whole, are no whole multiple by chance

Tensors = Sequence[torch.Tensor]


class Cause(NamedTuple):
    """Why a value differs: a name for programs, and a sentence."""

    name: str
    text: str


def find_cause(mine: Tensors, references: Tensors, rank: int | None, slack: float) -> Cause | None:
    """Return why a rank's value is not what it should be; None if that is no usual mistake.

    mine: the value of each rank, or a single one, and then rank is None. references: what each
    should be, or a single one for all. slack: what rounding explains, relative to the largest
    number of a tensor.
    """
    have, want = mine[rank or 0], references[rank or 0 if len(references) > 1 else 0]
    by_rank, shared = rank is not None, len(references) == 1
    bound = slack * _largest(want)
    if have.shape != want.shape:
        return _gathered(mine, want, bound) if by_rank and shared else None
    if broken := int((~have.isfinite() & want.isfinite()).sum()):
        places = "1 place" if broken == 1 else f"{broken:,} places"
        return Cause("not finite", f"NaN or infinity is in {places} where numbers should be.")
    if not want.any() or not all(value.isfinite().all() for value in (*mine, want)):
        return None
    cause = None
    if by_rank and not shared:
        cause = _of_other_ranks(mine, references, bound)
    elif by_rank:
        cause = _own_parts(mine, want, slack)
    if not cause and not have.any():
        return Cause("zeros", "It is all zeros: nothing was written into it.")
    cause = cause or _multiple(have, want, slack, len(mine) if by_rank else None)
    for size in [len(mine)] if by_rank else range(2, MOST_GUESSED + 1):
        for dim in range(want.dim()):
            if not cause and 2 <= size <= want.shape[dim]:
                cause = _pieces(have.chunk(size, dim), want.chunk(size, dim), dim, bound)
    return cause or (_drift(mine, want, bound) if by_rank and shared else None)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _close(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= bound).all())


def _order(found: Tensors, wanted: Tensors, bound: float) -> list[int]:
    """Return which of the wanted tensors each found one is; empty if one is none of them."""
    order: list[int] = []
    free = dict(enumerate(wanted))
    for place, one in enumerate(found):
        candidates = sorted(free, key=lambda number: number != place)  # its own first
        match = next((c for c in candidates if _close(one, free[c], bound)), None)
        if match is None:
            return []
        order.append(match)
        del free[match]
    return order


def _of_other_ranks(mine: Tensors, references: Tensors, bound: float) -> Cause | None:
    order = _order(mine, references, bound)
    moved = [
        f"rank {rank} holds rank {whose}'s" for rank, whose in enumerate(order) if rank != whose
    ]
    return Cause("swapped shards", f"Shards are swapped: {', '.join(moved)}.") if moved else None


def _own_parts(mine: Tensors, want: torch.Tensor, slack: float) -> Cause | None:
    """Recognize ranks that still hold what they had before the reduction."""
    if any(value.shape != want.shape for value in mine):
        return None
    total = torch.stack(list(mine)).sum(0)
    bound = slack * max(map(_largest, (*mine, want)))
    wrong = [value for value in mine if not _close(value, want, bound)]
    if all(_close(value, wrong[0], bound) for value in wrong):
        return None  # a single one that is hardly wrong would not show in the mean
    for name, reduced in (("mean", total / len(mine)), ("sum", total)):
        if _close(reduced, want, bound):
            text = f"The {name} of all ranks' values is the reference: each rank still holds"
            return Cause("not reduced", f"{text} its own, and they were never reduced.")
    return None


def _multiple(
    have: torch.Tensor, want: torch.Tensor, slack: float, world_size: int | None
) -> Cause | None:
    if have.numel() < FEW and slack > COARSE:
        return None
    factor = ((want.conj() * have).sum() / (want.conj() * want).sum()).real.item()

    def is_times(multiple: float) -> bool:
        return _close(have, multiple * want, slack * abs(multiple) * _largest(want))

    n, was = world_size or 1, "it was"
    if world_size is None and factor > 0 and have.numel() >= FEW:
        n = round(max(factor, 1 / factor))
        was = f"if there are {n} ranks, it was"
    if n > 1 and is_times(n):
        text = f"It is {n} times the reference: {was} summed and not averaged."
        micro = f" If there are {n} micro-batches, divide the loss of each by {n}."
        return Cause("summed", f"{text} Divide it by the world size.{'' if world_size else micro}")
    if n > 1 and is_times(1 / n):
        text = (
            f"It is 1/{n} of the reference: {was} averaged twice, or averaged where a sum is right."
        )
        return Cause("averaged twice", text)
    if n > 2 and world_size and is_times((n - 1) / n):
        text = f"It is {n - 1}/{n} of the reference, as if the part of one rank were missing."
        return Cause("part missing", text)
    whole, size = round(factor), want.abs()
    by_chance = have.numel() < FEW and (slack > FINE or size.equal(size.round()))
    if whole > 1 and not by_chance and is_times(whole):
        text = f"It is {whole} times the reference, as if a division by {whole} were missing:"
        return Cause("scaled", f"{text} by the number of micro-batches, ranks or examples.")
    if have.numel() >= FEW and is_times(factor):
        return Cause("scaled", f"It is {factor:.6g} times the reference.")
    return None


def _gathered(mine: Tensors, want: torch.Tensor, bound: float) -> Cause | None:
    """Recognize ranks that hold shards of the reference."""
    for dim in range(want.dim()):
        others = {(*value.shape[:dim], -1, *value.shape[dim + 1 :]) for value in mine}
        if others != {(*want.shape[:dim], -1, *want.shape[dim + 1 :])}:
            continue
        sizes = [value.shape[dim] for value in mine]
        if sum(sizes) == want.shape[dim]:
            if cause := _pieces(mine, want.split(sizes, dim), dim, bound):
                return cause
            if _close(torch.cat(list(mine), dim), want, bound):
                text = f"Each rank holds its shard along dimension {dim} of the reference"
                return Cause("sharded", f"{text}: gather them before you compare.")
    return None


def _pieces(found: Tensors, wanted: Tensors, dim: int, bound: float) -> Cause | None:
    """Recognize shards of a tensor that are missing or in the wrong order."""
    order = _order(found, wanted, bound)
    if order and order != sorted(order):
        numbers = ", ".join(map(str, order))
        text = f"Its {len(found)} shards along dimension {dim} are swapped: they come in the order"
        return Cause("swapped shards", f"{text} {numbers}.")
    wrong = [i for i, one in enumerate(found) if not _close(one, wanted[i], bound)]
    if 0 < len(wrong) < len(found) and not any(found[i].any() for i in wrong):
        text = f"Of its {len(found)} shards along dimension {dim}, counted from 0,"
        shards = name_ranks(wrong).replace("rank", "shard")
        verb = "is" if len(wrong) == 1 else "are"
        return Cause("shard missing", f"{text} {shards} {verb} missing: only zeros are there.")
    return None


def _drift(mine: Tensors, want: torch.Tensor, bound: float) -> Cause | None:
    right = [rank for rank, value in enumerate(mine) if _close(value, want, bound)]
    if len(right) == len(mine) or all(_close(value, mine[0], bound) for value in mine):
        return None
    agree = f"The ranks differ from each other, and {'no rank' if not right else name_ranks(right)}"
    verb = "equals" if len(right) < 2 else "equal"
    text = f"{agree} {verb} the reference: replicas have drifted, because of different starts or"
    return Cause("drift", f"{text} different updates, or a sum over the ranks is missing.")


# --- what rounding explains ----------------------------------------------------------------------


MARGIN = 4  # for terms that cancel, and for roundings that happen to go the same way
TERMS = {64: 1024, 32: 1024, 16: 16, 8: 1}  # assumed, by the bits of a number
PERHAPS = 32  # times the tolerance: up to here, more terms may be the explanation
ABSENT = object()


def inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class Rule:
    """How much numbers may differ. Raises CompareError if the arguments are invalid."""

    rtol: float | None = None
    atol: float | None = None
    terms: int | None = None

    def __post_init__(self):
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise CompareError(f"{name} must be a number of at least 0, got {value!r}")
        if self.terms is None:
            return
        whole = isinstance(self.terms, Integral) and not isinstance(self.terms, bool)
        if not whole or self.terms < 1:
            raise CompareError(f"terms must be a whole number of at least 1, got {self.terms!r}")
        if self.given:
            raise CompareError("terms has no effect with rtol or atol; leave out terms, or both")

    @property
    def given(self) -> bool:
        return self.rtol is not None or self.atol is not None

    def count_terms(self, dtype: torch.dtype) -> int:
        """Return how many numbers were added for each element, or how many are assumed."""
        return int(self.terms or TERMS.get(torch.finfo(dtype).bits, 1))

    def slack(self, dtype: torch.dtype) -> float:
        """Return what rounding explains, relative to the largest number of a tensor."""
        if not inexact(dtype):
            return MARGIN * torch.finfo(torch.float64).eps
        return MARGIN * math.sqrt(self.count_terms(dtype)) * torch.finfo(dtype).eps

    def tolerance(self, reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return how much each element may differ from the reference."""
        size = _finite(reference)
        if self.given:
            return (self.atol or 0.0) + (self.rtol or 0.0) * size
        largest = size.max() if inexact(dtype) else 0.0
        return torch.full_like(size, self.slack(dtype) * largest)

    def explain(self, tolerance: float, dtype: torch.dtype) -> str:
        """Return how a tolerance came about: "6.0e-06 = 4 * sqrt(1,024 terms) * ..."."""
        if self.given:
            size = f"{tolerance:.1e}" if tolerance else "0"
            return f"{size} (rtol={self.rtol or 0:g}, atol={self.atol or 0:g})"
        if not tolerance:
            return "0: integers must be equal" if not inexact(dtype) else "0, as the reference is"
        terms = f"{self.count_terms(dtype):,} terms{'' if self.terms else ', assumed'}"
        return (
            f"{tolerance:.1e} = {MARGIN} * sqrt({terms}) * eps({name_dtype(dtype)}) * "
            f"{tolerance / self.slack(dtype):.3g}, the largest number in the reference"
        )


@dataclass(frozen=True)
class Finding:
    """How far one value of one rank is from what it should be.

    error: the difference that is the largest in units of its tolerance; inf if it is no number.
    tolerance: what is allowed there, and explanation: why. fact: what differs; the name of the
    value comes before it. hint: whether it may be rounding. cause: if it shows at once. nans: in
    how many places both are NaN. largest: the largest number in either.
    """

    path: Path
    rank: int | None
    error: float = math.inf
    tolerance: float = 0.0
    explanation: str = ""
    fact: str = ""
    hint: str = ""
    cause: str | None = None
    nans: int = 0
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float:
        """The difference in units of the tolerance."""
        if not self.error:
            return 0.0
        return self.error / self.tolerance if self.tolerance else math.inf


def measure(path: Path, rank: int | None, mine: Any, reference: Any, rule: Rule) -> Finding:
    """Compare one value of one rank with what it should be; ABSENT stands for none.

    Raises CompareError if they cannot be compared.
    """
    if mine is ABSENT:
        return Finding(path, rank, fact="is missing; the reference has it", cause="missing")
    if reference is ABSENT:
        fact = "is unexpected; the reference does not have it"
        return Finding(path, rank, fact=fact, cause="unexpected")
    have, want = read(mine, path), read(reference, path)
    if have is None and want is None and same(mine, reference, path):
        return Finding(path, rank, error=0.0)
    if have is None or want is None:
        fact = f"is {describe(mine, have)} instead of {describe(reference, want)}"
        return Finding(path, rank, fact=fact, cause="value" if have is want else "type")
    if have.values.shape != want.values.shape:
        fact = f"has the shape {tuple(have.values.shape)} instead of {tuple(want.values.shape)}"
        return Finding(path, rank, fact=fact, cause="shape")
    return _measure_numbers(path, rank, have, want, rule)


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return max((one, other), key=lambda dtype: torch.finfo(dtype).eps if inexact(dtype) else 0.0)


def _measure_numbers(
    path: Path, rank: int | None, have: Numbers, want: Numbers, rule: Rule
) -> Finding:
    if not have.values.numel():
        return Finding(path, rank, error=0.0)
    dtype = coarser(have.dtype, want.dtype)
    differences, nans = _differences(have.values, want.values)
    tolerances = rule.tolerance(want.values, dtype)
    ratios = torch.where(differences == 0, 0.0, differences / tolerances)
    worst = torch.unravel_index(ratios.argmax(), ratios.shape)
    error, tolerance = differences[worst].item(), tolerances[worst].item()
    explanation = rule.explain(tolerance, dtype)
    if have.dtype != want.dtype and inexact(dtype):
        two = f"{name_dtype(have.dtype)} is compared with {name_dtype(want.dtype)}"
        explanation += f"; {two}, and the coarser counts"
    largest = max(_finite(numbers.values).max().item() for numbers in (have, want))
    found = Finding(path, rank, error, tolerance, explanation, nans=nans, largest=largest)
    if found.equal:
        return found
    place = f" at {[int(index) for index in worst]}" if worst else ""
    mine, reference = have.values[worst].item(), want.values[worst].item()
    values = f"{_format(mine)} instead of {_format(reference)}{place}"
    if not error < math.inf:
        return Finding(path, rank, fact=f"is {values}", cause="not finite")
    size = f"{error:.1e}" if inexact(dtype) else f"{error:,.0f}"
    times = f", {_format_times(found.ratio)} times " if tolerance else ""
    times += ("the tolerance" if rule.given else "what rounding explains") if tolerance else ""
    most = "at most " if differences.numel() > 1 else ""
    fact = f"differs by {most}{size}{times} ({values})"
    hint = _hint(found, want.values, dtype, rule)
    return replace(found, fact=fact, hint=hint)


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    """Return magnitudes as float64, with 0 in place of infinities and NaN."""
    size = numbers.abs().to(torch.float64)
    return torch.where(size.isfinite(), size, 0.0)


def _differences(mine: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the absolute differences, as float64, and in how many places both are NaN."""
    unequal = mine != reference
    if mine.dtype == reference.dtype == torch.int64:
        size = (mine.double() - reference.double()).abs().clamp(min=1)  # float64 may not show 1
        return torch.where(unequal, size, 0.0), 0
    both = mine.isnan() & reference.isnan()
    size = torch.where(unequal & ~both, (mine - reference).abs().double(), 0.0)
    return size.nan_to_num(nan=math.inf, posinf=math.inf), int(both.sum())


def _hint(found: Finding, reference: torch.Tensor, dtype: torch.dtype, rule: Rule) -> str:
    """Return whether the difference may be rounding all the same; "" if that is clear."""
    if not inexact(dtype):
        return ""
    if rule.given:
        explained = Rule().tolerance(reference, dtype).max().item()
        if found.error > explained:
            return "Rounding does not explain it."
        return f"Rounding explains it: it may come to {Rule().explain(explained, dtype)}."
    if found.ratio > PERHAPS:
        return ""
    terms = math.ceil(rule.count_terms(dtype) * found.ratio**2)
    return f"Rounding explains it if {terms:,} numbers were added: pass terms={terms} if they were."


def _format(number: complex) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def _format_times(ratio: float) -> str:
    if ratio >= 1e9:
        return f"{ratio:.0e}"
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


# --- the comparison ------------------------------------------------------------------------------


MOST_EXAMINED = 64  # tensors in which a cause is looked for


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `kit.compare` found; it is true if the values are equal, up to rounding.

    equal: whether they are. name: of the first tensor that differs, or, if none does, of the one
    closest to its tolerance; "" if it has no name. rank: where it is, or None if `mine` was a
    single value. max_error: by how much it differs at most; inf if that is no number. tolerance:
    what was allowed there. cause: what explains the difference, None if nothing does:

        "summed", "averaged twice", "scaled"        a multiple of the reference
        "not reduced", "part missing"               the ranks' parts are combined wrongly
        "shard missing", "swapped shards", "zeros"  a piece is absent or in the wrong place
        "sharded"                                   each rank holds a shard of the reference
        "drift"                                     the ranks differ from each other
        "not finite", "shape", "type", "value", "missing", "unexpected"

    `str()` and `repr()` are the same in sentences.
    """

    equal: bool
    name: str
    rank: int | None
    max_error: float
    tolerance: float
    cause: str | None
    text: str

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        return self.text

    def check(self) -> None:
        """Raise ProofError, with the same sentences, unless the values are equal."""
        if not self.equal:
            raise ProofError(self.text)


def compare(
    mine: Any,
    reference: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    terms: int | None = None,
) -> Comparison:
    """Compare what ranks hold with what one process holds, and name the first difference.

    mine: the Result of a run, a list with a value for each rank, or a single value. reference:
    what every rank should hold; if that differs by rank, a Result or a list of as many values.

    A value is a tensor, an array, a number, a string, a module or an optimizer (its state_dict
    counts), or a list, tuple or dict of values. If both arguments are lists, those in `mine` are
    the values of ranks if it is nested one level deeper. DDP's prefix "module." is ignored.
    Integers, booleans and strings must be equal. NaN equals NaN. A Python float counts as torch's
    default dtype, because it usually comes from `.item()`. Of two dtypes, the coarser counts.
    Floating-point and complex numbers may differ by

        4 * sqrt(terms) * eps(dtype) * the largest magnitude in this tensor of the reference

    terms: how many numbers were added for each element, such as the examples in the batch; by
        default 1,024, but 16 for float16 and bfloat16, because PyTorch adds those in float32
        on each rank.
    rtol, atol: allow `atol + rtol * abs(reference)` for each element instead; if only one is
        given, the other is 0. With `rtol=0, atol=0` all elements must be equal.

    The rule follows from the rounding errors of a sum of n terms. In any order, they amount to
    at most (n-1) * eps/2 times the sum of all magnitudes, but to a multiple of sqrt(n) in typical
    cases, because roundings go up as often as down: N. J. Higham, "The accuracy of floating point
    summation", SIAM J. Sci. Comput. 14 (1993), https://doi.org/10.1137/0914050. It is an estimate,
    because the terms are unknown here: if they cancel in all elements of a tensor, pass `atol`.

    Raises CompareError if the arguments cannot be compared.
    """
    rule = Rule(rtol, atol, terms)
    try:
        mines, references, by_rank = pair(mine, reference)
        found = [dict(leaves(one)) for one in mines]
        wanted = [dict(leaves(one)) for one in references]
    except RecursionError:
        raise CompareError("a list or dict that contains itself cannot be compared") from None
    wanted = [named_alike(one, found[0]) for one in wanted]
    found = [named_alike(one, wanted[0]) for one in found]
    wanted = wanted * len(found) if len(wanted) < len(found) else wanted
    paths = list(dict.fromkeys(path for one in (*wanted, *found) for path in one))
    if all(one.get(path) is None for one in (*wanted, *found) for path in paths):
        raise CompareError("there is nothing to compare: neither value contains a tensor or number")
    findings = [
        measure(
            path, rank if by_rank else None, have.get(path, ABSENT), want.get(path, ABSENT), rule
        )
        for path in paths
        for rank, (have, want) in enumerate(zip(found, wanted, strict=True))
        if path in have or path in want
    ]
    world_size = len(found) if by_rank else None
    wrong = [finding for finding in findings if not finding.equal]
    if wrong:
        first, (cause, where) = wrong[0], _explain(wrong, found, wanted, rule)
        noise = _noise(first, findings, rule)
        text = _format_difference(wrong, cause, where, noise, len(paths), world_size)
    else:
        first, cause = max(findings, key=lambda finding: finding.ratio), None
        text = _format_equal(first, findings, len(paths), world_size, rule)
    name, why = format_path(first.path), cause.name if cause else first.cause
    return Comparison(not wrong, name, first.rank, first.error, first.tolerance, why, text)


def _explain(
    wrong: Sequence[Finding], found: Sequence[Leaves], wanted: Sequence[Leaves], rule: Rule
) -> tuple[Cause | None, Finding]:
    """Return the cause that the first of the tensors shows that show one, and where it shows.

    found, wanted: what the ranks hold and should hold.
    """
    firsts: dict[Path, Finding] = {}
    for finding in wrong:
        firsts.setdefault(finding.path, finding)
    for finding in list(firsts.values())[:MOST_EXAMINED]:
        if finding.cause in ("missing", "unexpected", "type", "value"):
            return Cause(finding.cause, ""), finding
        if cause := _cause(finding, found, wanted, rule):
            return cause, finding
    return None, wrong[0]


def _cause(
    finding: Finding, found: Sequence[Leaves], wanted: Sequence[Leaves], rule: Rule
) -> Cause | None:
    path, shared = finding.path, all(one is wanted[0] for one in wanted)
    mine = [read(one.get(path), path) for one in found]
    references = [read(one.get(path), path) for one in (wanted[:1] if shared else wanted)]
    if any(numbers is None for numbers in (*mine, *references)):
        return None
    dtype = coarser(mine[finding.rank or 0].dtype, references[0].dtype)
    complex_ = any(numbers.dtype.is_complex for numbers in (*mine, *references))
    wide = torch.complex128 if complex_ else torch.float64
    values = [[numbers.values.to(wide) for numbers in one] for one in (mine, references)]
    return find_cause(*values, finding.rank, rule.slack(dtype))


def _noise(first: Finding, findings: Sequence[Finding], rule: Rule) -> str:
    """Return a hint if a tensor is as small as the rounding errors of another one, else ""."""
    other = max(findings, key=lambda finding: finding.largest if finding.tolerance else 0.0)
    if rule.given or not 0 < first.largest <= other.tolerance:
        return ""
    return (
        "All its numbers are as small as rounding errors in "
        f"{format_path(other.path)!r} are. If they should be zero, as the gradient of a bias "
        f"before BatchNorm, pass atol={other.tolerance:.0e}."
    )


def _subject(finding: Finding) -> str:
    name = format_path(finding.path)
    rank = "" if finding.rank is None else f"rank {finding.rank}: "
    return f"{rank}{repr(name) if name else 'the value'}"


def _format_difference(
    wrong: Sequence[Finding],
    cause: Cause | None,
    where: Finding,
    noise: str,
    total: int,
    world_size: int | None,
) -> str:
    first = wrong[0]
    sentences = [f"{_subject(first)} {first.fact}."]
    if first.explanation:
        sentences.append(f"The tolerance is {first.explanation}.")
    if cause and cause.text:
        sentences.append(cause.text if where is first else f"{_subject(where)}: {cause.text}")
    elif first.cause is None and not (noise or first.hint):
        sentences.append("It is none of the mistakes that kit.compare recognizes.")
    if noise or first.hint:
        sentences.append(noise or first.hint)
    names = len({finding.path for finding in wrong})
    ranks = {finding.rank for finding in wrong}
    on = ""
    if world_size and world_size > 1:
        everywhere = "both ranks" if world_size == 2 else f"all {world_size} ranks"
        on = f" on {everywhere if len(ranks) == world_size else name_ranks(ranks)}"
    if total > 1:
        verb = "differs" if names == 1 else "differ"
        sentences.append(f"In all, {names} of {count(total, 'value')} {verb}{on}.")
    elif on:
        sentences.append(f"It differs{on}.")
    return "\n".join(sentences)


def _format_equal(
    nearest: Finding, findings: Sequence[Finding], total: int, world_size: int | None, rule: Rule
) -> str:
    what = count(total, "value")
    what += f" on each of {count(world_size, 'rank')}" if world_size else ""
    nans = sum(finding.nans for finding in findings)
    nan = f" NaN is in {count(nans, 'place')} of both, and counts as equal." if nans else ""
    if not nearest.error:
        return f"equal: {what}, without any difference.{nan}"
    within = "the tolerance" if rule.given else "rounding"
    name = format_path(nearest.path)
    place = f" in {name!r}" if name else ""
    place += f" on rank {nearest.rank}" if nearest.rank is not None else ""
    return (
        f"equal up to {within}: {what}; the largest difference is {nearest.error:.1e}{place}, "
        f"where {nearest.tolerance:.1e} is allowed.{nan}"
    )
