"""Pictures of what ranks hold, send, lose and cost: plain data in, a matplotlib Figure out.

Every function returns a Picture. As the last line of a cell it shows itself; its repr is
the same numbers as a table of text. No function touches pyplot or rcParams.
"""

from ddp_kit.plot.bandwidth import bandwidth
from ddp_kit.plot.buckets import buckets
from ddp_kit.plot.losses import losses
from ddp_kit.plot.memory import memory
from ddp_kit.plot.messages import messages
from ddp_kit.plot.picture import Picture
from ddp_kit.plot.ring import ring
from ddp_kit.plot.ring_step import ring_step
from ddp_kit.plot.scaling import scaling
from ddp_kit.plot.step_times import step_times
from ddp_kit.plot.style import rank_color
from ddp_kit.plot.support import support
from ddp_kit.plot.tensors import tensors
from ddp_kit.plot.timeline import timeline
from ddp_kit.plot.waits import waits

__all__ = [
    "Picture",
    "bandwidth",
    "buckets",
    "losses",
    "memory",
    "messages",
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
    return __all__  # not the modules that they stand in
