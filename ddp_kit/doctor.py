"""The command python -m ddp_kit.doctor; `kit.doctor` is in doctor_checks.py."""

from __future__ import annotations

import argparse
import sys

from ddp_kit.doctor_checks import report

if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m ddp_kit.doctor",
        description="Check this machine: print what works on it and what may go wrong.",
        epilog="The exit code is 1 if a line needs attention, else 0. In a notebook: kit.doctor()",
    ).parse_args()
    problems = report()
    if "IPython" not in sys.modules:  # %run -m takes any exit code but 0 for an error of its own
        sys.exit(min(problems, 1))
