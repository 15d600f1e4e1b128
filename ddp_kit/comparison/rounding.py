"""How far two values are apart, and how far rounding may bring them apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch

from ddp_kit.comparison.values import Numbers, Path, describe, name_dtype, read, same
from ddp_kit.errors import CompareError

MARGIN = 4  # for terms that cancel, and for roundings that happen to go the same way
TERMS = {64: 1024, 32: 1024, 16: 16, 8: 1}  # assumed, by the bits of a number
PERHAPS = 32  # times the tolerance: up to here, more terms may be the explanation
ABSENT = object()


def inexact(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype are rounded."""
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
        """Whether rtol or atol were passed."""
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
        """Whether the difference is within the tolerance."""
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
    """Return the dtype that rounds more."""
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
