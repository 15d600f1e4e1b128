"""Pictures of what ranks hold, send, lose and cost: plain data in, a matplotlib Figure out.

Every function returns a Picture, which a notebook displays as the last line of a cell; its repr is
the same numbers as a text table. No function touches pyplot or rcParams. If something cannot be
drawn, every function raises PlotError.
"""

from ddp_kit.plot.buckets import buckets
from ddp_kit.plot.measurements import bandwidth, losses, scaling, step_times
from ddp_kit.plot.memory import memory
from ddp_kit.plot.messages import messages, waits
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.ring import ring, ring_step
from ddp_kit.plot.style import rank_color
from ddp_kit.plot.tensors import placements, tensors
from ddp_kit.plot.timeline import timeline
from ddp_kit.plot.work import attention, pipeline

__all__ = [
    "Picture",
    "attention",
    "bandwidth",
    "buckets",
    "losses",
    "memory",
    "messages",
    "pipeline",
    "placements",
    "rank_color",
    "ring",
    "ring_step",
    "scaling",
    "step_times",
    "tensors",
    "timeline",
    "waits",
]


def __dir__() -> list[str]:
    return __all__  # not the modules that define them
