"""The controls of an explorer: a widget for each setting, a line of text, a picture.

A callback never runs ranks: it says what is wished, and the main thread carries it out. Nothing is
printed or displayed, because what a control does belongs to no cell.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import ipywidgets as widgets

from ddp_kit.failures import count
from ddp_kit.notebook.controls import Explorer, Settings
from ddp_kit.notebook.turn import Turn
from ddp_kit.pool import interruptible, view

INTERVAL = 1000  # milliseconds that a step is shown when Play runs
STAYS = "The picture is that of the run before."


class Wish(NamedTuple):
    """What the controls say: the settings, which step to show, whether to run in any case."""

    settings: Settings
    step: int
    again: bool = False


class Panel:
    """Controls of an explorer; `box` holds them all."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer = explorer
        self._turn = Turn(self._carry_out, self._tell_wait)
        settings = explorer.settings
        self._settings = {
            name: _chooser(name, options, settings[name])
            for name, options in explorer.choices(settings).items()
        }
        self._again = widgets.Button(description="Run again")
        self._line = widgets.HTML()
        self._image = widgets.Image(format="png", layout=_own_size())
        rows = [widgets.HBox([*self._settings.values(), self._again], layout=_wrapping())]
        self._step = self._play = None
        if explorer.frames is not None:
            self._step = widgets.IntSlider(description="step", min=0, max=0)
            self._play = widgets.Play(min=0, max=0, interval=INTERVAL)
            widgets.jslink((self._play, "value"), (self._step, "value"))
            rows.append(widgets.HBox([self._play, self._step]))
        self.box = widgets.VBox([*rows, self._line, self._image])
        self._fit(settings)
        self._show()
        self._asked = self._wish()
        for chooser in [*self._settings.values(), *([self._step] if self._step else [])]:
            chooser.observe(self._on_change, "value")
        self._again.on_click(lambda button: self._turn.ask(self._wish()._replace(again=True)))

    def _wish(self) -> Wish:
        settings = {name: chooser.value for name, chooser in self._settings.items()}
        return Wish(settings, self._step.value if self._step else 0)

    def _on_change(self, change: Any) -> None:
        """Offer what can be chosen now, and ask for what is; on any thread."""
        self._fit(self._wish().settings)
        wish = self._wish()
        if wish != self._asked:  # one change may bring others
            self._asked = wish
            self._turn.ask(wish)

    def _fit(self, settings: Settings) -> None:
        idle = self._explorer.idle(settings)
        for name, options in self._explorer.choices(settings).items():
            _offer(self._settings[name], options)
            self._settings[name].layout.display = "none" if name in idle else None

    def _carry_out(self, wish: Wish) -> None:
        """Run if that is needed, and draw. On the main thread, when no cell runs."""
        try:
            with view.unseen(), interruptible():
                if wish.again or wish.settings != self._explorer.settings:
                    self._say(f"running on {count(wish.settings['world_size'], 'rank')} ...")
                    self._explorer.run(wish.settings)
                self._show(wish.step)
        except KeyboardInterrupt:
            self._turn.forget()
            self._say(f'stopped by an interrupt. {STAYS} "Run again" runs what the controls say.')
        except Exception as error:  # nobody else would tell it
            self._say(f"{type(error).__name__}: {error}\n{STAYS}")

    def _tell_wait(self) -> None:
        self._say("queued: it runs when what runs now has ended")

    def _show(self, step: int = 0) -> None:
        """Show the explorer's picture, or one step of its run."""
        explorer = self._explorer
        picture = explorer.picture
        if explorer.frames is not None:
            last = explorer.frames(explorer.result) - 1
            step = min(step, last)
            picture = explorer.frame(explorer.result, step)
            self._step.max = self._play.max = last
        self._image.value = picture._repr_png_()
        self._say(explorer.call)

    def _say(self, text: str) -> None:
        self._line.value = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def _chooser(name: str, options: Sequence, value: Any) -> widgets.Widget:
    style = {"description_width": "initial"}
    if isinstance(options, range):
        ends = {"min": options[0], "max": options[-1]}
        kind = widgets.IntSlider(value, **ends, continuous_update=False)
    elif isinstance(value, str):
        kind = widgets.Dropdown(options=options, value=value)
    else:
        kind = widgets.SelectionSlider(options=options, value=value, continuous_update=False)
    kind.description, kind.style = name, style
    return kind


def _offer(chooser: widgets.Widget, options: Sequence) -> None:
    """Change what can be chosen; a slider keeps its value within its ends."""
    if isinstance(options, range):
        chooser.max = options[-1]


def _own_size() -> widgets.Layout:
    return widgets.Layout(align_self="flex-start", max_width="100%")


def _wrapping() -> widgets.Layout:
    return widgets.Layout(flex_flow="row wrap")
