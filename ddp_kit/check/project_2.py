"""Project 2, too large for one rank: what is given, the limit, the link, and the check.

The program under check trains a GPT in float64 on 8 ranks. `MemoryLimit` counts the bytes of every
tensor that it makes, and raises as soon as there are too many. The time of a step is never measured:
`replay` takes the calls of a run from its trace, and lets each of them last as long as on `LINK`.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit import model
from ddp_kit.check.grader import EXERCISES, FAILURES, Exercise, Grader, name_of
from ddp_kit.check.hints import Steps
from ddp_kit.check.partial_credit import Credit
from ddp_kit.errors import RankError
from ddp_kit.model import Accelerator, Cluster, Link, Plan, Precision, Transformer
from ddp_kit.progress_file import recorded
from ddp_kit.trace.bytes_sent import bytes_sent
from ddp_kit.trace.events import Event, Trace

RANKS = 8
BATCH = 8  # sequences of a step, of all ranks together
STEPS = 3
MODEL = Transformer(4, 32, 4, 128, 128, tied=False, linear_bias=False)
FLOAT64 = Precision(8, 8, 16, 8)  # Adam
LIMIT = 2_400_000  # bytes of all tensors that a rank may hold at any moment
LINK = Link(alpha=1e-3, beta=1e-6)  # 1 ms for a message, and 1 MB/s: the link of a rank


class MemoryLimit(TorchDispatchMode):
    """Raises MemoryError when the tensors that were made inside it hold more than `most` bytes.

    What several tensors share counts once. rank: for the message. peak: the most bytes so far.
    """

    def __init__(self, most: float, rank: int = 0) -> None:
        super().__init__()
        self.most, self.rank, self.held, self.peak = most, rank, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: D105
        if any(type not in (torch.Tensor, torch.nn.Parameter) for type in types):
            return NotImplemented  # then the tensors that a DTensor consists of come here
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = id(storage), storage.nbytes()
        if place in self._known:
            return
        self._known.add(place)
        self.held += nbytes
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._remove, place, nbytes)
        if self.held > self.most:
            raise MemoryError(
                f"rank {self.rank} would hold {self.held:,} bytes of tensors, and its limit is "
                f"{self.most:,}"
            )

    def _remove(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self.held -= nbytes
