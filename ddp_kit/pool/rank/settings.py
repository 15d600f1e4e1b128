"""What a run has changed in its rank's process: functions, and settings that can be asked for."""

from __future__ import annotations

import builtins
import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import types
import warnings
from _signal import getsignal  # the public one takes four times as long
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.modules import module
from torch.optim import optimizer

from ddp_kit import torch_internals
from ddp_kit.trace import is_own

_OWNERS = (
    *(builtins, dist, os, sys, random, socket, time, threading, torch, torch.cuda),
    *(torch.nn.functional, torch.nn.Module, torch.Tensor),
)


class Functions:
    """The functions of a module or class, of which a worker's replacements must not last."""

    def __init__(self, owner: types.ModuleType | type) -> None:
        self._owner, self._there = owner, vars(owner)
        self._values = [*self._there.values()]
        self._originals = {
            # Some classes are settings: `set_default_dtype` replaces `torch.Storage`.
            name: value
            for name, value in self._there.items()
            if callable(value) and not isinstance(value, type)
        }

    def put_back(self) -> list[str]:
        """Put back the functions that were replaced; return their names."""
        try:
            if [*self._there.values()] == self._values:  # nearly always
                return []
        except Exception:  # two cannot be compared
            pass
        replaced = {}
        for name in self._originals:  # without a function of Python's: it may be among them
            value = self._there.get(name)
            if value is not self._originals[name]:
                _setattr(self._owner, name, self._originals[name])
                replaced[name] = value
        for name, value in list(replaced.items()):
            if _is_by_library(name, value):
                self._originals[name] = replaced.pop(name)
                _setattr(self._owner, name, value)
        self._values = [*self._there.values()]
        prefix = "" if self._owner is builtins else f"{self._owner.__name__}."
        return [f"{prefix}{name}" for name in replaced]


_setattr = setattr  # a worker may replace it


def _is_by_library(name: str, value: object) -> bool:
    """Return whether a library has wrapped a function, as `torch.compile` does."""
    if not isinstance(value, types.FunctionType):
        return False
    if value.__name__ != name and "<locals>" not in value.__qualname__:
        return False
    while isinstance(value, types.FunctionType):
        if is_own(value.__code__.co_filename):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def _handlers() -> list[Any]:
    """Return the handlers of signals; one that a library has set may stay."""
    found = [getsignal(number) for number in _SIGNALS]
    for at, handler in enumerate(found):
        code = getattr(handler, "__code__", None)
        if code and not is_own(code.co_filename):
            found[at] = int(signal.SIG_DFL)
    return found


_SIGNALS = sorted(signal.valid_signals())


def _decimal() -> tuple:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax, str(context.traps)


def _hooks() -> list[int]:
    return [len(hooks) for hooks in _HOOKS]


_HOOKS = [
    value
    for owner in (module, optimizer)
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def _limits() -> list[object]:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    limits = map(resource.getrlimit, _LIMITS)
    return [cores, os.getpriority(os.PRIO_PROCESS, 0), *limits]


def _umask() -> int:
    os.umask(mask := os.umask(0o77))  # the only way to ask
    return mask


_LIMITS = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


# Changes after which a rank needs a fresh process, unless _PUT_BACK undoes them.
_FACTS: dict[str, Callable[[], object]] = {
    "set a handler for a signal": _handlers,
    "left a timer running": lambda: [signal.getitimer(number)[0] > 0 for number in range(3)],
    "blocked a signal": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "changed a limit of its process": _limits,
    "changed the umask": _umask,
    "enabled faulthandler": faulthandler.is_enabled,
    "set a trace function": lambda: (sys.gettrace(), sys.getprofile()),
    "changed the switch interval": sys.getswitchinterval,
    "changed the garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
    "changed the start method": lambda: (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    ),
    "changed the sharing strategy": torch.multiprocessing.get_sharing_strategy,
    "changed decimal's context": _decimal,
    "changed the locale": lambda: (locale.setlocale(locale.LC_ALL), time.tzname),
    "changed NumPy's settings": lambda: (numpy.geterr(), numpy.get_printoptions()),
    "disabled logging": lambda: logging.Logger.manager.disable,
    "left a hook on all modules or optimizers": _hooks,
    "changed autocast": lambda: list(map(torch.get_autocast_dtype, ("cpu", "cuda"))),
    "set flush_denormal": lambda: sys.float_info.min / 2 == 0,
    "changed a backend of torch": lambda: (
        torch.backends.opt_einsum.enabled,
        torch.backends.opt_einsum.strategy,
        torch.backends.mha.get_fastpath_enabled(),
    ),
    "changed the debug level": dist.get_debug_level,
    "left rpc open": torch_internals.rpc_is_open,
}


_PUT_BACK: dict[str, Callable[[Any], object]] = {
    "changed NumPy's settings": lambda was: (
        numpy.seterr(**was[0]),
        numpy.set_printoptions(**was[1]),
    ),
    "changed decimal's context": lambda was: decimal.setcontext(decimal.Context(*was[:4])),
    "disabled logging": logging.disable,
    "changed the garbage collector": lambda was: (
        (gc.enable if was[0] else gc.disable)(),
        gc.set_threshold(*was[1]),
        gc.set_debug(was[2]),
    ),
    "changed the sharing strategy": torch.multiprocessing.set_sharing_strategy,
    "set flush_denormal": torch.set_flush_denormal,
    "changed the debug level": dist.set_debug_level,
}


class Settings:
    """The settings of this process, as the run before has left them."""

    def __init__(self) -> None:
        self._functions = [Functions(owner) for owner in _OWNERS]
        # By what they are: how to ask for each, how to set it, and its value.
        self._plain = {
            f"torch's {what}": (get, put, get()) for what, get, put in torch_internals.settings()
        }
        limit = sys.getrecursionlimit, sys.setrecursionlimit, sys.getrecursionlimit()
        self._plain["the recursion limit"] = limit
        self._facts: list[object] = []

    def remember(self) -> None:
        """Let the first run begin with the settings as they are now."""
        self._facts = self._facts or [ask() for ask in _FACTS.values()]

    def put_back_functions(self) -> list[str]:
        """Put back functions that were replaced; return their names: others may hold them, too."""
        return [name for functions in self._functions for name in functions.put_back()]

    def put_back(self, is_cell: bool) -> str | None:
        """Put back the plain settings; return what was done to one that cannot be put back.

        is_cell: what was set outside PyTorch is for the next cell, too.
        """
        if not self._facts:
            return None  # the worker never began
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)  # tells the compiler, too
        torch.set_default_device(None)
        faulthandler.cancel_dump_traceback_later()  # nobody can ask whether there is one
        before, now = self._facts, [ask() for ask in _FACTS.values()]
        if now != before and not is_cell:
            for at, what in enumerate(_FACTS):
                if now[at] != before[at] and what in _PUT_BACK:
                    with suppress(Exception):  # then the process is fresh instead
                        _PUT_BACK[what](before[at])
            now = [ask() for ask in _FACTS.values()]
        self._facts = now
        if left := self._left_plain():
            for get, put, value in self._plain.values():
                if _differs(get, value):
                    with suppress(Exception), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        put(*value) if isinstance(value, tuple) else put(value)
        left = left and self._left_plain()
        for what in left:  # the next run is not to blame for it
            get, put, _ = self._plain[what]
            with suppress(RuntimeError):
                self._plain[what] = get, put, get()
        done = [f"changed {what}" for what in left]
        if self._facts != before:
            facts = zip(_FACTS, before, self._facts, strict=True)
            done += [what for what, old, new in facts if old != new]
        return done[0] if done else None

    def _left_plain(self) -> list[str]:
        """Return which plain settings differ."""
        return [what for what, (get, _, value) in self._plain.items() if _differs(get, value)]


def _differs(get: Callable[[], Any], value: object) -> bool:
    try:
        return get() != value
    except RuntimeError:  # two settings contradict each other
        return True
