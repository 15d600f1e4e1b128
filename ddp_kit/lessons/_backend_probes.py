"""Probes of a backend: operations with known answers, each tried on real ranks.

An operation is called on every rank as `operation(rank, world_size, dtype)`. It communicates and
returns two lists of tensors: what this rank got, and what it should have got. The second is None
where no answer is right, as for the bitwise "and" of two floats. `probe` tries operations with
many dtypes, in runs that end whatever happens, and returns how each one went.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from ddp_kit import device
from ddp_kit.errors import DeadlockError, RankDiedError, RankError, RunTimeoutError

Answer = tuple[list[torch.Tensor], "list[torch.Tensor] | None"]
Operation = Callable[[int, int, torch.dtype], Answer]
Cells = dict[tuple[str, str], str]  # operation and dtype -> how it went

ANY = "any"  # the dtype of an operation that moves no tensor
LIMIT = 10.0  # seconds for one run of a probe

BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE)
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn"),
    *("int64", "int32", "uint8", "bool", "complex64"),
)

# PyTorch 2.13 renamed these two and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def held(rank: int, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor a rank starts with: 4 * world_size small numbers, exact in every dtype.

    Its chunks, one for each rank, all differ, so that a chunk in the wrong place is noticed.
    """
    positions = torch.arange(4 * world_size) % 5
    values = (positions >> rank) & 1 if dtype is torch.bool else positions + 2 * rank
    return values.to(dtype).to(device())


def has_answer(op: str, dtype: torch.dtype) -> bool:
    """Return whether any tensors of this dtype have a right result: a mean is seldom an integer."""
    integral = not dtype.is_floating_point and not dtype.is_complex
    if op == "AVG":
        return not integral
    return integral if op in BITWISE else op not in ("MIN", "MAX") or not dtype.is_complex


def combined(op: str, world_size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what `op` should make of all ranks' tensors; None if no answer is right."""
    integral = not dtype.is_floating_point and not dtype.is_complex
    if not has_answer(op, dtype) and (op != "AVG" or dtype is torch.bool):
        return None
    wide = torch.int64 if integral else torch.complex128 if dtype.is_complex else torch.float64
    rows = torch.stack([held(rank, world_size, dtype).cpu().to(wide) for rank in range(world_size)])
    if op in BITWISE:
        return functools.reduce(BITWISE[op], rows).to(dtype)
    combine = {"SUM": rows.sum, "AVG": rows.sum, "PRODUCT": rows.prod}
    total = (combine | {"MIN": rows.amin, "MAX": rows.amax})[op](0)
    if op == "AVG":
        total = total // world_size if integral else total / world_size
    return total.to(dtype)


def send_recv(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Pass a tensor to the right neighbour; even ranks send first, which avoids a deadlock."""
    mine, left = held(rank, world_size, dtype), (rank - 1) % world_size
    into = torch.zeros_like(mine)
    steps = [lambda: dist.send(mine, (rank + 1) % world_size), lambda: dist.recv(into, left)]
    if world_size == 1:
        return [mine], [mine]
    for step in steps if rank % 2 == 0 else reversed(steps):
        step()
    return [into], [held(left, world_size, dtype)]


def broadcast(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Copy rank 0's tensor to every rank."""
    tensor = held(rank, world_size, dtype)
    dist.broadcast(tensor, src=0)
    return [tensor], [held(0, world_size, dtype)]


def all_reduce(op: str, rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Combine all tensors on every rank."""
    tensor = held(rank, world_size, dtype)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    want = combined(op, world_size, dtype)
    return [tensor], None if want is None else [want]


def reduce(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Sum all tensors on rank 0. What the other ranks hold afterwards is undefined."""
    tensor = held(rank, world_size, dtype)
    dist.reduce(tensor, dst=0)
    return ([], []) if rank else ([tensor], [combined("SUM", world_size, dtype)])


def all_gather(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in a list, on every rank."""
    mine = held(rank, world_size, dtype)
    pieces = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(pieces, mine)
    return pieces, _everyone(world_size, dtype)


def all_gather_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in one tensor, on every rank."""
    mine = held(rank, world_size, dtype)
    whole = torch.cat([torch.zeros_like(mine)] * world_size)
    _all_gather_single(whole, mine)
    return list(whole.chunk(world_size)), _everyone(world_size, dtype)


def gather(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Collect the tensors of all ranks in a list on rank 0."""
    mine = held(rank, world_size, dtype)
    pieces = None if rank else [torch.zeros_like(mine) for _ in range(world_size)]
    dist.gather(mine, pieces, dst=0)
    return ([], []) if rank else (pieces, _everyone(world_size, dtype))


def scatter(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Scatter rank 0's list, one entry to each rank."""
    pieces = _pieces(0, world_size, dtype)
    into = torch.zeros_like(pieces[rank])
    dist.scatter(into, None if rank else pieces, src=0)
    return [into], [pieces[rank]]


def reduce_scatter(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Sum all lists and give rank i entry i."""
    pieces = _pieces(rank, world_size, dtype)
    into = torch.zeros_like(pieces[rank])
    dist.reduce_scatter(into, pieces)
    return [into], [combined("SUM", world_size, dtype).chunk(world_size)[rank]]


def reduce_scatter_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Sum all tensors and give rank i chunk i."""
    mine = held(rank, world_size, dtype)
    into = torch.zeros_like(mine[:4])
    _reduce_scatter_single(into, mine)
    return [into], [combined("SUM", world_size, dtype).chunk(world_size)[rank]]


def all_to_all(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Send entry i of a list to rank i, on every rank."""
    pieces = _pieces(rank, world_size, dtype)
    into = [torch.zeros_like(piece) for piece in pieces]
    dist.all_to_all(into, pieces)
    return into, [_pieces(other, world_size, dtype)[rank] for other in range(world_size)]


def all_to_all_single(rank: int, world_size: int, dtype: torch.dtype) -> Answer:
    """Send chunk i of a tensor to rank i, on every rank."""
    mine = held(rank, world_size, dtype)
    into = torch.zeros_like(mine)
    dist.all_to_all_single(into, mine)
    chunks = [_pieces(other, world_size, dtype)[rank] for other in range(world_size)]
    return list(into.chunk(world_size)), chunks


def barrier(rank: int, world_size: int, dtype: torch.dtype | None = None) -> Answer:
    """Wait until all ranks have called it."""
    dist.barrier()
    return [], []


def objects(rank: int, world_size: int, dtype: torch.dtype | None = None) -> Answer:
    """Gather, broadcast and scatter Python objects."""
    collected: list = [None] * world_size
    dist.all_gather_object(collected, {"rank": rank})
    copied = ["a word"] if rank == 0 else [None]
    dist.broadcast_object_list(copied, src=0)
    scattered: list = [None]
    dist.scatter_object_list(scattered, list(range(world_size)) if rank == 0 else None, src=0)
    expected = [{"rank": other} for other in range(world_size)], ["a word"], [rank]
    return [torch.tensor((collected, copied, scattered) == expected)], [torch.tensor(True)]


OPERATIONS: dict[str, Operation] = {
    "send, recv": send_recv,
    "broadcast": broadcast,
    **{f"all_reduce {op}": functools.partial(all_reduce, op) for op in OPS},
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
}
WITHOUT_DTYPE: dict[str, Operation] = {"barrier": barrier, "objects": objects}


def _pieces(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return list(held(rank, world_size, dtype).chunk(world_size))


def _everyone(world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [held(rank, world_size, dtype) for rank in range(world_size)]


# --- trying them ----------------------------------------------------------------------------


def attempt(
    rank: int, world_size: int, operation: Operation, dtypes: Iterable[str], catch: bool = True
) -> dict[str, str]:
    """Try one operation with each dtype; return how each went on this rank.

    catch: False lets a refusal end the run, so that nobody waits for the rank that refused.
    """
    return {name: _once(rank, world_size, operation, name, catch) for name in dtypes}


def _once(rank: int, world_size: int, operation: Operation, dtype: str, catch: bool) -> str:
    try:
        got, want = operation(rank, world_size, getattr(torch, dtype, None))
    except Exception as error:
        if not catch:
            raise
        return f"refused: {first_line(str(error))}"
    if want is None:
        return "wrong: it returned numbers where no answer is right"
    for ours, right in zip(got, want, strict=True):
        if not torch.equal(_bytes(ours), _bytes(right)):
            odd = ours.dtype is torch.bool and bool((_bytes(ours) > 1).any())
            return "wrong: a bool that is neither 0 nor 1" if odd else f"wrong: {ours.tolist()}"
    return "works"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw bytes: PyTorch reads a bool of 2 as True and cannot compare float8."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def first_line(message: str) -> str:
    """Return the first line of a backend's message, without source files and addresses."""
    line = (message.splitlines() or ["(no message)"])[0]
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

    Each operation gets a run of its own. If that run fails, each of its dtypes gets one. An
    outcome is "works" or a word with its reason: "refused: ...", "wrong: ...", "died: ...",
    "hung: ...", and "no answer: ..." for a refusal where no answer is right.
    """
    names = tuple(dtypes)
    asked = [(name, operation, names) for name, operation in operations.items()]
    asked += [(name, operation, (ANY,)) for name, operation in without_dtype.items()]
    cells: Cells = {}
    for name, operation, kinds in asked:
        try:
            per_rank = list(run(attempt, operation, kinds))
            outcomes = {kind: _agreed([went[kind] for went in per_rank]) for kind in kinds}
        except (RankError, RankDiedError, DeadlockError, RunTimeoutError):
            outcomes = {kind: _alone(run, operation, kind) for kind in kinds}
        cells |= {(name, kind): _judged(name, kind, went) for kind, went in outcomes.items()}
    return cells


def _alone(run: Callable, operation: Operation, kind: str) -> str:
    """Try one cell of the table in a run of its own."""
    try:
        return _agreed([went[kind] for went in run(attempt, operation, (kind,), False)])
    except RankError as error:
        return f"refused: {first_line(next(iter(error.failures.values())).message)}"
    except RankDiedError as error:
        return f"died: {error.signal or f'exit code {error.exitcode}'}"
    except (DeadlockError, RunTimeoutError) as error:
        return f"hung: {first_line(str(error))}"


def _agreed(outcomes: list[str]) -> str:
    """Return "works" if it worked on every rank, else the first other outcome."""
    return next((outcome for outcome in outcomes if outcome != "works"), "works")


def _judged(name: str, kind: str, outcome: str) -> str:
    """Return the outcome, with "no answer" for a refusal where no answer is right."""
    op = name.removeprefix("all_reduce ")
    word, _, reason = outcome.partition(": ")
    if word != "refused" or op == name or has_answer(op, getattr(torch, kind)):
        return outcome
    return f"no answer: {reason}"


def refusals(cells: Cells) -> Counter[str]:
    """Count a backend's reasons for refusing, leaving out the dtype and the op they name."""
    reasons: Counter[str] = Counter()
    for (name, kind), outcome in cells.items():
        _, found, reason = outcome.partition(": ")
        if found:
            op = name.removeprefix("all_reduce ")
            reasons[reason.replace(f"torch.{kind}", "DTYPE").replace(f".{op}", ".OP")] += 1
    return reasons
