"""How undocumented names of PyTorch and Python are looked up, and those that nothing replaces.

Another release may rename any of them. The feature that needs such a name is then off, `notices`
says so in a line, and everything else works. The names of what is recorded are in
`trace/collectives.py` and in `trace/rank/`.
"""

from __future__ import annotations

import atexit
import os
import threading
import types
import warnings
from datetime import timedelta
from importlib import import_module
from multiprocessing import resource_tracker
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

C10D_MODULE = "torch.distributed.distributed_c10d"


class Feature:
    """What the kit does with undocumented names; it is off if one of them is missing.

    without: what is lost then, for the notice.
    names: "module:attribute.attribute" of each name.
    any_of: one of the names is enough, because releases use different ones.

    found: by the last part of a name, the object that has it and its value; missing: the names
    that this PyTorch does not have.
    """

    all: ClassVar[list[Feature]] = []

    def __init__(self, without: str, *names: str, any_of: bool = False) -> None:
        self.without, self.names = without, names
        self.found: dict[str, tuple[Any, Any]] = {}
        self.missing: list[str] = []
        for name in names:
            try:
                last, owner, value = _find(name)
                self.found[last] = owner, value
            except LookupError as error:
                self.missing.append(str(error))
        self.is_on = bool(self.found) if any_of else not self.missing
        Feature.all.append(self)


def notices() -> list[str]:
    """Return a line for each feature that is off: what is missing, and what is lost without it."""
    return [
        f"this PyTorch has no {' and no '.join(dict.fromkeys(feature.missing))}: {feature.without}"
        for feature in Feature.all
        if not feature.is_on
    ]


def _find(path: str) -> tuple[str, Any, Any]:
    """Return a name, the object that has it, and its value.

    Raises LookupError with the name that is missing.
    """
    at, _, names = path.partition(":")
    try:
        value: Any = import_module(at)
        for name in names.split("."):
            owner, at = value, f"{at}.{name}"
            value = getattr(owner, name)
    except (ImportError, AttributeError):
        raise LookupError(at) from None
    return name, owner, value


def of_process_group(without: str, *methods: str, any_of: bool = False) -> Feature:
    """Return a feature that needs methods of ProcessGroup."""
    names = (f"torch.distributed:ProcessGroup.{method}" for method in methods)
    return Feature(without, *names, any_of=any_of)


# --- what the kit asks PyTorch -------------------------------------------------------------

GROUP_TIMEOUT = Feature(
    "a wait in a group with a short timeout= may be reported as a deadlock before it times out",
    "torch.distributed:ProcessGroup._device_types",
    "torch.distributed:ProcessGroup._get_backend",
    "torch._C._distributed_c10d:Backend.Options._timeout",
)
FRAMES = Feature(
    "torch.compile compiles the recorder with a function that sends, and may fail",
    *(
        f"torch._C._dynamo.eval_frame:{name}"
        for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    ),
)
SOURCE_RANK = Feature(
    "a message that is received from any source is not matched with its sender",
    "torch.distributed:Work._source_rank",
)
GROUP_COUNT = Feature(
    "the process group is formed again for each run",
    *(f"{C10D_MODULE}:_world.group_count", f"{C10D_MODULE}:_world.pg_map"),
)


def group_timeout(group: ProcessGroup) -> timedelta:
    """Return after how long the operations of a group fail; `timedelta.max` if it is unknown."""
    if isinstance(getattr(group, "timeout", None), timedelta):
        return group.timeout  # a group that is written in Python
    for device_type in group._device_types if GROUP_TIMEOUT.is_on else ():
        options = getattr(group._get_backend(device_type), "options", None)
        if (timeout := getattr(options, "_timeout", None)) is not None:
            return timeout
    return timedelta.max


def wait_until_connected(group: ProcessGroup | None) -> None:
    """Wait until all ranks of a group that was just made are connected in it, if it is gloo's.

    gloo fails in a rank that is still connecting to one that has left the group meanwhile.
    """
    cpu = torch.device("cpu")
    if GROUP_TIMEOUT.is_on and cpu in getattr(group, "_device_types", ()):
        backend = group._get_backend(cpu)  # its operations are not recorded
        if isinstance(backend, getattr(dist, "ProcessGroupGloo", ())):
            backend.barrier().wait()


def never_compile(function: types.FunctionType) -> None:
    """Let torch.compile leave a function, and what it calls, as they are."""
    if not FRAMES.is_on:
        return
    set_strategy, strategy, action = (value for _, value in FRAMES.found.values())
    function._torchdynamo_disable = True  # where a function that calls it is compiled
    set_strategy(function.__code__, strategy(action.SKIP, action.SKIP))


def source_rank(work: Work) -> int | None:
    """Return which rank of its group sent what `work` received; None if it is unknown."""
    ask = getattr(work, "_source_rank", None)  # a backend in Python has a method of its own
    return None if ask is None else ask()


def count_groups() -> object:
    """Return a value that is equal as long as no process group is made or destroyed.

    It holds how many groups there are, and how many were made. If it is unknown, every value
    is unequal to all others, so the groups always count as changed.
    """
    if not GROUP_COUNT.is_on:
        return object()
    return len(_world().pg_map), _world().group_count


def any_group_made() -> bool:
    """Return whether a process group was made or has failed since the names were restarted.

    True if it is unknown.
    """
    return not GROUP_COUNT.is_on or bool(_world().group_count)


def restart_group_names() -> None:
    """Let the next process group have the name of a first one.

    Groups are named by their number, which must be the same on all ranks, and one that could not
    be formed has counted. `dist.destroy_process_group` also does this, if there is a group.
    """
    if GROUP_COUNT.is_on:
        _world().group_count = 0


def _world() -> Any:
    return GROUP_COUNT.found["group_count"][0]


# --- what pickling takes -------------------------------------------------------------------


def operator_name(obj: object) -> str | None:
    """Return the full name of a namespace or an operator of `torch.ops`; None if it is neither."""
    if type(obj) is type(torch.ops.aten):
        return obj.__name__
    return f"torch.ops.{obj}" if isinstance(obj, _OPERATORS) else None


_OPERATORS = type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the memory of a TypedStorage.

    PyTorch itself uses a private name for this; the public one warns that the class is deprecated,
    although every pickled tensor has one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return storage.untyped()


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a TypedStorage with this memory, as a pickled tensor needs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype)


# --- what the kit asks Python --------------------------------------------------------------


def run_exit_functions() -> None:
    """Join threads, and call what is registered with atexit, as Python does before it ends."""
    for owner, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(owner, name, bool)()  # the first also wakes executors that wait for work


def leave_resource_tracker() -> None:
    """Drop what a spawned rank has in place of multiprocessing's tracker of named memory.

    What is tracked in this process from now on gets a tracker of its own.
    """
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    if getattr(tracker, "_fd", None) is not None:
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None
