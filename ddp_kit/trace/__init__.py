"""What was communicated in one run: events, and the recorder that makes them in a rank."""

from ddp_kit.trace.board import Board
from ddp_kit.trace.call_site import describe_line, is_own, own_frame
from ddp_kit.trace.events import Send, Trace
from ddp_kit.trace.recorder import recording
from ddp_kit.trace.unnamed import unnamed_file

__all__ = [
    "Board",
    "Send",
    "Trace",
    "describe_line",
    "is_own",
    "own_frame",
    "recording",
    "unnamed_file",
]
