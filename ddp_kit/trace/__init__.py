"""What was communicated in one run: events, and the recorder that writes them in a rank.

    in the rank                                           in the pool's process
    dist.send ▶ recording ▶ Recorder ▶ InternTable ▶ Board ═══ Board ▶ BoardCopy ▶ Snapshot ▶ Trace

`recording` replaces PyTorch's functions. The Recorder knows which operations are not complete, the
InternTable which groups and calls are on the board. The Board is memory that both processes share.
A BoardCopy is a copy of it, a Snapshot makes events of that, and a Trace has those of all ranks.
"""

from ddp_kit.trace.board import (
    EMPTY,
    FORMING,
    IMPORTING,
    SERVING,
    Board,
    BoardCopy,
    anonymous_file,
)
from ddp_kit.trace.calls import InternTable
from ddp_kit.trace.events import Event, Group, Message, Trace
from ddp_kit.trace.rank.progress import progress
from ddp_kit.trace.rank.recorded_functions import recording, unrecorded
from ddp_kit.trace.snapshot import Snapshot, join, read_wait
from ddp_kit.trace.stacks import describe_line, is_own, own_frame
from ddp_kit.trace.trace_files import Clock, RankTrace, TraceFolder, join_rank_traces, load_trace
