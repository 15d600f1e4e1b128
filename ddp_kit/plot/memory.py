"""What every device holds in memory, step by step: stacked bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddp_kit.plot.marks import dress
from ddp_kit.plot.numbers import size, table
from ddp_kit.plot.picture import Picture, label_axes
from ddp_kit.plot.style import INK, QUIET, chip, write

# Kinds in pairs, the whole and its part or copy: one hue, the second hatched.
FILLS = ("#8fa9c4", "#dcc48e", "#8fb8b0", "#e3a9b4", "#c9c2ee", "#c4c4c4")
EDGE = "#3f4f5f"
LEFT, TOP, WIDE, TALL, GAP = 1.6, 0.42, 7.2, 0.95, 0.2  # inches

Held = Mapping[str, Sequence[Mapping[str, int]]]


def memory(held: Held, title: str | None = None) -> Picture:
    """Draw the bytes that each device holds after each step, by kind, all on one scale.

    held maps the name of a step to one mapping a device, kind → bytes. Kinds are stacked in
    the order in which they first occur; one that nobody ever holds is left out. Every second
    kind is hatched and has the hue of the one before it.

    ValueError if there is no step, no device or no kind, there are more than 12 kinds, steps
    differ in their number of devices, or a number of bytes is no whole number or negative.
    TypeError if held is no mapping.
    """
    kinds, count = _read(held)
    if title is None:
        title = "What each device holds after each step"
    rows = [
        [step, str(place), *(f"{here.get(kind, 0):,}" for kind in kinds), f"{_sum(here):,}"]
        for step, devices in held.items()
        for place, here in enumerate(devices)
    ]
    twin = table(f"{title} (bytes)", ["", "device", *kinds, "in all"], rows)

    top = max(_sum(here) for devices in held.values() for here in devices) or 1
    height = count * (TALL + GAP) - GAP
    places, lines = _key_places(kinds)
    said = "The number on a bar is its sum. All devices have the same scale."
    full = TOP + height + 0.56 + 0.2 * lines + 0.3
    picture = Picture(LEFT + WIDE + 0.15, full, twin)
    sheet = picture.sheet()
    write(sheet, 0.02, 0.12, title, 11.5, weight="bold")
    for place in range(count):
        above = TOP + place * (TALL + GAP)
        chip(sheet, 0.02, above + TALL / 2 - 0.11, 0.72, 0.22, place, f"device {place}")
        ax = picture.chart(LEFT, above, WIDE, TALL, grid="y")
        _bars(ax, [devices[place] for devices in held.values()], kinds)
        ax.set(xlim=(-0.6, len(held) - 0.4), ylim=(0, 1.2 * top))
        ax.yaxis.set_major_locator(MaxNLocator(nbins=3))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        ax.set_xticks(range(len(held)), [step.replace(" ", "\n") for step in held])
        ax.tick_params(axis="x", length=0, labelbottom=place == count - 1)
        label_axes(ax)
    _key(sheet, kinds, places, TOP + height + 0.64)
    write(sheet, 0.02, full - 0.1, said, 8.5, color=QUIET)
    return picture


def _read(held: Held) -> tuple[dict[str, int], int]:
    """Return the kinds to draw, each with its look, and how many devices there are."""
    if not isinstance(held, Mapping):
        raise TypeError(
            "held must map the name of each step to a list with one mapping a device, such as "
            f'{{"update": [{{"parameters": 4}}]}}, got {type(held).__name__}'
        )
    counts = {len(devices) for devices in held.values()}
    if not counts or counts == {0}:
        raise ValueError("held is empty: there is no device to draw")
    if len(counts) > 1:
        raise ValueError(f"every step must have the same devices, got {sorted(counts)} of them")
    most: dict[str, int] = {}
    for step, devices in held.items():
        for place, here in enumerate(devices):
            for kind, nbytes in here.items():
                if not isinstance(nbytes, int) or nbytes < 0:
                    raise ValueError(
                        f"{kind!r} of device {place} after {step!r} has {nbytes!r} bytes"
                    )
                most[kind] = max(nbytes, most.get(kind, 0))
    if not most:
        raise ValueError("held has no kind of memory: there is nothing to draw")
    if len(most) > 2 * len(FILLS):
        raise ValueError(f"at most {2 * len(FILLS)} kinds can be told apart, got {len(most)}")
    return {kind: look for look, kind in enumerate(most) if most[kind]}, counts.pop()


def _sum(here: Mapping[str, int]) -> int:
    return sum(here.values())


def _look(index: int) -> tuple[str, str | None]:
    return FILLS[index // 2 % len(FILLS)], "/////" if index % 2 else None


def _bars(ax: Axes, steps: Sequence[Mapping[str, int]], kinds: Mapping[str, int]) -> None:
    floor = [0] * len(steps)
    for kind, look in kinds.items():
        fill, hatch = _look(look)
        heights = [here.get(kind, 0) for here in steps]
        drawn = [(x, h, f) for x, (h, f) in enumerate(zip(heights, floor, strict=True)) if h]
        for x, tall, below in drawn:
            style = {"facecolor": fill, "edgecolor": EDGE, "linewidth": 0.6}
            (bar,) = ax.bar([x], [tall], 0.62, bottom=[below], **style)
            dress(bar, hatch, EDGE)
        floor = [below + tall for below, tall in zip(floor, heights, strict=True)]
    for x, whole in enumerate(floor):
        style = {"ha": "center", "va": "bottom", "color": INK if whole else QUIET}
        ax.annotate(
            size(whole), (x, whole), (0, 1.5), textcoords="offset points", fontsize=8, **style
        )


def _key_places(kinds: Iterable[str]) -> tuple[list[tuple[float, int]], int]:
    """Return the place and the line of each kind's sign in the key, and how many lines."""
    places, x, line = [], 0.02, 0
    for kind in kinds:
        wide = 0.6 + 0.075 * len(kind)
        if x + wide > LEFT + WIDE and x > 0.02:
            x, line = 0.02, line + 1
        places.append((x, line))
        x += wide
    return places, line + 1


def _key(sheet: Axes, kinds: Mapping[str, int], places, top: float) -> None:
    for (kind, look), (x, line) in zip(kinds.items(), places, strict=True):
        fill, hatch = _look(look)
        y = top + 0.2 * line
        style = {"facecolor": fill, "edgecolor": EDGE, "linewidth": 0.6, "linestyle": "-"}
        dress(sheet.broken_barh([(x, 0.26)], (y - 0.07, 0.14), **style), hatch, EDGE)
        write(sheet, x + 0.34, y, kind, 8.5, color=INK)
