"""The doctor as a command: python -m ddp_kit.doctor."""

from __future__ import annotations

import argparse
import sys

from ddp_kit.doctor import findings, format_report


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 1 if a line needs attention, else 0."""
    argparse.ArgumentParser(
        prog="python -m ddp_kit.doctor",
        description="Check this machine: print what works on it and what may go wrong.",
        epilog="The exit code is 1 if a line needs attention, else 0. In a notebook: kit.doctor()",
    ).parse_args(argv)
    found = findings()
    print(format_report(found))
    return int(not all(finding.ok for finding in found.values()))


if __name__ == "__main__":
    code = main()
    if "IPython" not in sys.modules:  # %run -m takes any exit code but 0 for an error of its own
        sys.exit(code)
