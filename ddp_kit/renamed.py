"""Old names that still work, with a DeprecationWarning, for one release."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that warns of old names: `renamed(__name__, old="new")`."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return getattr_


class RenamedAttribute:
    """The old name of an attribute: `old = RenamedAttribute("new")` in the body of a class."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, old: str) -> None:
        self._old = old

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else getattr(instance, self._warn(instance))

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, self._warn(instance), value)

    def _warn(self, instance: Any) -> str:
        message = f"{type(instance).__name__}.{self._old} is now {self._new}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return self._new
