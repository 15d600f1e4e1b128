"""A picture of a real run that stands still, until its controls are asked for."""

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
    """A run with some settings, drawn; `interact()` gives controls that run it with others.

    As the last line of a cell it shows its picture, a PNG with the same numbers as text. It
    needs no kernel to be seen again.

    settings: what was chosen, by name; "world_size" is one of them.
    choices: says what each setting may be, given all of them. A range becomes a slider, words a
        menu.
    ask: says what to run: the worker and its arguments.
    draw: draws a result.
    idle: names the settings that make no difference now; they are not shown.
    frames, frame: how many steps a result has, and a drawing of one of them; for those that are
        looked at step by step.
    lesson: the module in which the learner finds the worker.

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
        """Run with these settings on the shared pool, and draw; an error leaves all as it was."""
        worker, *args = self._ask(settings)
        result = run(worker, *args, world_size=settings["world_size"])
        picture = self._draw(result, settings)
        self.settings, self.result, self.picture = dict(settings), result, picture

    @property
    def call(self) -> str:
        """What was run, as one would write it in a cell."""
        worker, *args = self._ask(self.settings)
        said = [_name(self._lesson, worker), *(_name(self._lesson, arg) for arg in args)]
        return f"kit.run({', '.join(said)}, world_size={self.settings['world_size']})"

    def interact(self) -> VBox:
        """Return controls, for the last line of a cell. They live as long as the kernel.

        Raises PoolError where there is no notebook.
        """
        from ddp_kit.notebook.panel import Panel

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
