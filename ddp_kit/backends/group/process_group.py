"""The names, the timeout and the checks of a process group that is written in Python."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_kit.backends.group import tensors as memory

Tensors = Sequence[Tensor]


class PythonProcessGroup(dist.ProcessGroup):
    """A process group without operations, which a backend adds.

    backend: PyTorch's name for it. timeout: seconds until an operation fails.
    """

    def __init__(self, backend: str, rank: int, size: int, timeout: float) -> None:
        super().__init__(rank, size)
        self._backend = backend
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._name = self._description = ""

    # PyTorch's C++ calls these by name

    def getBackendName(self) -> str:
        """Return the name under which the backend is registered."""
        return self._backend

    def getGroupName(self) -> str:
        """Return PyTorch's name for the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set PyTorch's name for the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the `group_desc` of `new_group`."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the `group_desc` of `new_group`."""
        self._description = description

    def monitored_barrier(self, *_args: Any, **_options: Any) -> None:
        """Refuse what only gloo can do; `dist.monitored_barrier` says so as well."""
        raise RuntimeError(
            f'the "{self._backend}" backend has no monitored_barrier, only gloo has; use barrier'
        )

    def _get_backend(self, device: torch.device) -> PythonProcessGroup:
        """Return the group itself, for `dist.batch_isend_irecv` of PyTorch 2.15 and newer."""
        return self

    @property
    def timeout(self) -> timedelta:
        """The time after which an operation fails."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that start from now on."""
        self._timeout = timeout.total_seconds()

    def _timeout_of(self, opts: Any) -> float:
        """Return the seconds that an operation may take; PyTorch's options take precedence."""
        own = 0.0 if opts is None else opts.timeout.total_seconds()
        return own if own > 0 else self._timeout

    def _check_list(self, name: str, tensors: Tensors, own: Tensor | None, side: str) -> None:
        """Raise ValueError unless there is a tensor for each rank and this rank's one fits."""
        if len(tensors) != self._size:
            raise ValueError(
                f"{name} needs one {side} tensor for each of the {self._size} ranks, "
                f"got {len(tensors)}"
            )
        assert own is not None, "only a list of another length has none"
        memory.check_dtypes(name, tensors, own)
        here = tensors[self._rank]
        if here.numel() != own.numel():
            raise ValueError(
                f"{name}: {side} tensor {self._rank} has {here.numel()} elements, "
                f"but its counterpart on this rank has {own.numel()}"
            )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Raise ValueError unless a tensor is as large as one part for each rank."""
        memory.check_dtypes(name, [whole], part)
        if whole.numel() != part.numel() * self._size:
            raise ValueError(
                f"{name} needs a tensor of {self._size} parts of {part.numel()} elements, "
                f"got {whole.numel()} elements"
            )
