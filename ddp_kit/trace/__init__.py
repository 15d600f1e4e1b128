"""What was communicated in one run: events, and the recorder that makes them in a rank.

    in the rank                                              in the pool's process
    dist.send ─▶ recording ─▶ Recorder ─▶ InternTable ─▶ Board ═══ Board ─▶ BoardCopy ─▶ Snapshot ─▶ Trace

`recording` stands in for PyTorch's functions. The Recorder knows what is under way, the InternTable
what was written already. The Board is memory that both processes share. A BoardCopy is a copy of it,
a Snapshot makes events of that, and the Trace has those of all ranks.
"""

from ddp_kit.trace.board import EMPTY, Board, BoardCopy
from ddp_kit.trace.call_site import describe_line, is_own, own_frame
from ddp_kit.trace.events import Event, Group, Message, Trace
from ddp_kit.trace.folder import TraceFolder, load_trace
from ddp_kit.trace.progress import draw_bar, format_progress, progress
from ddp_kit.trace.rank_trace import Clock, RankTrace, join_rank_traces
from ddp_kit.trace.recording import recording, unrecorded
from ddp_kit.trace.snapshot import Snapshot, join, read_wait
from ddp_kit.trace.unnamed import anonymous_file

__all__ = [
    "EMPTY",
    "Board",
    "BoardCopy",
    "Clock",
    "Event",
    "Group",
    "Message",
    "RankTrace",
    "Snapshot",
    "Trace",
    "TraceFolder",
    "anonymous_file",
    "describe_line",
    "draw_bar",
    "format_progress",
    "is_own",
    "join",
    "join_rank_traces",
    "load_trace",
    "own_frame",
    "progress",
    "read_wait",
    "recording",
    "unrecorded",
]
