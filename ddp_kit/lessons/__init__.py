"""The lessons, one module each; each `main()` runs its lesson and proves what it claims.

Modules that begin with an underscore are parts of a lesson that would be too long in one file.
"""

import os

# Lessons compare numbers to a millionth. On newer NVIDIA GPUs convolutions are less exact than
# that unless this is set before the first one ("TF32" in NVIDIA's documentation).
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
