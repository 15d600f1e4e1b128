"""Whether a parallel model is still the same model, and why not."""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy
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
    if _is_by_rank(reference, mine):
        if not isinstance(mine, Result | list | tuple) or len(mine) != len(reference):
            ranks = count(len(reference), "rank")
            raise CompareError(f"reference has values of {ranks}, and mine must have as many")
        return list(mine), list(reference), True
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


def read_leaves(value: Any) -> Leaves:
    """Return each value that is no list or dict by what leads to it, without DDP's prefixes."""
    found = dict(_leaves(value))
    bare = {
        tuple(_WRAPPERS.sub("", key) if isinstance(key, str) else key for key in path): leaf
        for path, leaf in found.items()
    }
    return bare if len(bare) == len(found) else found


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, f"[{index}]"))
    else:
        yield path, value


def format_path(path: Path) -> str:
    """Return the name of a value: "state.0.exp_avg", "losses[2]"; "" if it has none."""
    name = ""
    for key in path:
        index = isinstance(key, str) and key.startswith("[")
        name += f"{key}" if index or not name else f".{key}"
    return name


def _quote(path: Path) -> str:
    return repr(format_path(path)) if path else "the value"


def read(value: Any, path: Path) -> Numbers | None:
    """Return the numbers in a value; None if it has none, as a string.

    Raises CompareError for a DTensor, whose numbers this process does not have.
    """
    if hasattr(value, "full_tensor"):
        raise CompareError(
            f"{_quote(path)} is a DTensor, of which each rank has a shard; return "
            "tensor.full_tensor() from every rank, and compare that"
        )
    if type(value).__module__ == "numpy" or isinstance(value, int):  # bool is an int
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError):  # objects, or a huge int
            return None
    if isinstance(value, float | complex):
        # It usually comes from `item()`, and is no more exact than the tensor was.
        dtype = torch.get_default_dtype()
        if isinstance(value, complex):
            return Numbers(torch.tensor(value, dtype=torch.complex128), dtype.to_complex())
        return Numbers(torch.tensor(value, dtype=torch.float64), dtype)
    if not isinstance(value, torch.Tensor):
        return None
    wide = torch.complex128 if value.is_complex() else torch.float64
    if not inexact(value.dtype):
        wide = torch.int64
    try:
        return Numbers(value.detach().to_dense().cpu().to(wide), value.dtype)
    except (NotImplementedError, RuntimeError) as error:  # a meta tensor, or a quantized one
        raise CompareError(f"{_quote(path)} has no numbers to compare: {error}") from error


# --- the usual causes ----------------------------------------------------------------------------


FEW = 8  # fewer numbers may be a multiple of others by chance
COARSE = 1e-3  # slack from which a few numbers show nothing

Tensors = Sequence[torch.Tensor]


class Cause(NamedTuple):
    """Why a value differs: a name for programs, and a sentence."""

    name: str
    text: str


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _close(one: torch.Tensor, other: torch.Tensor, bound: float) -> bool:
    return one.shape == other.shape and bool(((one - other).abs() <= bound).all())


def _own_parts(mine: Tensors, want: torch.Tensor, slack: float) -> Cause | None:
    """Recognize ranks that still hold what they had before the reduction.

    slack: what rounding explains, relative to the largest number of a tensor.
    """
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


def _multiple(have: torch.Tensor, want: torch.Tensor, slack: float, ranks: int) -> Cause | None:
    """Recognize a multiple of the reference; ranks: 1 for a value that belongs to none."""
    few = have.numel() < FEW
    if few and slack > COARSE:
        return None
    factor = ((want.conj() * have).sum() / (want.conj() * want).sum()).real.item()

    def is_times(multiple: float) -> bool:
        return _close(have, multiple * want, slack * abs(multiple) * _largest(want))

    if ranks > 1 and is_times(ranks):
        text = f"It is {ranks} times the reference: it was summed and not averaged."
        return Cause("summed", f"{text} Divide it by the world size.")
    if ranks > 1 and is_times(1 / ranks):
        text = f"It is 1/{ranks} of the reference: it was averaged twice, or averaged where a sum"
        return Cause("averaged twice", f"{text} is right.")
    if not few and is_times(factor):
        return Cause("scaled", f"It is {factor:.6g} times the reference.")
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
            if value is not None and not (isinstance(value, Real) and 0 <= value < math.inf):
                raise CompareError(f"{name} must be a number of at least 0, got {value!r}")
        if self.terms is None:
            return
        if not isinstance(self.terms, Integral) or self.terms < 1:
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
        size = reference.abs().to(torch.float64)
        size = torch.where(size.isfinite(), size, 0.0)
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
            f"{tolerance:.1e} = {MARGIN} * sqrt({terms}) * eps({str(dtype)[6:]}) * "
            f"{tolerance / self.slack(dtype):.3g}, the largest number in the reference"
        )


@dataclass(frozen=True)
class Finding:
    """How far one value of one rank is from what it should be.

    error: the difference that is the largest in units of its tolerance; inf if it is no number.
    tolerance: what is allowed there. fact: what differs; the name of the value comes before it.
    hint: if it may be rounding. cause: if it shows at once. nan: whether both are NaN somewhere.
    """

    path: Path
    rank: int | None
    error: float = math.inf
    tolerance: float = 0.0
    fact: str = ""
    hint: str = ""
    cause: str | None = None
    nan: bool = False

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
    if have is None and want is None and numpy.array_equal(mine, reference):
        return Finding(path, rank, error=0.0)
    if have is None or want is None:
        fact = f"is {reprlib.repr(mine)} instead of {reprlib.repr(reference)}"
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
    nans = have.values.isnan() & want.values.isnan()
    differences = torch.where(nans, 0.0, _differences(have.values, want.values))
    tolerances = rule.tolerance(want.values, dtype)
    ratios = torch.where(differences == 0, 0.0, differences / tolerances)
    worst = torch.unravel_index(ratios.argmax(), ratios.shape)
    error, tolerance = differences[worst].item(), tolerances[worst].item()
    found = Finding(path, rank, error, tolerance, nan=bool(nans.any()))
    if found.equal:
        return found
    place = f" at {[int(index) for index in worst]}" if worst else ""
    mine, reference = have.values[worst].item(), want.values[worst].item()
    values = f"{_format(mine)} instead of {_format(reference)}{place}"
    if not error < math.inf:
        return replace(found, fact=f"is {values}", cause="not finite")
    size = f"{error:.1e}" if inexact(dtype) else f"{error:,.0f}"
    times = f", {found.ratio:,.{1 if found.ratio < 10 else 0}f} times " if tolerance else ""
    times += ("the tolerance" if rule.given else "what rounding explains") if tolerance else ""
    most = "at most " if differences.numel() > 1 else ""
    hint = ""
    if inexact(dtype) and not rule.given and found.ratio <= PERHAPS:
        terms = math.ceil(rule.count_terms(dtype) * found.ratio**2)
        hint = f"Rounding explains it if {terms:,} numbers were added: pass terms={terms} if so."
    why = f"The tolerance is {rule.explain(tolerance, dtype)}"
    return replace(found, fact=f"differs by {most}{size}{times} ({values}).\n{why}", hint=hint)


def _differences(mine: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences as float64, inf where one of the two is no number."""
    wide = torch.promote_types(torch.promote_types(mine.dtype, reference.dtype), torch.float64)
    size = (mine.to(wide) - reference.to(wide)).abs()
    if mine.dtype == reference.dtype == torch.int64:
        size = size.clamp(min=1)  # float64 may not show a difference of 1
    size = torch.where(mine != reference, size, 0.0)
    return size.nan_to_num(nan=math.inf, posinf=math.inf)


def _format(number: complex) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


# --- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `kit.compare` found; it is true if the values are equal, up to rounding.

    equal: whether they are. name: of the first tensor that differs, or, if none does, of the one
    closest to its tolerance; "" if it has no name. rank: where it is, or None if `mine` was a
    single value. max_error: by how much it differs at most; inf if that is no number. tolerance:
    what was allowed there. cause: what explains the difference, None if nothing does:

        "summed", "averaged twice", "scaled"  a multiple of the reference
        "not reduced"                         each rank still holds its own part
        "zeros"                               nothing was written into it
        "drift"                               the ranks differ from each other
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
    because the terms are unknown here: if they cancel in all elements of a tensor, as in the
    gradient of a bias before BatchNorm, pass `atol`.

    Raises CompareError if the arguments cannot be compared.
    """
    rule = Rule(rtol, atol, terms)
    try:
        mines, references, by_rank = pair(mine, reference)
        found, wanted = [read_leaves(v) for v in mines], [read_leaves(v) for v in references]
    except RecursionError as error:
        raise CompareError("a list or dict that contains itself cannot be compared") from error
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
        first = wrong[0]
        cause = _explain(first, found, wanted, rule)
        text = _format_difference(wrong, cause, len(paths), world_size)
    else:
        first, cause = max(findings, key=lambda finding: finding.ratio), None
        text = _format_equal(first, findings, len(paths), world_size, rule)
    name, why = format_path(first.path), cause.name if cause else first.cause
    return Comparison(not wrong, name, first.rank, first.error, first.tolerance, why, text)


def _explain(
    finding: Finding, found: Sequence[Leaves], wanted: Sequence[Leaves], rule: Rule
) -> Cause | None:
    """Return why a value differs; None if that is no usual mistake.

    found, wanted: what the ranks hold and should hold.
    """
    path, rank = finding.path, finding.rank or 0
    numbers = [read(one.get(path), path) for one in (*found, wanted[rank])]
    if any(each is None for each in numbers):
        return None
    slack = rule.slack(coarser(numbers[rank].dtype, numbers[-1].dtype))
    dtypes = (each.values.dtype for each in numbers)
    wide = functools.reduce(torch.promote_types, dtypes, torch.float64)
    *mine, want = (each.values.to(wide) for each in numbers)
    if mine[rank].shape != want.shape or not want.any():
        return None
    if not all(value.isfinite().all() for value in (*mine, want)):
        return None
    replicated = all(one is wanted[0] for one in wanted)  # all ranks should hold `want`
    cause = _own_parts(mine, want, slack) if replicated else None
    if not cause and not mine[rank].any():
        return Cause("zeros", "It is all zeros: nothing was written into it.")
    cause = cause or _multiple(mine[rank], want, slack, len(mine))
    return cause or (_drift(mine, want, slack * _largest(want)) if replicated else None)


def _subject(finding: Finding) -> str:
    rank = "" if finding.rank is None else f"rank {finding.rank}: "
    return f"{rank}{_quote(finding.path)}"


def _format_difference(
    wrong: Sequence[Finding], cause: Cause | None, total: int, world_size: int | None
) -> str:
    first = wrong[0]
    sentences = [f"{_subject(first)} {first.fact}."]
    sentences += [text for text in (cause and cause.text, first.hint) if text]
    if not (cause or first.cause or first.hint):
        sentences.append("It is none of the mistakes that kit.compare recognizes.")
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
    nan = " NaN is in both, and counts as equal." if any(each.nan for each in findings) else ""
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
