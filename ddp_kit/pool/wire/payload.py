"""How values travel between the notebook and a rank: pickled, large tensors by file descriptor.

Tensors and arrays of 64 KiB and more are not pickled. They are written once to an anonymous file
whose descriptor goes through the pipe, and the receiver maps the file. The mapping is private, so
a receiver's changes stay with the receiver.
"""

from __future__ import annotations

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

from ddp_kit import torch_internals
from ddp_kit.trace import anonymous_file

LARGE = 1 << 16  # bytes; larger buffers travel in a file
MAPPED = 1 << 22  # bytes; larger files are mapped, smaller ones read
_ALIGNMENT = 64  # bytes; what torch gives its own tensors


@dataclass
class Payload:
    """A value on its way between two processes."""

    pickled: bytes
    spans: list[tuple[int, int]] = field(default_factory=list)  # (offset, length) in the file
    from_gpu: bool = False  # it contains tensors from a GPU, which arrive on the CPU
    file: BinaryIO | None = None  # sent after the message

    def __getstate__(self) -> tuple:
        return self.pickled, self.spans, self.from_gpu

    def __setstate__(self, state: tuple) -> None:
        self.pickled, self.spans, self.from_gpu = state
        self.file = None

    def unpack(self) -> Any:
        """Return the value. Raise whatever the value's own classes raise."""
        if self.file is None:
            return pickle.loads(self.pickled)
        with self.file:
            memory = memoryview(_map_or_read(self.file))
        buffers = [memory[offset : offset + length] for offset, length in self.spans]
        return pickle.loads(self.pickled, buffers=buffers)

    def close(self) -> None:
        """Close the file once it has been sent."""
        if self.file is not None:
            self.file.close()


def _map_or_read(file: BinaryIO) -> Any:
    """Map a large file; read a small one, because a mapping keeps a descriptor open."""
    size = os.fstat(file.fileno()).st_size
    if size >= MAPPED:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    content = bytearray(size)
    file.seek(0)
    file.readinto(content)  # type: ignore[attr-defined]
    return content


def pack(value: Any) -> Payload:
    """Pickle a value. Raise what cloudpickle raises for one that it cannot pickle."""
    buffers: list[memoryview] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True  # pickle it with the rest
        buffers.append(raw)
        return False

    pickled = io.BytesIO()
    pickler = _Pickler(pickled, protocol=5, buffer_callback=take_out)
    pickler.dump(value)
    payload = Payload(pickled.getvalue(), from_gpu=pickler.from_gpu)
    if buffers:
        payload.file = anonymous_file("values")
        for buffer in buffers:
            offset = -(-payload.file.tell() // _ALIGNMENT) * _ALIGNMENT
            payload.file.seek(offset)
            payload.spans.append((offset, buffer.nbytes))
            while buffer:  # one write is limited to 2 GiB
                buffer = buffer[payload.file.write(buffer) :]
    return payload


def pickle_whole(value: Any) -> bytes:
    """Return a value as self-contained bytes. Raise what cloudpickle raises."""
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5).dump(value)
    return pickled.getvalue()


# The names of the module whose functions rebuild a function in the rank.
_CLOUDPICKLE = vars(sys.modules[cloudpickle.Pickler.__module__])
_CODE = {types.BuiltinFunctionType, types.CodeType, types.FunctionType, types.ModuleType}


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle that takes tensors' memory as buffers and refuses open files."""

    from_gpu = False

    def dump(self, obj: Any) -> None:
        with torch_internals.quick_submodule_search():
            super().dump(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _CODE:  # most objects of a worker; the checks below take longer
            own = isinstance(obj, types.FunctionType) and obj.__globals__ is _CLOUDPICKLE
            return NotImplemented if own else super().reducer_override(obj)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type in ("cpu", "cuda"):
            self.from_gpu |= obj.device.type == "cuda"
            return _storage, (_buffer_of(obj.cpu()),)
        if isinstance(obj, torch.TypedStorage) and not obj.is_sparse:
            return torch_internals.typed_storage, (torch_internals.untyped_storage(obj), obj.dtype)
        if isinstance(obj, io.IOBase) and not _can_travel(obj):
            raise TypeError("cannot pickle an open file")  # cloudpickle would copy its content
        if obj is type(dist.Store):  # torch's own metaclass, which cannot be imported
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


def encode(message: Any) -> bytes:
    """Return a message as bytes, so that it is pickled once for all ranks."""
    return pickle.dumps(message, protocol=5)


def send(control: Connection, message: Any, encoded: bytes | None = None) -> None:
    """Send a message and the file of its payload. encoded: the message, if encoded already."""
    control.send_bytes(encode(message) if encoded is None else encoded)
    file = _payload(message).file
    if file is not None:
        # After the message, because a descriptor travels with a byte of its own.
        with _no_default_timeout():
            reduction.send_handle(control, file.fileno(), None)


def receive(control: Connection) -> Any:
    """Receive a message and the file of its payload."""
    message = control.recv()
    payload = _payload(message)
    if payload.spans:
        with _no_default_timeout():
            payload.file = open(reduction.recv_handle(control), "r+b", buffering=0)  # noqa: SIM115
    return message


@contextmanager
def _no_default_timeout() -> Iterator[None]:
    """Unset a default socket timeout of the learner's; the control pipe must not time out."""
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout)


_NOTHING = Payload(b"")


def _payload(message: Any) -> Payload:
    return getattr(message, "payload", _NOTHING)


def find_culprit(
    value: Any, path: str = "", modules: bool = True, _above: tuple[int, ...] = ()
) -> tuple[str, Any, Exception] | None:
    """Return what in a value cannot be pickled: its path, the object, and the reason.

    modules: whether modules are allowed.
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
    """Return whether a value is or contains a module, of which only the name would arrive."""
    return any(isinstance(v, types.ModuleType) for _, v in [("", value), *_parts(value)])


def _parts(value: Any) -> list[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"[{reprlib.repr(key)}]", inner) for key, inner in value.items()]
    if type(value) in (list, tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    return []
