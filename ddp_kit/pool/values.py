"""How values travel between the notebook and a rank: pickled, large memory by descriptor.

Tensors and arrays of 64 KiB and more are not pickled. They are written once into a file without
a name, and its descriptor goes through the pipe; the receiver maps it. The mapping is private:
what a receiver changes, it changes for itself.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import pickle
import reprlib
import socket
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import cloudpickle
import torch
import torch.distributed as dist

from ddp_kit.trace import anonymous_file

LARGE = 1 << 16  # bytes from which memory goes by descriptor
MAPPED = 1 << 22  # bytes from which a received file is mapped
_ALIGNMENT = 64  # bytes; what torch gives its own tensors


@dataclass
class Parcel:
    """A value on its way between two processes."""

    pickled: bytes
    spans: list[tuple[int, int]] = field(default_factory=list)  # (offset, length) in the file
    from_gpu: bool = False  # it holds tensors that were on a GPU; they arrive on the CPU
    file: BinaryIO | None = None  # goes beside the message

    def __getstate__(self) -> tuple:
        return self.pickled, self.spans, self.from_gpu

    def __setstate__(self, state: tuple) -> None:
        self.pickled, self.spans, self.from_gpu = state
        self.file = None

    def unpack(self) -> Any:
        """Rebuild the value; it may raise whatever the value's own classes raise."""
        if self.file is None:
            return pickle.loads(self.pickled)
        with self.file:
            memory = memoryview(_map_or_read(self.file))
        buffers = [memory[offset : offset + length] for offset, length in self.spans]
        return pickle.loads(self.pickled, buffers=buffers)

    def close(self) -> None:
        """Let go of the file, once it was sent."""
        if self.file is not None:
            self.file.close()


def _map_or_read(file: BinaryIO) -> Any:
    """Map a file, privately; read it if it is small, because a mapping keeps a descriptor."""
    size = os.fstat(file.fileno()).st_size
    if size >= MAPPED:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    content = bytearray(size)
    file.seek(0)
    file.readinto(content)  # type: ignore[attr-defined]
    return content


def pack(value: Any) -> Parcel:
    """Pickle a value of any kind that cloudpickle knows; raise what it raises for others."""
    buffers: list[memoryview] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True  # true means: pickle it with the rest
        buffers.append(raw)
        return False

    pickled = io.BytesIO()
    pickler = _Pickler(pickled, protocol=5, buffer_callback=take_out)
    pickler.dump(value)
    parcel = Parcel(pickled.getvalue(), from_gpu=pickler.from_gpu)
    if buffers:
        parcel.file = anonymous_file("values")
        for buffer in buffers:
            offset = -(-parcel.file.tell() // _ALIGNMENT) * _ALIGNMENT
            parcel.file.seek(offset)
            parcel.spans.append((offset, buffer.nbytes))
            while buffer:  # one write takes 2 GiB at most
                buffer = buffer[parcel.file.write(buffer) :]
    return parcel


def pickle_whole(value: Any) -> bytes:
    """Pickle a value with all of its memory; raise what cloudpickle raises."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5).dump(value)
    return pickled.getvalue()


def _remember_submodules() -> None:
    """Have cloudpickle look through all loaded modules once a worker, not once a run.

    It looks for submodules that the worker names, such as `torch.nn`. With torch loaded that
    takes a millisecond, half of a warm run.
    """
    find = getattr(cloudpickle.cloudpickle, "_find_imported_submodules", None)
    if find is None:
        return

    @functools.lru_cache(maxsize=256)
    def found(code: types.CodeType, used: tuple[types.ModuleType, ...], _loaded: int) -> list:
        return find(code, used)

    def find_again(code: types.CodeType, used: Any) -> list:
        modules = tuple(value for value in used if isinstance(value, types.ModuleType))
        return found(code, modules, len(sys.modules))

    cloudpickle.cloudpickle._find_imported_submodules = find_again


_remember_submodules()


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle, with the memory of tensors as buffers, and without what would only pretend."""

    from_gpu = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage) and obj.device.type in ("cpu", "cuda"):
            self.from_gpu |= obj.device.type == "cuda"
            return _storage, (_buffer_of(obj.cpu()),)
        if isinstance(obj, torch.storage.TypedStorage) and not obj.is_sparse:
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, io.IOBase) and not _can_travel(obj):
            raise TypeError("cannot pickle an open file")  # cloudpickle would copy its text
        if obj is type(dist.Store):  # torch's own metaclass, which no module holds
            return type, (dist.Store,)
        return super().reducer_override(obj)


def _can_travel(file: io.IOBase) -> bool:
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(file, (io.StringIO, io.BytesIO)) or file in standard


def _buffer_of(storage: torch.UntypedStorage) -> pickle.PickleBuffer:
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return pickle.PickleBuffer(flat.numpy())


def _storage(buffer: Any) -> torch.UntypedStorage:
    if not len(buffer):
        return torch.UntypedStorage(0)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return storage if len(buffer) >= LARGE else storage.clone()  # a clone can be resized


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def send(control: Connection, message: Any) -> None:
    """Send a message, and the file of the parcel in it."""
    control.send(message)
    file = _parcel(message).file
    if file is not None:
        # Behind the message: a descriptor travels with a byte of its own.
        with _sockets_that_wait():
            reduction.send_handle(control, file.fileno(), None)


def receive(control: Connection) -> Any:
    """Receive a message, and the file of the parcel in it."""
    message = control.recv()
    parcel = _parcel(message)
    if parcel.spans:
        with _sockets_that_wait():
            parcel.file = open(reduction.recv_handle(control), "r+b", buffering=0)  # noqa: SIM115
    return message


@contextmanager
def _sockets_that_wait() -> Iterator[None]:
    """Keep a default timeout that the learner has set away from the control pipe."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)


_NOTHING = Parcel(b"")


def _parcel(message: Any) -> Parcel:
    return getattr(message, "parcel", _NOTHING)


def find_culprit(
    value: Any, path: str = "", modules: bool = True, _above: tuple[int, ...] = ()
) -> tuple[str, Any, Exception] | None:
    """Find what in a value cannot be packed: where it stands, what it is, and why not.

    modules: whether a module can.
    """
    if isinstance(value, types.ModuleType) and not modules:
        return path, value, TypeError("a module can only be imported")
    for step, inner in _parts(value) if id(value) not in _above else ():
        found = find_culprit(inner, path + step, modules, (*_above, id(value)))
        if found:
            return found
    try:
        pack(value)
    except Exception as error:
        return path, value, error
    return None


def holds_module(value: Any) -> bool:
    """Tell whether a value is a module, or a list or dict with one. It would arrive as a name."""
    return any(isinstance(v, types.ModuleType) for _, v in [("", value), *_parts(value)])


def _parts(value: Any) -> list[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"[{reprlib.repr(key)}]", inner) for key, inner in value.items()]
    if type(value) in (list, tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    return []
