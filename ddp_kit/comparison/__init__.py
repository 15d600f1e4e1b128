"""Whether a parallel model is still the same model, and why not."""

from ddp_kit.comparison.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
