"""What every device holds in memory, step by step: stacked bars."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddp_kit.errors import PlotError
from ddp_kit.plot import style
from ddp_kit.plot.picture import Picture, open_picture, read_named, short, table
from ddp_kit.plot.style import EDGE, INK, QUIET, write

# Kinds in pairs, the whole and its part or copy: one hue, the second hatched.
FILLS = ("#8fa9c4", "#dcc48e", "#8fb8b0", "#e3a9b4", "#c9c2ee", "#c4c4c4")
# These look the same in all pictures: which pair of FILLS, and which of the two. A name that
# contains one of theirs, such as "all_gather of parameters", has the same hue.
KNOWN = {
    "parameters": (0, 0),
    **dict.fromkeys(("gathered parameters", "replica"), (0, 1)),
    "gradients": (1, 0),
    "gradients on their way": (1, 1),
    **dict.fromkeys(("optimizer states", "optimizer state", "optimizer"), (2, 0)),
    **dict.fromkeys(("activations", "kept for backward"), (4, 0)),
}
HUES = (3, 5, 0, 1, 2, 4)  # which pair of FILLS to use first: one that no known kind has
LEFT, TOP, WIDE, TALL, GAP = 1.6, 0.42, 7.2, 0.95, 0.2  # inches

Held = Mapping[str, Sequence[Mapping[str, int]]]
Kinds = dict[str, tuple[str, str | None]]  # fill and hatch of each kind


def memory(
    held: Held, title: str | None = None, name: str = "device", unit: str = "bytes"
) -> Picture:
    """Draw the bytes that each device holds after each step, by kind, all on one scale.

    held maps the name of a step to one mapping per device, kind → bytes. Kinds are stacked in
    the order in which they first occur; one that no device ever holds is left out. "parameters",
    "gradients", "optimizer states" and "activations" look the same in every picture, and a name
    that contains one of these has its hue. The others take the looks that are left, in pairs of one
    hue, of which the second is hatched. name is what holds the bytes, such as "rank". unit: what is
    counted, if not bytes, such as "tokens".

    Raises PlotError if held maps something else, there is no step, no device or no kind, there are
    more than 12 kinds, steps differ in their number of devices, or a number of bytes is negative or
    not an int.
    """
    kinds, count = _read(held)
    title = f"What each {name} holds after each step" if title is None else title
    rows = [
        [
            step,
            str(device),
            *(f"{here.get(kind, 0):,}" for kind in kinds),
            f"{sum(here.values()):,}",
        ]
        for step, devices in held.items()
        for device, here in enumerate(devices)
    ]
    text_table = table(f"{title} ({unit})", ["", name, *kinds, "in all"], rows)

    highest = max(sum(here.values()) for devices in held.values() for here in devices) or 1
    height = count * (TALL + GAP) - GAP
    caption = "The number on a bar is its sum" + ("." if unit == "bytes" else f", in {unit}.")
    caption += f" All {name}s have the same scale." if count > 1 else ""
    foot = TOP + height + 0.52
    looks = {kind: (fill, EDGE, hatch) for kind, (fill, hatch) in kinds.items()}
    below = foot + style.key_place(len(kinds) - 1, 3)[1] + 0.25
    picture, sheet = open_picture(title, text_table, LEFT + WIDE + 0.15, below, caption)
    width = max(8, 64 // len(held))
    wrapped = functools.partial(textwrap.fill, width=width, break_long_words=False)
    for device in range(count):
        top = TOP + device * (TALL + GAP)
        style.chip(sheet, 0, top + TALL / 2, 0.76, device, f"{name} {device}")
        ax = picture.chart(LEFT, top, WIDE, TALL, "y")
        text = style.byte_size if unit == "bytes" else _count
        _bars(ax, [devices[device] for devices in held.values()], kinds, text)
        ax.set(xlim=(-0.6, len(held) - 0.4), ylim=(0, 1.2 * highest))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=3))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        ax.set_xticks(range(len(held)), [wrapped(step) for step in held])
        ax.tick_params(axis="x", length=0, labelbottom=device == count - 1)
    style.draw_key(sheet, 0, foot, looks, columns=3)
    return picture


def _read(held: Held) -> tuple[Kinds, int]:
    """Return the kinds to draw, each with its look, and how many devices there are."""
    example = '{"update": [{"parameters": 4}]}'
    content = f"the name of each step to a list with one mapping per device, such as {example}"
    read_named("held", held, content)
    for devices in held.values():
        if not isinstance(devices, Sequence) or not all(isinstance(d, Mapping) for d in devices):
            raise PlotError(f"held must map {content}, got {short(devices)}")
    counts = {len(devices) for devices in held.values()}
    if len(counts) > 1:
        raise PlotError(f"every step must have the same devices, got {sorted(counts)} of them")
    most: dict[str, int] = {}
    for step, devices in held.items():
        for device, here in enumerate(devices):
            for kind, nbytes in here.items():
                if not isinstance(nbytes, int) or nbytes < 0:
                    raise PlotError(
                        f"{kind!r} of device {device} after {step!r} has {nbytes!r} bytes: "
                        "must be an int of at least 0"
                    )
                most[kind] = max(nbytes, most.get(kind, 0))
    if not 0 < len(most) <= 2 * len(FILLS):
        raise PlotError(f"from 1 to {2 * len(FILLS)} kinds can be drawn, got {len(most)}")
    looks = _looks(most)
    return {kind: looks[kind] for kind in most if most[kind]}, counts.pop()


def _looks(names: Iterable[str]) -> Kinds:
    hues = {name: {hue for known, (hue, _) in KNOWN.items() if known in name} for name in names}
    free = [(hue, second) for hue in HUES for second in (0, 1)]
    looks: Kinds = {}
    for name in sorted(hues, key=lambda name: (name not in KNOWN, not hues[name])):
        wanted = [KNOWN[name]] if name in KNOWN else []
        wanted += [look for look in free if look[0] in hues[name]]
        look = next(look for look in (*wanted, *free) if look in free)
        free.remove(look)
        looks[name] = FILLS[look[0]], "/////" if look[1] else None
    return looks


def _count(value: float, digits: int = 0) -> str:
    return f"{value:,.0f}"


def _bars(
    ax: Axes, steps: Sequence[Mapping[str, int]], kinds: Kinds, text: Callable[[float, int], str]
) -> None:
    floor = [0] * len(steps)
    for kind, (fill, hatch) in kinds.items():
        look = {"facecolor": fill, "edgecolor": EDGE, "linewidth": 0.6}
        for x, here in enumerate(steps):
            if tall := here.get(kind, 0):
                (bar,) = ax.bar([x], [tall], 0.62, bottom=[floor[x]], **look)
                style.set_hatch(bar, hatch, EDGE)
                floor[x] += tall
    for x, whole in enumerate(floor):
        look = {"ha": "center", "va": "bottom", "color": INK if whole else QUIET}
        write(ax, x, whole, text(whole, 3), 8, **look)
