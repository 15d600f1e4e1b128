"""The lessons, one module each; each `main()` runs its lesson and proves what it claims.

Modules that begin with an underscore are parts of a lesson that would be too long in one file.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

# Lessons compare numbers to a millionth. On newer NVIDIA GPUs convolutions are less exact than
# that unless this is set before the first one ("TF32" in NVIDIA's documentation).
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that warns of old names: `renamed(__name__, old="new")`."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{name} is now {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return getattr_
