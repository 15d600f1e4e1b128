"""What was communicated in one run: events, and the recorder that makes them in a rank."""

from ddp_kit.trace.events import Send, Trace
from ddp_kit.trace.recorder import recording

__all__ = ["Send", "Trace", "recording"]
