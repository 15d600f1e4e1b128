"""What only a notebook needs: the live view of a run, magics, controls."""

from ddp_kit.notebook.live import take_over

__all__ = ["take_over"]
