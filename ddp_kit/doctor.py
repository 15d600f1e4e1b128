"""The command python -m ddp_kit.doctor; `kit.doctor` is in doctor_checks.py."""

from __future__ import annotations

import sys

from ddp_kit.doctor_checks import main

if __name__ == "__main__":
    code = main()
    if "IPython" not in sys.modules:  # %run -m takes any exit code but 0 for an error of its own
        sys.exit(code)
