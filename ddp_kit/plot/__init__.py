"""Pictures of what ranks hold, send, lose and cost: plain data in, a matplotlib Figure out.

Every function returns a Picture, which a notebook displays as the last line of a cell; its repr is
the same numbers as a text table. No function touches pyplot or rcParams. If something cannot be
drawn, every function raises PlotError.
"""

from ddp_kit.plot.attention import attention
from ddp_kit.plot.buckets import buckets
from ddp_kit.plot.losses import losses
from ddp_kit.plot.memory import memory
from ddp_kit.plot.messages import messages
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.pipeline import pipeline
from ddp_kit.plot.placements import placements
from ddp_kit.plot.ring import ring, ring_step
from ddp_kit.plot.step_times import step_times
from ddp_kit.plot.style import rank_color
from ddp_kit.plot.support import support
from ddp_kit.plot.tensors import tensors
from ddp_kit.plot.timeline import timeline
from ddp_kit.plot.times import bandwidth, scaling
from ddp_kit.plot.waits import waits

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
    "support",
    "tensors",
    "timeline",
    "waits",
]


def __dir__() -> list[str]:
    return __all__  # not the modules that define them
