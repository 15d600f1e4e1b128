"""What was communicated in one run: events, and the recorder that makes them in a rank.

    in the rank                                              in the pool's process
    dist.send ─▶ recording ─▶ Recorder ─▶ Ledger ─▶ Board ═══ Board ─▶ Log ─▶ Reading ─▶ Trace

`recording` stands in for PyTorch's functions. The Recorder knows what is under way, the Ledger
what was written already. The Board is memory that both processes share. A Log is a copy of it,
a Reading makes events of that, and the Trace has those of all ranks.
"""

from ddp_kit.trace.board import EMPTY, Board, Log
from ddp_kit.trace.call_site import describe_line, is_own, own_frame
from ddp_kit.trace.events import Event, Group, Message, Trace
from ddp_kit.trace.folder import TraceFolder, load_trace
from ddp_kit.trace.parts import Clock, Part, join_parts
from ddp_kit.trace.progress import draw_bar, progress, say_progress
from ddp_kit.trace.reading import Reading, join, read_wait
from ddp_kit.trace.recording import recording, unrecorded
from ddp_kit.trace.unnamed import unnamed_file

__all__ = [
    "EMPTY",
    "Board",
    "Clock",
    "Event",
    "Group",
    "Log",
    "Message",
    "Part",
    "Reading",
    "Trace",
    "TraceFolder",
    "describe_line",
    "draw_bar",
    "is_own",
    "join",
    "join_parts",
    "load_trace",
    "own_frame",
    "progress",
    "read_wait",
    "recording",
    "say_progress",
    "unnamed_file",
    "unrecorded",
]
