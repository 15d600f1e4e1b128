"""How values travel between the notebook and a rank: pickled, large tensors by file descriptor.

Tensors and arrays of 64 KiB and more are not pickled. They are written once to an anonymous file
whose descriptor goes through the pipe, and the receiver maps the file. The mapping is private, so
a receiver's changes stay with the receiver.
"""

from __future__ import annotations

import dis
import inspect
import io
import mmap
import operator
import os
import pickle
import pkgutil
import reprlib
import sys
import types
from contextlib import suppress
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
    spans: list[tuple[int, int]] = field(default_factory=list)  # of buffers: offset and length
    from_gpu: bool = False  # it contains tensors from a GPU, which arrive on the CPU
    file: BinaryIO | None = None  # has the buffers; sent after the message

    def __reduce__(self) -> tuple:
        return Payload, (self.pickled, self.spans, self.from_gpu)  # without the file

    def unpack(self) -> Any:
        """Return the value. Raise whatever the value's own classes raise."""
        if self.file is None:
            return pickle.loads(self.pickled)
        memory = memoryview(_map_or_read(self.file))
        buffers = [memory[offset : offset + length] for offset, length in self.spans]
        try:
            return pickle.loads(self.pickled, buffers=buffers)
        finally:
            self.close()

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _map_or_read(file: BinaryIO) -> Any:
    """Map a large file; read a small one, because a mapping keeps a descriptor open."""
    size = os.fstat(file.fileno()).st_size
    if size >= MAPPED:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    # All ranks have the same open file, and so one position in it: whoever reads must not move it.
    return bytearray(os.pread(file.fileno(), size, 0))


def pack(value: Any, for_ranks: bool = False) -> Payload:
    """Pickle a value. Raise what cloudpickle raises for one that it cannot pickle.

    for_ranks: it is a worker with its arguments, on their way to the ranks.
    """
    payload = Payload(b"")
    buffers: list[memoryview] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        is_small = buffer.raw().nbytes < LARGE
        if not is_small:
            buffers.append(buffer.raw())
        return is_small  # pickle it with the rest

    pickled = io.BytesIO()
    kind = _WorkerPickler if for_ranks else _Pickler
    pickler = kind(pickled, protocol=5, buffer_callback=take_out)
    pickler.dump(value)
    payload.pickled, payload.from_gpu = pickled.getvalue(), pickler.from_gpu
    for buffer in buffers:
        payload.file = payload.file or anonymous_file("values")
        offset = -(-payload.file.tell() // _ALIGNMENT) * _ALIGNMENT
        payload.file.seek(offset)
        payload.spans.append((offset, buffer.nbytes))
        while buffer:  # one write is limited to 2 GiB
            buffer = buffer[payload.file.write(buffer) :]
    return payload


def pickle_whole(value: Any, for_ranks: bool = False) -> bytes:
    """Return a value as self-contained bytes. Raise what cloudpickle raises."""
    pickled = io.BytesIO()
    (_WorkerPickler if for_ranks else _Pickler)(pickled, protocol=5).dump(value)
    return pickled.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle that takes tensors' memory as buffers and refuses open files.

    What can be imported by name is sent by name, also where it is not a plain module.
    """

    from_gpu = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage) and obj.device.type in ("cpu", "cuda"):
            self.from_gpu |= obj.device.type == "cuda"
            return _storage, (_buffer_of(obj.cpu()),)
        if isinstance(obj, torch.TypedStorage) and not obj.is_sparse:
            return torch_internals.typed_storage, (torch_internals.untyped_storage(obj), obj.dtype)
        for name in ("stdout", "stderr"):
            if obj is getattr(sys, name):
                return getattr, (sys, name)
        if isinstance(obj, io.IOBase) and not _can_travel(obj):
            raise TypeError("cannot pickle an open file")  # cloudpickle would copy its content
        if isinstance(obj, Connection):  # pickle would copy the number of its descriptor
            raise TypeError(
                "Connection objects should only be shared between processes through inheritance"
            )
        if type(obj).__module__ == "IPython.core.autocall":  # a notebook's exit and quit
            return getattr, (sys, "exit")
        if obj is type(dist.Store):  # torch's own metaclass, which cannot be imported
            return type, (dist.Store,)
        if name := _import_name(obj):
            return pkgutil.resolve_name, (name,)
        return super().reducer_override(obj)


class _WorkerPickler(_Pickler):
    """The same for a worker and its arguments.

    The rank's `__main__` gets what is sent by value, under the name that it has in this one, since
    pickle looks it up there, and the global variables of the functions.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) < 6 or obj.__module__ != "__main__":
            return reduced  # only a function or a class that is sent by value has six parts
        make, args, state, _, _, set_state = reduced
        names = _names_of(obj)
        return make, args, (set_state, state, obj.__qualname__, names), None, None, _set_in_main


def _names_of(obj: Any) -> dict[str, Any]:
    """Return the name of a function or a class in `__main__`, and those that it needs there.

    These are names in the bodies of classes that a function defines: cloudpickle looks for names in
    functions only.
    """
    main, names = sys.modules["__main__"], {}
    is_function = isinstance(obj, types.FunctionType)
    if is_function:
        space = obj.__globals__
        names = {word: space[word] for word in _of_bodies(obj.__code__) & space.keys()}
    first, *inner = obj.__qualname__.split(".")
    with suppress(AttributeError):  # it is local to a function, or has been replaced
        if operator.attrgetter(obj.__qualname__)(main) is obj and not (is_function and inner):
            names[first] = getattr(main, first)
    # A worker that does not need the others should not fail for them.
    return {n: value for n, value in names.items() if value is obj or not find_culprit(value)}


def _of_bodies(code: types.CodeType) -> set[str]:
    """Return the names that the bodies of classes within a function look up."""
    found: set[str] = set()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # it is no function
                found |= {i.argval for i in dis.get_instructions(inner) if i.opname == "LOAD_NAME"}
            found |= _of_bodies(inner)
    return found


def _set_in_main(obj: Any, state: tuple) -> None:
    set_state, own_state, qualname, names = state
    set_state(obj, own_state)
    if isinstance(obj, types.FunctionType):
        obj.__globals__.update(names)
        names = obj.__globals__
    else:
        obj.__qualname__ = qualname  # cloudpickle leaves out the outer classes
    vars(sys.modules["__main__"]).update(names)


def _import_name(obj: Any) -> str | None:
    """Return the name by which a rank can import an object; None if it is no kind of module."""
    if name := torch_internals.operator_name(obj):
        return name
    if isinstance(obj, type) and _is_renamed(obj):
        return f"{obj.__module__}:{obj.__name__}"
    if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
        return obj.__name__ if sys.modules.get(obj.__name__) is obj else None
    return None


def _is_renamed(kind: type) -> bool:
    """Return whether a module has a class under its name, which is not its `__qualname__`.

    PyTorch renames some of its native classes so, and pickle looks for the `__qualname__`.
    """
    module = sys.modules.get(kind.__module__)
    return kind.__name__ not in kind.__qualname__.split(".") and (
        getattr(module, kind.__name__, None) is kind
    )


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


def send(control: Connection, message: Any) -> None:
    """Send a message and the file of its payload."""
    control.send_bytes(pickle.dumps(message, protocol=5))
    payload = getattr(message, "payload", None)
    if payload is not None and payload.file is not None:
        # After the message, because a descriptor travels with a byte of its own.
        reduction.send_handle(control, payload.file.fileno(), None)


def receive(control: Connection) -> Any:
    message = control.recv()
    payload = getattr(message, "payload", None)
    if payload is not None and payload.spans:
        payload.file = open(reduction.recv_handle(control), "r+b", buffering=0)  # noqa: SIM115
    return message


def find_culprit(
    value: Any, path: str = "", _above: tuple[int, ...] = ()
) -> tuple[str, Any, Exception] | None:
    """Return what in a value cannot be pickled: its path, the object, and the reason."""
    for step, inner in _parts(value) if id(value) not in _above else ():
        if found := find_culprit(inner, path + step, (*_above, id(value))):
            return found
    try:
        pack(value)
    except Exception as error:
        return path, value, error
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if type(value) is dict:
        return [(f"[{reprlib.repr(key)}]", inner) for key, inner in value.items()]
    if type(value) in (list, tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    return []
