"""The file that torchrun starts on every host: a worker of a notebook, as a program."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_kit.errors import PoolError
from ddp_kit.launch.program import Program, Script, pack


def write(program: Program, path: Path) -> None:
    """Write a program. Raises PoolError if that cannot be, and then leaves nothing."""
    text = _text(program)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PoolError(f"a file {path.name!r} is in the way; move it") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise PoolError(f"{path.name!r} cannot be written here: {error.strerror}") from error


def name_of(worker: Callable[..., Any]) -> str:
    """Return a worker's name as one for a file: "<lambda>" has no place in it."""
    name = worker.name if isinstance(worker, Script) else getattr(worker, "__name__", "worker")
    return re.sub(r"\W", "", Path(name).stem) or "worker"


def as_script(name: str) -> Script:
    """Return what runs a module or a file. Raises PoolError where there is none."""
    cure = "name a module or a file, or pass a function"
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise PoolError(f"there is no file {name!r}; {cure}")
        return Script(os.path.abspath(name))
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise PoolError(f"there is no module {name!r}; {cure}")
    return Script(name)


def _text(program: Program) -> str:
    """Return the worker's source, for a reader, and the worker itself, for Python."""
    try:
        source = inspect.getsource(program.worker)
    except (OSError, TypeError):
        source = name_of(program.worker)
    source = textwrap.indent(source.rstrip(), "# ")
    packed = "\n".join(f'    "{line}"' for line in textwrap.wrap(pack(program), 96))
    return f'''"""Written by kit.torchrun, for torchrun to start on each host. It runs this:"""

{source}

from ddp_kit.launch import program

PACKED = (
{packed}
)

if __name__ == "__main__":
    program.run(PACKED)
'''
