"""The lessons, one module each; `main()` of each runs it and proves what it claims."""

import os

# Lessons compare numbers to a millionth. On newer NVIDIA GPUs convolutions are less exact than
# that unless this is set before the first one ("TF32" in NVIDIA's documentation).
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
