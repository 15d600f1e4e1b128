"""Compare values of ranks with those of one process, and say in sentences what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_kit.comparison.causes import Cause, find_cause
from ddp_kit.comparison.rounding import ABSENT, Finding, Rule, coarser, measure
from ddp_kit.comparison.values import Leaves, Path, format_path, leaves, named_alike, pair, read
from ddp_kit.error_text import count, name_ranks
from ddp_kit.errors import CompareError, ProofError
from ddp_kit.pool import Result

MOST_EXAMINED = 64  # tensors in which a cause is looked for


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `kit.compare` found; it is true if the values are equal, up to rounding.

    equal: whether they are. name: of the first tensor that differs, or, if none does, of the one
    closest to its tolerance; "" if it has no name. rank: where it is, or None if `mine` was a
    single value. max_error: by how much it differs at most; inf if that is no number. tolerance:
    what was allowed there. cause: what explains the difference, None if nothing does:

        "summed", "averaged twice", "scaled"        a multiple of the reference
        "not reduced", "part missing", "weights"    the ranks' parts are combined wrongly
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

    def __str__(self) -> str:
        return self.text

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
    parts: Any = None,
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
    parts: what each rank held before the ranks reduced it, as a Result or a list of values like
        the reference. It shows whose part is missing or counts too much.

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
        before = [dict(leaves(one)) for one in _list_parts(parts, len(found) if by_rank else None)]
    except RecursionError:
        raise CompareError("a list or dict that contains itself cannot be compared") from None
    wanted = [named_alike(one, found[0]) for one in wanted]
    found = [named_alike(one, wanted[0]) for one in found]
    before = [named_alike(one, wanted[0]) for one in before]
    wanted = wanted * len(found) if len(wanted) < len(found) else wanted
    paths = list(dict.fromkeys(path for one in (*wanted, *found) for path in one))
    if all(one.get(path) is None for one in (*wanted, *found) for path in paths):
        raise CompareError("there is nothing to compare: neither value contains a tensor or number")
    findings = [
        measure(
            path,
            rank if by_rank else None,
            found[rank].get(path, ABSENT),
            wanted[rank].get(path, ABSENT),
            rule,
        )
        for path in paths
        for rank in range(len(found))
        if path in found[rank] or path in wanted[rank]
    ]
    world_size = len(found) if by_rank else None
    wrong = [finding for finding in findings if not finding.equal]
    if wrong:
        first, (cause, where) = wrong[0], _explain(wrong, found, wanted, before, rule)
        noise = _noise(first, findings, rule)
        text = _format_difference(wrong, cause, where, noise, len(paths), world_size)
    else:
        first, cause = max(findings, key=lambda finding: finding.ratio), None
        text = _format_equal(first, findings, len(paths), world_size, rule)
    return Comparison(
        equal=not wrong,
        name=format_path(first.path),
        rank=first.rank,
        max_error=first.error,
        tolerance=first.tolerance,
        cause=cause.name if cause else first.cause,
        text=text,
    )


def _list_parts(parts: Any, world_size: int | None) -> list:
    if parts is None:
        return []
    if not isinstance(parts, Result | list | tuple):
        got = type(parts).__name__
        raise CompareError(
            f"parts must be a Result or a list with a value for each rank, got {got}"
        )
    if world_size not in (None, len(parts)):
        raise CompareError(
            f"parts has {count(len(parts), 'value')}, but mine has {world_size}; "
            "both must have one for each rank"
        )
    return list(parts)


def _explain(
    wrong: Sequence[Finding],
    found: Sequence[Leaves],
    wanted: Sequence[Leaves],
    before: Sequence[Leaves],
    rule: Rule,
) -> tuple[Cause | None, Finding]:
    """Return the cause that the first of the tensors shows that show one, and where it shows."""
    firsts: dict[Path, Finding] = {}
    for finding in wrong:
        firsts.setdefault(finding.path, finding)
    for path, finding in list(firsts.items())[:MOST_EXAMINED]:
        if finding.cause in ("missing", "unexpected", "type", "value"):
            return Cause(finding.cause, ""), finding
        if cause := _cause(path, finding, found, wanted, before, rule):
            return cause, finding
    return None, wrong[0]


def _cause(
    path: Path,
    finding: Finding,
    found: Sequence[Leaves],
    wanted: Sequence[Leaves],
    before: Sequence[Leaves],
    rule: Rule,
) -> Cause | None:
    shared = all(one is wanted[0] for one in wanted)
    lists = found, wanted[:1] if shared else wanted, before
    read_ = [[read(one.get(path), path) for one in leaves_] for leaves_ in lists]
    if any(numbers is None for numbers in (*read_[0], *read_[1])):
        return None
    dtype = coarser(read_[0][finding.rank or 0].dtype, read_[1][0].dtype)
    complex_ = any(numbers.dtype.is_complex for numbers in (*read_[0], *read_[1]))
    wide = torch.complex128 if complex_ else torch.float64
    mine, references, parts = (
        [numbers.values.to(wide) for numbers in one if numbers is not None] for one in read_
    )
    return find_cause(
        mine,
        references,
        finding.rank,
        rule.slack(dtype),
        parts if len(parts) == len(before) else (),
    )


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
        f"where the tolerance is {nearest.explanation}.{nan}"
    )
