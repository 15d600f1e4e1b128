"""A picture of a real run and, where somebody can use them, controls that run it again.

Lessons import this module in every rank, so it loads ipywidgets only for the controls. A callback
never runs ranks: it makes a request, which the main thread carries out. Nothing is printed or
displayed, because what a control does belongs to no cell.
"""

from __future__ import annotations

import asyncio
import html
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddp_kit.error_text import count
from ddp_kit.errors import PoolError
from ddp_kit.pool import Result, check_world_size, interruptible, live_view, run
from ddp_kit.pool.ipython import has_front_end

if TYPE_CHECKING:
    from ipywidgets import VBox, Widget

    from ddp_kit.plot import Picture

INTERVAL = 1000  # milliseconds that a step is shown when Play runs
STAYS = "The picture is from the previous run."
NO_CONTROLS = "Menus and sliders appear here when this cell runs in JupyterLab."  # on GitHub, say
PAUSE = 0.05  # seconds without a newer request before one is carried out: a slider sends many

Settings = dict[str, Any]


class Explorer:
    """A run with some settings, drawn, and controls that run it with others.

    As the last line of a cell it shows its picture, a PNG with the same numbers as text, which
    stays visible without a kernel. In JupyterLab, controls follow, with a picture of their own once
    they are used; `interact()` returns such controls on request.

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
        return Panel(self).box

    def _ipython_display_(self) -> None:
        """Show the picture and the controls; without a front end leave it to `_repr_png_`."""
        if not has_front_end():
            raise NotImplementedError
        from IPython.display import display

        display(self.picture)
        box = Panel(self, beside_picture=True).box
        data = box._repr_mimebundle_() | {"text/plain": NO_CONTROLS}
        display(data, raw=True)

    def __repr__(self) -> str:
        return repr(self.picture)

    def _repr_png_(self) -> bytes:
        return self.picture._repr_png_()


def check_choice(name: str, value: Any, options: Sequence) -> None:
    """Raise PoolError unless a setting is one of its options."""
    if value not in options or (isinstance(options, range) and type(value) is not int):
        raise PoolError(f"{name} must be one of {', '.join(map(str, options))}, got {value!r}")


def _name(lesson: str, value: Any) -> str:
    if not callable(value):
        return repr(value)
    if hasattr(value, "__name__"):
        return f"{lesson}.{value.__name__}"
    names = vars(importlib.import_module(f"ddp_kit.lessons.{lesson}")).items()
    return next(f"{lesson}.{name}" for name, found in names if found is value)  # a partial


class Panel:
    """Controls of an explorer; `box` holds them all.

    beside_picture: the explorer's picture is on the page already, so show one on the first change.

    `ipywidgets.interactive` would run ranks on whichever thread the kernel reads a front end's
    message: between two cells on the main one, while a cell runs on another. Ranks start on the
    main thread only, so its event loop carries out the newest request when no cell runs there.

    Raises PoolError if there is no such loop: controls need a notebook.
    """

    def __init__(self, explorer: Explorer, beside_picture: bool = False) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise PoolError(
                "controls need a notebook: call interact() in one of its cells"
            ) from None
        import ipywidgets as widgets

        self._explorer, settings = explorer, explorer.settings
        self._settings = {
            name: _chooser(name, options, settings[name])
            for name, options in explorer.choices(settings).items()
        }
        again, self._line = widgets.Button(description="Run again"), widgets.HTML()
        own_size = widgets.Layout(align_self="flex-start", max_width="100%")
        self._image = widgets.Image(format="png", layout=own_size)
        self._play = widgets.Play(min=0, max=0, interval=INTERVAL)
        self._step = widgets.IntSlider(description="step", min=0, max=0)
        widgets.jslink((self._play, "value"), (self._step, "value"))
        choosers = [*self._settings.values(), again]
        rows = [widgets.HBox(choosers, layout=widgets.Layout(flex_flow="row wrap"))]
        rows += [widgets.HBox([self._play, self._step])] if explorer.frames else []
        self.box = widgets.VBox([*rows, self._line, self._image])
        self._fit(settings)
        self._show()
        if beside_picture:
            self._image.layout.display = "none"
        self._asked = self._chosen()
        # The newest request, until it is carried out: settings, the step to show, whether to run
        # in any case.
        self._waiting: tuple[Settings, int, bool] | None = None
        for chooser in (*self._settings.values(), self._step):
            chooser.observe(lambda change: self._ask(), "value")
        again.on_click(lambda button: self._ask(again=True))

    def _chosen(self) -> tuple[Settings, int]:
        settings = {name: chooser.value for name, chooser in self._settings.items()}
        return settings, self._step.value

    def _ask(self, again: bool = False) -> None:
        """Update the options, and request what is chosen. On any thread."""
        self._fit(self._chosen()[0])
        chosen = self._chosen()
        if chosen == self._asked and not again:  # one change may cause others
            return
        self._asked = chosen
        self._waiting = request = (*chosen, again)
        if threading.current_thread() is not threading.main_thread():
            self._say("queued until the current cell or run has ended")
        self._loop.call_soon_threadsafe(self._loop.call_later, PAUSE, self._carry_out, request)

    def _fit(self, settings: Settings) -> None:
        idle = self._explorer.idle(settings)
        for name, options in self._explorer.choices(settings).items():
            if isinstance(options, range):  # a slider keeps its value within its limits
                self._settings[name].max = options[-1]
            self._settings[name].layout.display = "none" if name in idle else None

    def _carry_out(self, request: tuple[Settings, int, bool]) -> None:
        """Run if necessary, and draw. On the main thread, while no cell runs."""
        if request is not self._waiting:  # a newer one has taken its place
            return
        self._waiting, (settings, step, again) = None, request
        try:
            with live_view.unseen(), interruptible():
                if again or settings != self._explorer.settings:
                    self._say(f"running on {count(settings['world_size'], 'rank')} ...")
                    self._explorer.run(settings)
                self._show(step)
                self._image.layout.display = None
        except KeyboardInterrupt:
            self._waiting = None
            self._say(f'stopped by an interrupt. {STAYS} "Run again" runs the current settings.')
        except Exception as error:  # nobody else would report it
            self._say(f"{type(error).__name__}: {error}\n{STAYS}")

    def _show(self, step: int = 0) -> None:
        """Show the explorer's picture, or one step of its run."""
        explorer = self._explorer
        picture = explorer.picture
        if explorer.frames is not None:
            last = explorer.frames(explorer.result) - 1
            picture = explorer.frame(explorer.result, min(step, last))
            self._step.max = self._play.max = last
        self._image.value = picture._repr_png_()
        self._say(explorer.call)

    def _say(self, text: str) -> None:
        self._line.value = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def _chooser(name: str, options: Sequence, value: Any) -> Widget:
    import ipywidgets as widgets

    look = {"description": name, "style": {"description_width": "initial"}}
    if isinstance(options, range):
        look |= {"min": options[0], "max": options[-1]}
        return widgets.IntSlider(value, continuous_update=False, **look)
    if isinstance(value, str):
        return widgets.Dropdown(options=options, value=value, **look)
    return widgets.SelectionSlider(options=options, value=value, continuous_update=False, **look)
