"""Which backends are here, and what each of them can do: probes on real ranks, and their proof.

A probe is called on every rank as `operation(rank, world_size, dtype)`. It communicates and returns
two lists of tensors: what this rank got, and what it should have got. The second is None where no
answer is right, as for the bitwise "and" of two floats.
"""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from functools import partial, reduce

import psutil
import torch
import torch.distributed as dist

from ddp_kit import backends, device, pool
from ddp_kit.errors import BackendError, DeadlockError, RankDiedError, RankError, RunTimeoutError
from ddp_kit.lessons._launch import Ranks, lesson_main, prove
from ddp_kit.lessons.collectives import all_gather_single, reduce_scatter_single

PLACES = {
    "gloo on the CPU": "gloo",
    "mpi on the CPU": "mpi",
    "gloo on GPUs": "cuda:gloo",
    "nccl on GPUs": "nccl",
}
LIMIT = 10.0  # seconds for one run of a probe
BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE)
EVERYWHERE = ("float32", "float64", "int64", "int32", "uint8")  # dtypes of all backends
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn"),
    *("int64", "int32", "uint8", "bool", "complex64"),
)


def missing(backend: str, world_size: int = 2) -> str | None:
    """Return the kit's reason why a backend is unavailable here; None if it is available."""
    try:
        backends.choose_backend(backend, world_size)
    except BackendError as error:
        return str(error)
    return None


def here(world_size: int = 2) -> list[str]:
    """Return the backends available here for tensors on the CPU: gloo, and perhaps mpi."""
    return [name for name in ("gloo", "mpi") if missing(name, world_size) is None]


def started_by(rank, world_size):
    """Return the name of the program that started this process."""
    parent = psutil.Process(os.getppid()).name()
    return "Python" if parent.lower().startswith("python") else parent


# --- the operations -------------------------------------------------------------------------


def _held(rank, n, dtype):
    """Return the tensor a rank starts with: 4 * n small numbers, exact in every dtype.

    Its chunks, one for each rank, all differ, so that a chunk in the wrong place is noticed.
    """
    positions = torch.arange(4 * n) % 5
    values = (positions >> rank) & 1 if dtype is torch.bool else positions + 2 * rank
    return values.to(dtype).to(device())


def _chunks(rank, n, dtype):
    return list(_held(rank, n, dtype).chunk(n))


def _everyone(n, dtype):
    return [_held(rank, n, dtype) for rank in range(n)]


def _integral(dtype):
    return not dtype.is_floating_point and not dtype.is_complex


def _has_answer(op, dtype):
    """Return whether any tensors of this dtype have a right result: a mean is seldom an integer."""
    if op == "AVG":
        return not _integral(dtype)
    return _integral(dtype) if op in BITWISE else op not in ("MIN", "MAX") or not dtype.is_complex


def _combined(op, n, dtype):
    """Return what `op` should make of all ranks' tensors; None if no answer is right."""
    integral = _integral(dtype)
    if not _has_answer(op, dtype) and (op != "AVG" or dtype is torch.bool):
        return None
    wide = torch.int64 if integral else torch.complex128 if dtype.is_complex else torch.float64
    rows = torch.stack(_everyone(n, dtype)).cpu().to(wide)
    if op in BITWISE:
        return reduce(BITWISE[op], rows).to(dtype)
    if op == "AVG":
        return (rows.sum(0) // n if integral else rows.sum(0) / n).to(dtype)
    combine = {"SUM": rows.sum, "PRODUCT": rows.prod, "MIN": rows.amin, "MAX": rows.amax}
    return combine[op](0).to(dtype)


def _send_recv(rank, n, dtype):
    mine, left = _held(rank, n, dtype), (rank - 1) % n
    into = torch.zeros_like(mine)
    if n == 1:
        return [mine], [mine]
    steps = [lambda: dist.send(mine, (rank + 1) % n), lambda: dist.recv(into, left)]
    for step in steps if rank % 2 == 0 else reversed(steps):  # else all would wait in send
        step()
    return [into], [_held(left, n, dtype)]


def _broadcast(rank, n, dtype):
    tensor = _held(rank, n, dtype)
    dist.broadcast(tensor, src=0)
    return [tensor], [_held(0, n, dtype)]


def _all_reduce(op, rank, n, dtype):
    tensor, want = _held(rank, n, dtype), _combined(op, n, dtype)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
    return [tensor], None if want is None else [want]


def _reduce(rank, n, dtype):
    tensor = _held(rank, n, dtype)
    dist.reduce(tensor, dst=0)  # what the other ranks hold afterwards is undefined
    return ([], []) if rank else ([tensor], [_combined("SUM", n, dtype)])


def _all_gather(single, rank, n, dtype):
    mine = _held(rank, n, dtype)
    whole = torch.cat([torch.zeros_like(mine)] * n)
    pieces = list(whole.chunk(n))
    if single:
        all_gather_single(whole, mine)
    else:
        dist.all_gather(pieces, mine)
    return pieces, _everyone(n, dtype)


def _gather(rank, n, dtype):
    mine = _held(rank, n, dtype)
    pieces = None if rank else [torch.zeros_like(mine) for _ in range(n)]
    dist.gather(mine, pieces, dst=0)
    return ([], []) if rank else (pieces, _everyone(n, dtype))


def _scatter(rank, n, dtype):
    pieces = _chunks(0, n, dtype)
    into = torch.zeros_like(pieces[rank])
    dist.scatter(into, None if rank else pieces, src=0)
    return [into], [pieces[rank]]


def _reduce_scatter(single, rank, n, dtype):
    mine = _held(rank, n, dtype)
    into = torch.zeros_like(mine[:4])
    if single:
        reduce_scatter_single(into, mine)
    else:
        dist.reduce_scatter(into, list(mine.chunk(n)))
    return [into], [_combined("SUM", n, dtype).chunk(n)[rank]]


def _all_to_all(single, rank, n, dtype):
    mine = _held(rank, n, dtype)
    into = torch.zeros_like(mine)
    if single:
        dist.all_to_all_single(into, mine)
    else:
        dist.all_to_all(list(into.chunk(n)), list(mine.chunk(n)))
    return list(into.chunk(n)), [_chunks(other, n, dtype)[rank] for other in range(n)]


OPERATIONS = {
    "send, recv": _send_recv,
    "broadcast": _broadcast,
    **{f"all_reduce {op}": partial(_all_reduce, op) for op in OPS},
    "reduce": _reduce,
    "all_gather": partial(_all_gather, False),
    "all_gather_single": partial(_all_gather, True),
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": partial(_reduce_scatter, False),
    "reduce_scatter_single": partial(_reduce_scatter, True),
    "all_to_all": partial(_all_to_all, False),
    "all_to_all_single": partial(_all_to_all, True),
}


# --- trying them ----------------------------------------------------------------------------


def attempt(rank, world_size, operation, dtypes, catch=True):
    """Try one operation with each dtype, by name; return how each went on this rank.

    catch: False lets a refusal end the run, so that nobody waits for the rank that refused.
    """
    return {name: _once(rank, world_size, operation, name, catch) for name in dtypes}


def _once(rank, n, operation, dtype, catch):
    try:
        got, want = operation(rank, n, getattr(torch, dtype, None))
    except Exception as error:
        if not catch:
            raise
        return f"refused: {_first_line(str(error))}"
    if want is None:
        return "wrong: it returned numbers where no answer is right"
    for ours, right in zip(got, want, strict=True):
        if not torch.equal(_bytes(ours), _bytes(right)):
            odd = ours.dtype is torch.bool and bool((_bytes(ours) > 1).any())
            return "wrong: a bool that is neither 0 nor 1" if odd else f"wrong: {ours.tolist()}"
    return "works"


def _bytes(tensor):
    """Return the raw bytes: PyTorch reads a bool of 2 as True and cannot compare float8."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _first_line(message: str) -> str:
    """Return the first line of a backend's message, without source files and addresses."""
    line = (message.splitlines() or ["(no message)"])[0]
    line = re.sub(r"\[\S*/\S*:\d+\] ?|0x[0-9a-fA-F]+|\[\S*\]:\d+", "", line)
    return " ".join(line.split())


def probe(run, operations=OPERATIONS, dtypes=DTYPES):
    """Try every operation with every dtype on real ranks; return how each went, by both names.

    run: calls a worker on all ranks, with a time limit, such as
        `functools.partial(kit.run, world_size=2, backend="gloo", timeout=LIMIT)`.

    Each operation gets a run of its own. If that run fails, each of its dtypes gets one. An
    outcome is "works" or a word with its reason: "refused: ...", "wrong: ...", "died: ...",
    "hung: ...", and "no answer: ..." for a refusal where no answer is right.
    """
    cells: dict[tuple[str, str], str] = {}
    for name, operation in operations.items():
        try:
            per_rank = list(run(attempt, operation, dtypes))
            outcomes = {kind: _agreed([went[kind] for went in per_rank]) for kind in dtypes}
        except (RankError, RankDiedError, DeadlockError, RunTimeoutError):
            outcomes = {kind: _alone(run, operation, kind) for kind in dtypes}
        cells |= {(name, kind): _judged(name, kind, went) for kind, went in outcomes.items()}
    return cells


def _alone(run, operation, kind):
    try:
        return _agreed([went[kind] for went in run(attempt, operation, (kind,), False)])
    except RankError as error:
        return f"refused: {_first_line(next(iter(error.failures.values())).message)}"
    except RankDiedError as error:
        return f"died: {error.signal or f'exit code {error.exitcode}'}"
    except (DeadlockError, RunTimeoutError) as error:
        return f"hung: {_first_line(str(error))}"


def _agreed(outcomes):
    return next((outcome for outcome in outcomes if outcome != "works"), "works")


def _judged(name, kind, outcome):
    op = name.removeprefix("all_reduce ")
    word, _, reason = outcome.partition(": ")
    if word != "refused" or op == name or _has_answer(op, getattr(torch, kind)):
        return outcome
    return f"no answer: {reason}"


def refusals(cells) -> Counter[str]:
    """Count a backend's reasons for refusing, leaving out the dtype and the op they name."""
    reasons: Counter[str] = Counter()
    for (name, kind), outcome in cells.items():
        _, found, reason = outcome.partition(": ")
        if found:
            op = name.removeprefix("all_reduce ")
            reasons[reason.replace(f"torch.{kind}", "DTYPE").replace(f".{op}", ".OP")] += 1
    return reasons


def probe_here():
    """Probe each of PLACES with two ranks; an unavailable one gets the kit's reason instead.

    nccl is probed with as many ranks as there are GPUs, but at most two.
    """
    found = {}
    for place, backend in PLACES.items():
        world_size = 1 if backend == "nccl" and torch.cuda.device_count() == 1 else 2
        reason = missing(backend, world_size)
        run = partial(pool.run, world_size=world_size, backend=backend, timeout=LIMIT)
        found[place] = probe(run) if reason is None else reason
    return found


_SIGNS = {"works": "✓", "refused": "✗", "no answer": "·", "wrong": "≠", "died": "†", "hung": "∞"}


def print_table(places):
    """Print a row for each operation, and a column for each dtype: f16 for torch.float16."""
    for place, found in places.items():
        if isinstance(found, str):
            print(f"{place}: {found}\n")
            continue
        dtypes = dict.fromkeys(kind for _, kind in found)
        short = {kind: re.sub("(complex|float|int)", lambda m: m[0][0], kind) for kind in dtypes}
        print(f"{place:22}", *short.values())
        for name in dict.fromkeys(name for name, _ in found):
            signs = (_SIGNS[found[name, kind].partition(":")[0]] for kind in dtypes)
            row = (f"{sign:^{len(short[kind])}}" for kind, sign in zip(dtypes, signs, strict=True))
            print(f"{name:22}", *row)
        print()
    print("✓ works    ✗ refused   · refused, because no answer is right")
    print("≠ a wrong answer   † a rank died   ∞ a rank hangs")


@lesson_main("backends")
def main(ranks: Ranks) -> str:
    """Try all operations with the dtypes that every backend has, and print one line.

    On GPUs a backend may refuse an operation; a wrong answer is an error everywhere.
    """
    operations = {name: OPERATIONS[name] for name in OPERATIONS if name.split()[-1] not in BITWISE}
    on_gpus = backends.choose_backend(ranks.backend, ranks.world_size) in backends.ON_GPUS
    refused = set()
    for (name, kind), outcome in probe(ranks, operations, EVERYWHERE).items():
        word = outcome.partition(":")[0]
        right = word in ("works", "no answer") or (word == "refused" and on_gpus)
        prove(f"{name} gives the right answer for {kind}; got: {outcome}", right)
        refused |= {name} if word == "refused" else set()
    return f"{len(operations) - len(refused)} operations right on {len(EVERYWHERE)} dtypes"


from ddp_kit.lessons import backends as lesson
