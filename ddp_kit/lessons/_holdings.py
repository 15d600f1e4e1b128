"""What devices hold in memory: measured from the tensors that live, virtual devices included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# What a device may hold. Each line: the whole of something, then the part or copy of it.
KINDS = (
    *("parameters", "replica"),
    *("batch", "shard"),
    *("gathered, loss", "outputs"),
    *("gradients", "optimiser state"),
    "kept for backward",
)


class Holdings:
    """The memory of every device, each storage once, for as long as it lives."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._known: dict[StorageWeakRef, tuple[int, str, int]] = {}

    def add(self, place: int, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note the memory of these tensors; what is known already keeps its first name."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known.setdefault(StorageWeakRef(storage), (place, kind, storage.nbytes()))

    def bytes(self) -> list[dict[str, int]]:
        """Return the bytes that live now, by kind, for each device."""
        held = [dict.fromkeys(KINDS, 0) for _ in range(self.count)]
        for storage, (place, kind, nbytes) in self._known.items():
            if not storage.expired():
                held[place][kind] += nbytes
        return held


def kept_for_backward(output: torch.Tensor) -> list[torch.Tensor]:
    """Find the tensors that autograd keeps, in every node on the way back from `output`."""
    found, seen, waiting = [], set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        found += [value for value in saved if isinstance(value, torch.Tensor)]
        waiting += [earlier for earlier, _ in node.next_functions]
    return found
