"""Changes to libraries that are made as soon as the worker imports them, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# What runs in place of a module's own code, with that code as a function of the module.
Execute = Callable[[Callable[[ModuleType], None], ModuleType], None]

_hooks: dict[str, Execute] = {}


def on_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with a module as soon as it is imported: now, if it is already."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        instead_of(name, partial(_execute_and_change, change))


def instead_of(name: str, execute: Execute) -> None:
    """Call `execute` in place of a module's own code when it is imported."""
    if not _hooks:
        sys.meta_path.insert(0, _Finder)
    _hooks[name] = execute


def _execute_and_change(
    change: Callable[[ModuleType], None], own: Callable[[ModuleType], None], module: ModuleType
) -> None:
    own(module)
    change(module)


class _Finder:
    """Finds the modules that have a hook, and leaves all others to Python's finders."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _hooks:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_hooks[name], spec.loader.exec_module)  # type: ignore
        return spec
