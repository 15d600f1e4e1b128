"""The arguments of a run: checked before anything starts, and pickled for the ranks."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import reprlib
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil

from ddp_kit import settings
from ddp_kit.backends import choose_backend
from ddp_kit.errors import KitError, PoolError
from ddp_kit.pool import live_view
from ddp_kit.pool.wire import messages, pickling

FILES_A_RANK = 5  # control and print pipe, board, and two that multiprocessing holds
FILES_ELSEWHERE = 100  # what a notebook's kernel has open for itself, generously
CONTROL_GROUP = Path("/sys/fs/cgroup")  # where a container's limit is
CACHE = "inactive_file", "active_file"  # of what the group has read; it gives way to processes

P, R = ParamSpec("P"), TypeVar("R")


def explaining_arguments(
    example: str, refused: type[KitError] = PoolError
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function raise an error, in a sentence, if its arguments do not fit its signature.

    example: a right call, which the sentence shows. refused: the type of the error.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(function), example.partition("(")[0]
        options = [p.name for p in signature.parameters.values() if p.default is not p.empty]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                why, right = str(error), f"write {example}"
                why = f"is {why}" if why.startswith("missing") else f"has {why}"
                if wrong := next((key for key in kwargs if key not in signature.parameters), ""):
                    why = f"has no argument {wrong}="
                    if near := difflib.get_close_matches(wrong, options, 1):
                        right = f"did you mean {near[0]}=?"
                    elif "*args" in example:
                        right += "; the worker's own arguments have no names"
                raise refused(f"{name} {why}; {right}") from None
            return function(*args, **kwargs)

        return call

    return decorate


def prepare(
    worker: Callable[..., Any],
    args: tuple,
    world_size: int,
    backend: str,
    timeout: float | None,
    living: int,
) -> tuple[int, str, pickling.Payload]:
    """Return the world size and the backend, and worker and arguments pickled.

    living: how many of the ranks run already.

    Raises PoolError or BackendError for what cannot be run.
    """
    size = check_world_size(world_size, living)
    chosen = choose_backend(backend, size)
    check_timeout(timeout)
    check_signature(worker, args)
    return size, chosen, pack(worker, args)


def check_world_size(world_size: int, living: int) -> int:
    """Return it as an int. Raise PoolError unless this machine can run that many ranks.

    living: how many of them run already.
    """
    if messages.serving:
        raise PoolError(
            "a rank cannot start ranks of its own; call kit.run from the notebook, or in a module "
            'below `if __name__ == "__main__":`'
        )
    size = whole_number(world_size)
    if size is None:
        raise PoolError(f"world_size must be a whole number such as 4, got {world_size!r}")
    if size < 1:
        raise PoolError(f"world_size must be at least 1, got {size}")
    check_room(size, living)
    return size


# --- how many ranks this machine has room for ------------------------------------------------


def available_memory() -> int:
    """Return how many bytes processes may still use, on this machine and in this container."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # no control group, or one without a limit
        limit = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        lines = (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        stat = dict(map(str.split, lines))
        used -= sum(int(stat[name]) for name in CACHE)
        available = min(available, limit - used)
    return available


def check_room(size: int, living: int) -> None:
    """Raise PoolError unless there is room for `size` ranks, of which `living` run already."""
    if size <= living:
        return
    if size > (most := ranks_by_files()):
        raise PoolError(
            f"world_size must be at most {most} here, because of the limit on open files, got "
            f"{size}; run `ulimit -n {FILES_ELSEWHERE + FILES_A_RANK * size}` before starting "
            "Jupyter"
        )
    if size > max(settings.RANKS_NEVER_REFUSED, most := ranks_by_memory(living)):
        raise PoolError(
            f"world_size must be at most {most} now, because a rank needs about "
            f"{settings.RANK_MEMORY / 1e6:g} MB and {available_memory() / 1e9:.1f} GB are free, "
            f"got {size}; call kit.shutdown() in other notebooks, or set kit.settings.RANK_MEMORY "
            "to what a rank really needs"
        )


def ranks_by_memory(living: int) -> int:
    """Return how many ranks fit into the memory that is free, with `living` that run already."""
    return max(1, living + int(available_memory() / settings.RANK_MEMORY))


def ranks_by_files() -> int:
    """Return how many ranks this process can start with the files that it may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - FILES_ELSEWHERE) // FILES_A_RANK)


# --- the other arguments -----------------------------------------------------------------------


def whole_number(value: Any) -> int | None:
    """Return a whole number as an int, also one of NumPy's or torch's; None if it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:
        return None


def check_timeout(timeout: float | None, name: str = "timeout", optional: bool = True) -> None:
    """Raise PoolError unless a time limit is a positive number of seconds, or None if it may be."""
    if timeout is None and optional:
        return
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout <= math.inf:
        none = " or None" if optional else ""
        given = reprlib.repr(timeout)
        raise PoolError(f"{name} must be a positive number of seconds{none}, got {given}")


def check_signature(worker: Callable[..., Any], args: tuple, set_by: str = "world_size=") -> None:
    """Raise PoolError unless `worker(rank, world_size, *args)` is a possible call.

    set_by: the argument that sets the number of ranks, for the error.
    """
    name = getattr(worker, "__name__", None) or type(worker).__name__
    if not callable(worker):
        raise PoolError(
            f"the worker must be a function, got {worker!r}; pass the function itself, "
            "kit.run(worker), and not what a call of it returns"
        )
    if inspect.iscoroutinefunction(worker):
        raise PoolError(
            f"{name} is an async function, which would return a coroutine and not run; call "
            "asyncio.run(...) in a plain worker"
        )
    if inspect.isgeneratorfunction(worker):
        raise PoolError(
            f"{name} is a generator function, which would return a generator and not run; collect "
            "the values in a list and return that"
        )
    try:
        signature = inspect.signature(worker)
    except (TypeError, ValueError):
        return  # some built-in callables have no signature
    first = list(signature.parameters)[:2]
    try:
        signature.bind(0, 1, *args)
    except TypeError:
        passed = "".join(f", {reprlib.repr(arg)}" for arg in args)
        takes_both = f"write {name}(rank, world_size), because every worker gets both; "
        raise PoolError(
            f"{name}{signature} cannot be called as {name}(rank, world_size{passed}); "
            f"{takes_both if len(first) < 2 else ''}what follows the worker is passed on to "
            f"it, and {set_by} sets the number of ranks"
        ) from None
    if first == ["world_size", "rank"]:
        live_view.say(
            f"{name} gets the rank as its first argument, which it calls world_size: write "
            f"{name}(rank, world_size)"
        )


def pack(worker: Callable[..., Any], args: tuple) -> pickling.Payload:
    """Pickle worker and arguments. Raise PoolError naming what cannot be pickled."""
    try:
        return pickling.pack((worker, args), for_ranks=True)
    except Exception as error:
        reason = error
    found = pickling.find_culprit(args)
    if found:  # "[0]['a']" is argument 0['a']
        path, culprit, reason = found
        what = f"argument {path[1:].replace(']', '', 1)}"
    else:
        what, culprit, reason = _used_by(worker) or ("the worker", worker, reason)
    raise refusal(what, culprit, reason) from None


def refusal(what: str, culprit: Any, reason: Exception) -> PoolError:
    """Return the error that says why something cannot be sent to the ranks."""
    return PoolError(f"{what} cannot be sent to the ranks: {_explain(what, culprit, reason)}")


def _explain(what: str, culprit: Any, reason: Exception) -> str:
    """Return why something cannot be sent, and what would be right."""
    if what.startswith("get_ipython"):
        return "they have no IPython; call subprocess.run instead of !, and Python instead of %"
    advice = "make it inside the worker, or pass numbers, tensors, lists or dicts"
    if inspect.isroutine(culprit) or inspect.isclass(culprit):
        return f"it uses something that only this process has ({reason})"
    elif "through inheritance" in str(reason) or type(culprit).__name__.endswith("Queue"):
        advice = (
            "the ranks are running already; return values from the worker, or pass an object of "
            "multiprocessing.Manager(), such as its Queue()"
        )
    return f"{type(culprit).__name__} ({reason}); {advice}"


def _used_by(user: Callable[..., Any], above: tuple = ()) -> tuple[str, Any, Exception] | None:
    """Return which of the notebook's variables prevents a worker from being pickled."""
    try:
        used = inspect.getclosurevars(user)
    except TypeError:
        return None  # not a plain function
    by = f"{user.__name__}()" if above else "the worker"
    for name, value in {**used.nonlocals, **used.globals}.items():
        found = pickling.find_culprit(value)
        if found and not any(value is one for one in (user, *above)):
            path, culprit, reason = found
            inside = _used_by(culprit, (*above, user)) if inspect.isfunction(culprit) else None
            return inside or (f"{name}{path}, which {by} uses,", culprit, reason)
    return None
