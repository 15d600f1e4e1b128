"""Try operations on real ranks, and say how each went: in runs that end, whatever happens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from ddp_kit.errors import DeadlockError, RankDiedError, RankError, RunTimeoutError
from ddp_kit.lessons._operations import (
    DTYPES,
    OPERATIONS,
    WITHOUT_DTYPE,
    Operation,
    has_answer,
)

Cells = dict[tuple[str, str], str]  # operation and dtype -> how it went

ANY = "any"  # the dtype of an operation that moves no tensor
LIMIT = 10.0  # seconds for one run of a probe


def attempt(
    rank: int, world_size: int, operation: Operation, dtypes: Iterable[str], catch: bool = True
) -> dict[str, str]:
    """Try one operation with each dtype; say how each went on this rank.

    catch: False lets a refusal end the run, so that nobody waits for the rank that refused.
    """
    return {name: _once(rank, world_size, operation, name, catch) for name in dtypes}


def _once(rank: int, world_size: int, operation: Operation, dtype: str, catch: bool) -> str:
    try:
        got, want = operation(rank, world_size, getattr(torch, dtype, None))
    except Exception as error:
        if not catch:
            raise
        return f"refused: {words(str(error))}"
    if want is None:
        return "wrong: it gave numbers where no answer is right"
    for ours, right in zip(got, want, strict=True):
        if not torch.equal(_bytes(ours), _bytes(right)):
            odd = ours.dtype is torch.bool and bool((_bytes(ours) > 1).any())
            return "wrong: a bool that is neither 0 nor 1" if odd else f"wrong: {ours.tolist()}"
    return "works"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory: PyTorch reads a bool of 2 as True, and compares no small floats."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def words(said: str) -> str:
    """Return the first line of what a backend says, without source files and addresses."""
    line = (said.splitlines() or ["it said nothing"])[0]
    for pattern in (r"\[\S*/\S*:\d+\] ?", r"0x[0-9a-fA-F]+", r"\[\S*\]:\d+"):
        line = re.sub(pattern, "", line)
    return " ".join(line.split())


def probe(
    run: Callable,
    operations: Mapping[str, Operation] = OPERATIONS,
    dtypes: Iterable[str] = DTYPES,
    without_dtype: Mapping[str, Operation] = WITHOUT_DTYPE,
) -> Cells:
    """Try every operation with every dtype on real ranks; return how each went.

    run: calls a worker on all ranks, with a time limit, such as
        `functools.partial(kit.run, world_size=2, backend="gloo", timeout=LIMIT)`.

    An operation has a run of its own. If that run dies or hangs, each of its dtypes has one. An
    outcome is a word, mostly with what was said: "works", "refused: ...", "wrong: ...",
    "died: ...", "hung: ...", and "no answer: ..." for a refusal where no answer is right.
    """
    names = tuple(dtypes)
    asked = [(name, operation, names) for name, operation in operations.items()]
    asked += [(name, operation, (ANY,)) for name, operation in without_dtype.items()]
    cells: Cells = {}
    for name, operation, kinds in asked:
        try:
            per_rank = list(run(attempt, operation, kinds))
            outcomes = {kind: _agreed([said[kind] for said in per_rank]) for kind in kinds}
        except (RankError, RankDiedError, DeadlockError, RunTimeoutError):
            outcomes = {kind: _alone(run, operation, kind) for kind in kinds}
        cells |= {(name, kind): _judged(name, kind, said) for kind, said in outcomes.items()}
    return cells


def _alone(run: Callable, operation: Operation, kind: str) -> str:
    """Try one cell of the table in a run of its own."""
    try:
        return _agreed([said[kind] for said in run(attempt, operation, (kind,), False)])
    except RankError as error:
        return f"refused: {words(next(iter(error.failures.values())).message)}"
    except RankDiedError as error:
        return f"died: {error.signal or f'exit code {error.exitcode}'}"
    except (DeadlockError, RunTimeoutError) as error:
        return f"hung: {words(str(error))}"


def _agreed(said: list[str]) -> str:
    """Return the outcome of all ranks: the first that is not well."""
    return next((outcome for outcome in said if outcome != "works"), "works")


def _judged(name: str, kind: str, outcome: str) -> str:
    """Tell a refusal that is right from one that is not."""
    op = name.removeprefix("all_reduce ")
    refused, _, said = outcome.partition(": ")
    if refused != "refused" or op == name or has_answer(op, getattr(torch, kind)):
        return outcome
    return f"no answer: {said}"


def refusals(cells: Cells) -> Counter[str]:
    """Count what a backend said where it refused, without the dtype and the op it names."""
    said: Counter[str] = Counter()
    for (name, kind), outcome in cells.items():
        _, found, reason = outcome.partition(": ")
        if found:
            op = name.removeprefix("all_reduce ")
            said[reason.replace(f"torch.{kind}", "DTYPE").replace(f".{op}", ".OP")] += 1
    return said
