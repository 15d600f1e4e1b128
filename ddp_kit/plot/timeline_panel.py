"""The panels of a timeline: the lanes of all ranks over one axis, and the whole run in small."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ddp_kit.plot import timeline_marks as marks
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.style import INK, chip
from ddp_kit.plot.timeline_lanes import Lanes
from ddp_kit.plot.timeline_names import (
    CHARACTER,
    GAP,
    LEFT,
    WIDE,
    head_room,
    place_names,
    write_names,
)

MOST_MARKS, MOST_STEPS = 240, 48  # above, events are drawn and counted together
STEP, STARTS = 0.95, 1.3  # inches of a step where there is room; of one with a flight within it
NARROW = 2.6  # inches of the narrowest lanes


class Panel:
    """The lanes of all ranks over one axis. head: inches of the names above them; tall: inches.

    wide: inches of the axis: as many as the steps need, unless it is time, or a part of a run.
    at_least: of these. many: there are too many events to draw them one by one.
    """

    def __init__(
        self, lanes: Lanes, timed: bool, at_least: float = NARROW, is_part: bool = False
    ) -> None:
        begin, end = lanes.limits
        self.lanes, self.timed = lanes, timed
        self.length = 1.003 * ((end - begin) or 1)
        self.wide = WIDE
        if not timed and not is_part:
            longest = max((len(link.name) for link in lanes.links), default=0)
            at_once = any(0 < each.end - each.begin < 1 for each in lanes.flights)
            step = max(STARTS if at_once else STEP, CHARACTER * longest + GAP)
            self.wide = min(WIDE, max(NARROW, at_least, step * (end - begin)))
        self.scale = self.wide / self.length
        n = len(lanes.spans)
        marks_needed = 2 * len(lanes.arrows) + len(lanes.links)
        long = not timed and end - begin > MOST_STEPS and bool(lanes.arrows)
        self.many = marks_needed > MOST_MARKS or long
        most = 0.78 if lanes.flights and not self.many else 0.62
        self.lane = max(0.36, min(most, 6.8 * most / n))
        self.below = 0.12 if lanes.flights and not self.many else 0.0  # room for the lowest flight
        self.tall = n * self.lane + self.below
        slant, names = place_names(lanes.links, self.scale, begin, self.wide)
        if self.many and (slant or not all(name.text for name in names)):
            names = []
        self.slant, self.names = slant, names
        self.head = head_room(slant, names)

    @property
    def unnamed(self) -> bool:
        """Whether the name of a collective is left out for lack of space."""
        return any(not name.text for name in self.names)

    def draw(
        self,
        picture: Picture,
        sheet: Axes,
        top: float,
        xlabel: str,
        borders: Sequence[int] = (),
    ) -> None:
        """Draw the lanes, `top` inches below the top of the picture, with their ranks.

        borders: the ranks above whose lanes a line separates two hosts.
        """
        n = len(self.lanes.spans)
        lane = self.lane
        for rank in range(n):
            chip(sheet, 0.02, top + (rank + 0.5) * lane - 0.11, 0.62, 0.22, rank, f"rank {rank}")
        ax = picture.chart(LEFT, top, self.wide, self.tall, "x", xlabel)
        begin, _ = self.lanes.limits
        ax.set(xlim=(begin, begin + self.length), ylim=(self.tall / lane - 0.5, -0.5))
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
        steps = [1, 2, 5, 10]  # no ticks of 80 ms
        locator = MaxNLocator(nbins=12, steps=steps, integer=not self.timed, min_n_ticks=1)
        ax.xaxis.set_major_locator(locator)
        if not self.timed:  # lines between the steps
            ax.grid(False)
            if self.length <= MOST_STEPS + 1:
                between = [begin + step for step in range(1, round(self.length))]
                ax.set_xticks(between, minor=True)
                ax.tick_params(axis="x", which="minor", length=0)
                style = {"color": "#ececec", "linewidth": 0.8, "linestyle": "-"}
                ax.grid(True, axis="x", which="minor", **style)
        for border in borders:
            ends = [begin - (LEFT - 0.02) / self.scale, begin + self.length]
            style = {"color": INK, "linewidth": 1.8, "linestyle": "-", "clip_on": False}
            ax.plot(ends, [border - 0.5 + self.below / lane] * 2, zorder=1, **style)
        labels = marks.Labels(self.scale, lane)
        if self.many:
            marks.draw_shares(ax, self.lanes, labels)
        else:
            marks.draw_each(ax, self.lanes, labels)
        write_names(ax, self.slant, self.names, lane)
