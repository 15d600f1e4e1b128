"""Waits other than `Work.wait`: futures, keys of a store, polls, threads. Runs in a rank."""

from __future__ import annotations

import ast
import builtins
import concurrent.futures
import inspect
import io
import os
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType, WrapperDescriptorType
from typing import Any

import torch.distributed as dist
from torch.distributed import Work
from torch.futures import Future

from ddp_kit.trace.calls import Call, is_short
from ddp_kit.trace.polling import find_polling_loop, is_plain_number
from ddp_kit.trace.rank.recorder import Posted, Recorder, own_line
from ddp_kit.trace.stacks import is_kit, is_own

_DISTRIBUTED = os.path.join(os.path.dirname(dist.__file__), "")
_STORE_TIMEOUT = timedelta(seconds=300)  # PyTorch's default, which nobody chose
_MOST_KEYS = 1_000  # waits for keys that are recorded in a run: the board has room for some texts
_HARMLESS = {"print": print, "sleep": time.sleep, "all": all, "any": any}
_shorten = reprlib.Repr()
_shorten.maxstring = 100


# --- futures -------------------------------------------------------------------------------


def wait_for_future(recorder: Recorder, original: Callable, future: Future) -> Any:
    """Wait for a future; the board shows the operation that completes it."""
    posted = recorder.operation_of(future)
    recorder.expect_no_wait(posted)
    return recorder.block(posted, False, original, future)


def use_future(recorder: Recorder, original: Callable, future: Future, *args: Any) -> Any:
    """Call a method of a future, and note that somebody looks after its operation."""
    recorder.expect_no_wait(recorder.operation_of(future))
    return original(future, *args)


def follow_then(
    recorder: Recorder, original: Callable, future: Future, callback: Callable
) -> Future:
    """Note that the future of a callback completes after the operation of its own future."""
    posted = recorder.operation_of(future)
    if posted is None:
        return original(future, callback)
    recorder.expect_no_wait(posted)
    later = original(future, _announced(recorder, posted, callback))
    recorder.remember(later, posted)
    return later


def add_done_callback(
    recorder: Recorder, original: Callable, future: Future, callback: Callable
) -> None:
    """Note that a callback runs once the operation of a future is complete."""
    posted = recorder.operation_of(future)
    recorder.expect_no_wait(posted)
    original(future, callback if posted is None else _announced(recorder, posted, callback))


def _announced(recorder: Recorder, posted: Posted | None, callback: Callable) -> Callable:
    """Return a callback as one that the board shows from now until its end.

    It may communicate, and no stack shows it before it begins, or after the worker has returned.
    """
    if not callable(callback):
        return callback  # PyTorch refuses it

    def call_back(done: Any) -> Any:
        try:
            return callback(done)
        finally:
            recorder.count_callbacks(posted, -1)

    recorder.count_callbacks(posted, +1)
    return call_back


def follow_all(recorder: Recorder, original: Callable, futures: Sequence[Future]) -> Future:
    """Note that a future of several others completes after the operation of each."""
    collected = original(futures)
    if (posted := _first_open(recorder, futures)) is not None:
        recorder.remember(collected, posted)
    return collected


def wait_for_all(recorder: Recorder, original: Callable, futures: Sequence[Future]) -> list:
    """Wait for several futures; the board shows the operation of one that is not complete."""
    posted = _first_open(recorder, futures)
    return original(futures) if posted is None else recorder.block(posted, False, original, futures)


def _first_open(recorder: Recorder, futures: Sequence[Future]) -> Posted | None:
    """Return an operation without which a wait for all futures cannot end; None if unknown."""
    found = [recorder.operation_of(future) for future in futures if not future.done()]
    known = [posted for posted in found if posted is not None]
    if len(known) != len(found):
        return None  # an error in an unknown one ends the wait, too
    limited = [posted for posted in known if posted.site.group.limited]
    return next(reversed(known + limited), None)  # operations mostly end in order


# --- keys of a store -----------------------------------------------------------------------


def wait_for_keys(
    name: str,
    recorder: Recorder,
    original: Callable,
    store: dist.Store,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call a method of a store that waits for keys. name: of the method."""
    recorder.key_waits += 1
    if not args or recorder.key_waits > _MOST_KEYS or not _calls_itself(sys._getframe(2)):
        return original(store, *args, **kwargs)
    if not _is_file(store, recorder.store):  # who else has it is unknown
        return original(store, *args, **kwargs)
    # It is no event of the trace: nothing is sent to anybody. But the row shows it as a wait.
    called = f"store.{name}({_shorten.repr(args[0])})"
    posted = recorder.post(("store", ()), Call("key"), op=called)
    recorder.take_back(posted)
    limits = (*args[1:], *kwargs.values())
    limited = is_short(*limits)
    if not any(isinstance(limit, timedelta) for limit in limits):
        timeout = getattr(store, "timeout", _STORE_TIMEOUT)
        limited = timeout != _STORE_TIMEOUT and is_short(timeout)
    return recorder.block(posted, limited, original, store, *args, **kwargs)


def _is_file(store: dist.Store, path: str | None) -> bool:
    """Return whether this is the FileStore at a path, perhaps behind prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return path is not None and isinstance(store, dist.FileStore) and store.path == path


def _calls_itself(frame: FrameType | None) -> bool:
    """Return whether the learner's own code makes this call, and PyTorch has not called it."""
    while frame is not None and is_kit(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or not is_own(frame.f_code.co_filename):
        return False
    while frame is not None and not frame.f_code.co_filename.startswith(_DISTRIBUTED):
        frame = frame.f_back
    return frame is None


# --- loops that poll -----------------------------------------------------------------------


def poll(recorder: Recorder, original: Callable, work: Work) -> bool:
    """Return whether an operation is complete.

    The board shows a wait for it while the learner's code does nothing but ask.
    """
    if original(work):
        recorder.look_after(work)
        return True
    frame = sys._getframe(2)
    place = frame.f_code, frame.f_lasti
    if place == recorder.no_wait_at:  # a tight loop comes here all the time
        return False
    posted = recorder.operation_of(work)
    if posted is None or posted is recorder.polled:
        return False
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and _only_polls(frame, recorder.loops):
        recorder.begin_poll(posted)
    elif in_main:
        recorder.no_wait_at = place
    return False


def _only_polls(frame: FrameType, loops: dict) -> bool:
    """Return whether a call is made in a loop that ends only when an operation is complete.

    loops: what is known of loops, by file and line; it is added to.
    """
    file, line = frame.f_code.co_filename, frame.f_lineno
    try:
        loop = loops[file, line]
    except KeyError:
        loop = loops[file, line] = find_polling_loop(file, line) if is_own(file) else None
    if loop is None:
        return False
    while frame.f_code.co_name == "<genexpr>" and frame.f_back is not None:
        frame = frame.f_back
    works = [_find(work, frame) for work in loop.works]
    for collection in (_find(name, frame) for name in loop.collections):
        if type(collection) not in (list, tuple):  # an iterator may be at its end
            return False
        works += collection
    named = ((name, _find(ast.parse(name, mode="eval").body, frame)) for name in loop.calls)
    return (
        all(found is _HARMLESS[name.split(".")[-1]] for name, found in named)
        and all(map(_is_recorded, works))
        and all(is_plain_number(_find(ast.Name(name), frame)) for name in loop.numbers)
        and ("print" not in loop.calls or type(sys.stdout) is io.TextIOWrapper)
        and not may_be_interrupted()
    )


def _is_recorded(work: Any) -> bool:
    """Return whether this is a Work, and its `is_completed` no method of the learner's."""
    method = work.is_completed if isinstance(work, Work) else None
    return getattr(method, "__code__", None) is Work.is_completed.__code__


def _find(named: ast.expr, frame: FrameType) -> Any:
    """Return what `work`, `self.work` or `works[0]` stands for; None if that may run any code."""
    if isinstance(named, ast.Name):
        scopes = frame.f_locals, frame.f_globals, vars(builtins)
        return next((scope[named.id] for scope in scopes if named.id in scope), None)
    if isinstance(named, ast.Attribute):
        owner = _find(named.value, frame)
        if not isinstance(type(owner).__getattribute__, WrapperDescriptorType):
            return None  # a method of the learner's
        held = vars(owner).get(named.attr) if hasattr(owner, "__dict__") else None
        return held if inspect.getattr_static(owner, named.attr, None) is held else None
    if isinstance(named, ast.Subscript):
        owner = _find(named.value, frame)
        at = named.slice.value if isinstance(named.slice, ast.Constant) else None
        at = _find(named.slice, frame) if isinstance(named.slice, ast.Name) else at
        if type(owner) in (list, tuple, dict) and type(at) in (int, str):
            with suppress(LookupError, TypeError):
                return owner[at]
    return None


def may_be_interrupted() -> bool:
    """Return whether the learner traces or handles signals: that may raise in the main thread.

    Libraries handle signals, too: PyTorch notices so that a worker of a DataLoader has ended.
    """
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return True
    handlers = set(map(signal.getsignal, signal.valid_signals())) - {signal.default_int_handler}
    codes = [getattr(each, "__code__", None) for each in handlers if callable(each)]
    return any(code is None or is_own(code.co_filename) for code in codes)


# --- threads -------------------------------------------------------------------------------


def join(
    recorder: Recorder, original: Callable, thread: threading.Thread, timeout: float | None = None
) -> None:
    """Wait until a thread has ended; the board shows that nothing else ends the wait."""
    if timeout is None and thread.is_alive() and not may_be_interrupted():
        return recorder.stand_still(original, thread)
    return original(thread, timeout)


def result(
    recorder: Recorder,
    original: Callable,
    future: concurrent.futures.Future,
    timeout: float | None = None,
) -> Any:
    """Wait for the result of a task; the board shows that nothing else ends the wait."""
    if timeout is None and not future.done() and not may_be_interrupted():
        return recorder.stand_still(original, future)
    return original(future, timeout)


def submit(
    recorder: Recorder, original: Callable, pool: Any, task: Callable, *args: Any, **kwargs: Any
) -> concurrent.futures.Future:
    """Remember the line that submits a task, because what it calls may have none."""
    line = own_line(sys._getframe(2))

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.lines[threading.current_thread()] = line
        return task(*args, **kwargs)

    return original(pool, run, *args, **kwargs)


def add_task_callback(
    recorder: Recorder, original: Callable, future: concurrent.futures.Future, callback: Callable
) -> None:
    """Note that a callback runs once a task is done."""
    original(future, _announced(recorder, None, callback))


def begin_task(
    recorder: Recorder, original: Callable, result: Any, *args: Any, **kwargs: Any
) -> None:
    """Note that a task of a multiprocessing pool has a callback."""
    *given, callback, error_callback = (*args, *kwargs.values())
    if callback or error_callback:
        recorder.count_callbacks(None, -1)  # only one of the two runs
        callback = _announced(recorder, None, callback or _ignore)
        error_callback = _announced(recorder, None, error_callback or _ignore)
    original(result, *given, callback, error_callback)


def _ignore(_: Any) -> None: ...
