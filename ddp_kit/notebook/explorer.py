"""A picture of a real run, with controls on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddp_kit.errors import PoolError
from ddp_kit.pool import Result, check_world_size, run

if TYPE_CHECKING:
    from ipywidgets import VBox

    from ddp_kit.plot import Picture

Settings = dict[str, Any]


class Explorer:
    """A run with some settings, drawn; `interact()` returns controls that run it with others.

    As the last line of a cell it shows its picture, a PNG with the same numbers as text, which
    stays visible without a kernel.

    lesson: the module in which the learner finds the worker.
    settings: their values by name; "world_size" is one of them.
    choices: returns the options of each setting, given all settings. A range becomes a slider,
        strings a menu.
    ask: returns what to run: the worker and its arguments.
    draw: draws a result.
    idle: returns the settings that have no effect at present; they are hidden.
    frames, frame: return how many steps a result has, and a drawing of one of them, if it is
        shown step by step.

    Raises PoolError for a setting that is not among its choices, and what `kit.run` raises.
    """

    def __init__(
        self,
        lesson: str,
        settings: Settings,
        choices: Callable[[Settings], dict[str, Sequence]],
        ask: Callable[[Settings], tuple],
        draw: Callable[[Result, Settings], Picture],
        idle: Callable[[Settings], set[str]] = lambda settings: set(),
        frames: Callable[[Result], int] | None = None,
        frame: Callable[[Result, int], Picture] | None = None,
    ) -> None:
        check_world_size(settings["world_size"])
        for name, options in choices(settings).items():
            check_choice(name, settings[name], options)
        self.choices, self.idle = choices, idle
        self.frames, self.frame = frames, frame
        self._lesson, self._ask, self._draw = lesson, ask, draw
        self.run(settings)

    def run(self, settings: Settings) -> None:
        """Run with these settings on the shared pool, and draw. An error changes nothing."""
        worker, *args = self._ask(settings)
        result = run(worker, *args, world_size=settings["world_size"])
        picture = self._draw(result, settings)
        self.settings, self.result, self.picture = dict(settings), result, picture

    @property
    def call(self) -> str:
        """The run as a learner would write it in a cell."""
        parts = [_name(self._lesson, part) for part in self._ask(self.settings)]
        return f"kit.run({', '.join(parts)}, world_size={self.settings['world_size']})"

    def interact(self) -> VBox:
        """Return controls, for the last line of a cell. They work as long as the kernel runs.

        Raises PoolError outside a notebook.
        """
        from ddp_kit.notebook.controls import Panel

        return Panel(self).box

    def __repr__(self) -> str:
        return repr(self.picture)

    def _repr_png_(self) -> bytes:
        return self.picture._repr_png_()


def check_choice(name: str, value: Any, options: Sequence) -> None:
    """Raise PoolError unless a setting is one of its options."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value in options and (whole or not isinstance(options, range)):
        return
    if isinstance(options, range):
        raise PoolError(
            f"{name} must be a whole number from {options[0]} to {options[-1]}, got {value!r}"
        )
    raise PoolError(f"{name} must be one of {', '.join(map(str, options))}, got {value!r}")


def positive(name: str, value: float, usual: Sequence[float]) -> list[float]:
    """Return the usual values of a setting and this one, in order.

    Raises PoolError unless it is a positive number.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise PoolError(f"{name} must be a positive number, got {value!r}")
    return sorted({*usual, value})


def _name(lesson: str, value: Any) -> str:
    return f"{lesson}.{value.__name__}" if callable(value) else repr(value)
