"""Captures the variables of the learner's functions when a rank raises, for `%ranks debug`.

None of the learner's code runs for it: a `__repr__`, a property or `__getattr__` may block, raise,
or communicate. So values are read by their exact built-in type, and attributes from where Python
itself keeps them.
"""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections import OrderedDict
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from ddp_kit.error_text import count
from ddp_kit.pool.wire.messages import Captured, FrameCopy, Summary, TensorCopy, known
from ddp_kit.pool.wire.pickling import pickle_whole
from ddp_kit.trace.stacks import is_own

SIZE = 1_000_000  # bytes that the values of one function may have, roughly
MOST_FRAMES = 20  # of a deep recursion, the innermost ones
MOST_ITEMS = 5_000  # of a list or dict
BEGIN = 10  # items of one that is not captured whole
MOST_ATTRIBUTES = 30
DEEPEST = 4  # levels of values inside values
MOST_NUMBERS = 1 << 20  # elements of a tensor of which there are statistics
GPU_PATIENCE = 0.01  # seconds for work on a GPU to end, after which its tensors are not read

_PLAIN = frozenset(
    {bool, bytes, complex, float, int, range, str, timedelta, type(None), type(...), type(Path())}
    | {torch.device, torch.dtype, torch.Size}
)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_TOOLS = (ModuleType, FunctionType, type)
_INTERNALS_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"}


def capture(error: BaseException) -> bytes:
    """Return a pickled Captured of an exception; b"" if no function of the learner's raised it.

    It keeps nothing of the frames alive.
    """
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            capturing = _Capturing()
            frames = capturing.frames(error)
            if not frames:
                return b""
            return pickle_whole(Captured(tuple(frames), capturing.from_gpu))
    except Exception:  # the error itself must be reported all the same
        return b""


class _Capturing:
    """One capture, with what is left of its limits."""

    def __init__(self) -> None:
        self._size = 0
        self._done: dict[int, tuple[object, Any]] = {}  # by id; the value keeps the id valid
        self._idle: dict[torch.device, bool] = {}
        self.from_gpu = False

    def frames(self, error: BaseException) -> list[FrameCopy]:
        step, steps = error.__traceback__, []
        while step is not None:
            if is_own(step.tb_frame.f_code.co_filename):
                steps.append((step.tb_frame, step.tb_lineno or 0))
            step = step.tb_next
        return [self._frame(*step) for step in steps[-MOST_FRAMES:]]

    def _frame(self, frame: FrameType, line: int) -> FrameCopy:
        self._size, code = SIZE, frame.f_code
        mine = {n: v for n, v in frame.f_locals.items() if n.isidentifier() and not _is_special(n)}
        if not code.co_flags & inspect.CO_OPTIMIZED:
            # What a cell or file imports and defines is no news.
            mine = {n: v for n, v in mine.items() if not issubclass(type(v), _TOOLS)}
        used = {name: frame.f_globals[name] for name in code.co_names if name in frame.f_globals}
        return FrameCopy(
            code.co_filename,
            line,
            code.co_firstlineno,
            code.co_name,
            {name: self.take(value) for name, value in mine.items()},
            {name: self.take(value) for name, value in used.items() if not _is_special(name)},
        )

    def take(self, value: Any, depth: int = 0) -> Any:
        """Return a copy of a value that is plain data, or a Summary.

        depth: how many other values it is inside of.
        """
        kind, key = type(value), id(value)
        if key in self._done:
            return self._done[key][1]
        if depth > DEEPEST or self._size < 0:
            return Summary(kind.__name__)
        self._size -= 16
        try:
            copy = self._copy(value, kind, depth)
        except Exception:  # another thread may be changing it
            copy = Summary(kind.__name__)
        if depth == 0 or isinstance(copy, TensorCopy):  # it is as detailed as it can be
            self._done[key] = value, copy
        return copy

    def _copy(self, value: Any, kind: type, depth: int) -> Any:
        if kind in (str, bytes) and not self._has_room(len(value)):
            unit = "characters" if kind is str else "bytes"
            return Summary(kind.__name__, f"of {len(value):,} {unit}", begin=value[:100])
        if kind in _PLAIN:
            return value
        if kind in (*_CONTAINERS, OrderedDict) and len(value) <= MOST_ITEMS:
            return self._items(value, kind, len(value), depth)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value, kind, depth)
        numpy = sys.modules.get("numpy")
        if numpy and issubclass(kind, numpy.generic):
            return value if value.dtype.kind in "biufc" else Summary(kind.__name__)
        if numpy and kind is numpy.ndarray:
            return self._array(value)
        if issubclass(kind, type):
            return Summary("class", value.__name__)
        if kind in (FunctionType, BuiltinFunctionType):
            return Summary("function", value.__name__)
        if kind is ModuleType:
            return Summary("module", vars(value).get("__name__", ""))
        return self._object(value, kind, depth)

    def _has_room(self, size: int) -> bool:
        """Return whether a value of this many bytes is captured whole; it is counted then."""
        has_room = size <= self._size
        self._size -= size if has_room else 0
        return has_room

    def _items(self, value: Any, kind: type, many: int, depth: int) -> Any:
        """Return the first items of a value of this kind: a list, a dict, and so on."""
        if issubclass(kind, dict):
            items = islice(dict.items(value), many)
            taken = ((self.take(k, depth + 1), self.take(v, depth + 1)) for k, v in items)
            return OrderedDict(taken) if kind is OrderedDict else dict(taken)
        base = next(base for base in _CONTAINERS if issubclass(kind, base))
        return base(self.take(item, depth + 1) for item in islice(base.__iter__(value), many))

    def _object(self, value: Any, kind: type, depth: int) -> Summary:
        attributes = _attributes(value)
        if issubclass(kind, BaseException):
            attributes["args"] = BaseException.args.__get__(value)  # type: ignore[attr-defined]
        if issubclass(kind, torch.nn.Module):
            groups = [attributes.get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
            own = {n: v for n, v in attributes.items() if n not in _INTERNALS_OF_MODULES}
            attributes = own | groups[0] | groups[1] | groups[2]
        names = islice(attributes, MOST_ATTRIBUTES)
        taken = {name: self.take(attributes[name], depth + 1) for name in names}
        for base in _CONTAINERS:
            if issubclass(kind, base):
                size = count(base.__len__(value), "item")
                begin = self._items(value, kind, BEGIN, depth)
                return Summary(kind.__name__, f"of {size}", taken, begin)
        return Summary(kind.__name__, attributes=taken)

    def _tensor(self, value: Any, kind: type, depth: int) -> TensorCopy | Summary:
        is_own_type = kind in (torch.Tensor, torch.nn.Parameter)
        if not is_own_type and not kind.__module__.startswith("torch."):
            return self._object(value, kind, depth)  # its class may be the learner's
        attributes = {
            name: getattr(value, name) for name in ("shape", "dtype", "device", "requires_grad")
        }
        if not is_own_type:  # such as a DTensor; to read its values may take communication
            attributes |= known(self._object(value, kind, depth)).attributes
            return Summary(kind.__name__, _describe(value), attributes)
        grad = None
        if value.requires_grad and value.is_leaf and value.grad is not None:
            grad = attributes["grad"] = self.take(value.grad, depth)
        values = ""
        if value.layout is torch.strided and not value.is_quantized and self._can_read(value):
            if isinstance(grad, TensorCopy | None) and self._has_room(value.nbytes):
                self.from_gpu |= value.is_cuda
                return TensorCopy(value, grad)
            values = self._values(value.detach(), value.numel())
        return Summary(kind.__name__, _describe(value) + values, attributes)

    def _values(self, numbers: Any, many: int) -> str:
        """Return what is known of the values in a tensor or array, unless there were too many."""
        if many > MOST_NUMBERS:
            return ""
        with suppress(Exception):  # some dtypes support little
            return f": {_describe_values(torch.as_tensor(numbers, device='cpu').reshape(-1))}"
        return ""

    def _can_read(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is there, and no GPU may keep us waiting for it."""
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
        if end > tensor.untyped_storage().nbytes():  # FSDP frees the memory of whole parameters
            return False
        if tensor.device.type != "cuda":
            return tensor.device.type == "cpu"
        if tensor.device not in self._idle:
            self._idle[tensor.device] = False  # if the next line raises
            stream, deadline = torch.cuda.current_stream(tensor.device), time.monotonic()
            deadline += GPU_PATIENCE
            while not (idle := stream.query()) and time.monotonic() < deadline:
                time.sleep(0.0005)
            self._idle[tensor.device] = idle
        return self._idle[tensor.device]

    def _array(self, value: Any) -> Any:
        """Return a copy of a small NumPy array; a Summary of any other."""
        attributes = {"shape": value.shape, "dtype": str(value.dtype)}
        values = ""
        if value.dtype.kind in "biufc":
            if self._has_room(value.nbytes):
                return value.copy()
            values = self._values(value, value.size)
        return Summary("ndarray", f"of shape {value.shape}, {value.dtype}{values}", attributes)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds in its `__dict__`, without calling its code."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _describe(tensor: torch.Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"of shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}{where}"


def _describe_values(flat: torch.Tensor) -> str:
    """Return some statistics of numbers on the CPU, and the first ones."""
    shown = (f"{n:.4g}" if isinstance(n, float) else str(n) for n in flat[:3].tolist())
    parts = [f"beginning with {', '.join(shown)}"]
    if not flat.is_complex():
        numbers = flat.double()
        known = numbers[~numbers.isnan()]
        if missing := numbers.numel() - known.numel():
            parts.insert(0, f"{missing:,} NaN")
        if known.numel():
            low, high, mean = known.min().item(), known.max().item(), known.mean().item()
            parts.insert(0, f"from {low:.4g} to {high:.4g}, mean {mean:.4g}")
    return ", ".join(parts)
