"""What PyTorch gets to wait for: `dist.Work` over an `Operation`."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_kit.mpi.operation import Operation

_NO_TIMEOUT = timedelta(0)


class MPIWork(dist.Work):
    """Stands for one operation. It may be dropped: the operation goes on, unlike with gloo."""

    ends_alone = True  # for whoever records what is communicated

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation = operation

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the operation is complete. Raises RuntimeError if it failed.

        It polls: first it only yields the core, after a millisecond it sleeps in between.
        """
        self._operation.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        return True

    def is_completed(self) -> bool:
        """Tell whether the operation is over, successful or not."""
        return self._operation.look()

    def is_success(self) -> bool:
        """Tell whether the operation is over and did not fail."""
        return self._operation.look() and self._operation.error is None

    def exception(self) -> Exception | None:
        """Return why the operation failed."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes."""
        return self._operation.outputs

    def get_future(self) -> torch.futures.Future:
        """Return a future of `result()`; it completes without anybody waiting."""
        return self._operation.future()

    def source_rank(self) -> int:
        """Return the rank in the group that a received message came from; -1: none did yet."""
        return self._operation.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Do nothing: there is no stream to bring in order on the CPU."""
