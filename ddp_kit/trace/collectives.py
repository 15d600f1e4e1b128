"""The collectives that are recorded, and how many bytes a rank sends in each by gloo's algorithms.

    n       ranks in the group
    bytes   of the tensors that the rank passes to the call, and does not receive into

A test compares these bytes with what gloo really sends through TCP, which is up to a few percent
more for headers. Only its reduce_scatter differs: it is an all_reduce, and sends twice as much as a
ring.
nccl and MPI choose their algorithms by size and network, and may send more or less.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_kit.torch_internals import of_process_group
from ddp_kit.trace.events import Event


def _children(n: int, place: int) -> int:
    """Return to how many ranks a rank passes a broadcast on, in gloo's binomial tree.

    First the root sends to the next rank, then both to the two ranks after them, and so on.
    """
    distances = (2**level for level in range(n.bit_length()))
    return sum(distance > place and place + distance < n for distance in distances)


# How a kind of call sends: as text, and what is sent for the n ranks of a group, the bytes, and the
# place of the rank in the group as counted from the root.
Algorithm = tuple[str, Callable[[int, float, int], float]]
_NOTHING: Algorithm = ("", lambda n, nbytes, _: 0)
_RING: Algorithm = ("ring: 2(n-1)/n * bytes", lambda n, nbytes, _: 2 * (n - 1) * nbytes / n)
_GATHER_RING: Algorithm = ("ring: (n-1) * bytes", lambda n, nbytes, _: (n - 1) * nbytes)
_SCATTER_RING: Algorithm = (
    "ring: (n-1)/n * bytes (gloo: twice that)",
    lambda n, nbytes, _: (n - 1) * nbytes / n,
)
_TO_ALL: Algorithm = ("direct: (n-1)/n * bytes", _SCATTER_RING[1])
_TO_ROOT: Algorithm = ("direct: bytes; root 0", lambda n, nbytes, place: nbytes if place else 0)
_REDUCE: Algorithm = (
    "ring: bytes; root (n-1)/n of it",
    lambda n, nbytes, place: nbytes if place else (n - 1) * nbytes / n,
)
_TREE: Algorithm = (
    "tree: children * bytes",
    lambda n, nbytes, place: _children(n, place) * nbytes,
)

# By the function of `torch.distributed`: how it sends, and the methods of ProcessGroup that it
# calls, which have other names in other releases. `dist.all_gather_object` and all the others end
# in one of these methods, however they were imported, so a wrapper around each sees them all.
_COLLECTIVES: dict[str, tuple[Algorithm, tuple[str, ...]]] = {
    "broadcast": (_TREE, ("broadcast",)),
    "all_reduce": (_RING, ("allreduce",)),
    "all_reduce_coalesced": (_RING, ("allreduce_coalesced",)),
    "reduce": (_REDUCE, ("reduce",)),
    "gather": (_TO_ROOT, ("gather",)),
    "scatter": (_TO_ALL, ("scatter",)),
    "barrier": (_NOTHING, ("barrier",)),
    "all_gather": (_GATHER_RING, ("allgather",)),
    "all_gather_coalesced": (_GATHER_RING, ("allgather_coalesced",)),
    "all_gather_into_tensor": (_GATHER_RING, ("_allgather_base", "all_gather_single")),
    "all_gather_into_tensor_coalesced": (
        _GATHER_RING,
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    ),
    "reduce_scatter": (_SCATTER_RING, ("reduce_scatter",)),
    "reduce_scatter_tensor": (_SCATTER_RING, ("_reduce_scatter_base", "reduce_scatter_single")),
    "reduce_scatter_tensor_coalesced": (
        _SCATTER_RING,
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ),
    "all_to_all": (_TO_ALL, ("alltoall",)),
    "all_to_all_single": (_TO_ALL, ("alltoall_base", "all_to_all_single")),
}
FEATURES = {
    function: of_process_group(f"{function} is not traced", *methods, any_of=True)
    for function, (_, methods) in _COLLECTIVES.items()
}
# By the method of ProcessGroup.
_ALGORITHMS: dict[str, Algorithm] = {"send": ("bytes", lambda n, nbytes, _: nbytes)} | {
    method: _COLLECTIVES[function][0]
    for function, feature in FEATURES.items()
    for method in feature.found
}


def method_of(function: str) -> str:
    """Return the method of ProcessGroup that a function of `torch.distributed` calls."""
    return [function, *FEATURES[function].found][-1]


def formula(event: Event) -> str:
    """Return the algorithm of a call and what a rank sends by it; "" if it sends no tensor."""
    return _ALGORITHMS.get(event.method, _NOTHING)[0]


def bytes_sent(event: Event) -> float:
    """Return how many bytes of tensors its rank sends in a call, by `formula`."""
    ranks = event.group.ranks
    n = len(ranks)
    if event.rank not in ranks:
        return 0
    if event.splits:  # the rows to each rank
        rows, own = event.splits[0], ranks.index(event.rank)
        return event.nbytes * (1 - rows[own] / sum(rows)) if sum(rows) else 0
    root = ranks.index(event.root) if event.root in ranks else 0
    place = (ranks.index(event.rank) - root) % n
    _, sent = _ALGORITHMS.get(event.method, _NOTHING)
    return sent(n, event.nbytes, place)
