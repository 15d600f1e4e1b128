"""The doctor as a command: python -m ddp_kit.doctor."""

from __future__ import annotations

import argparse
import sys

from ddp_kit.doctor.report import findings, report


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 1 if a line wants a look, else 0."""
    argparse.ArgumentParser(
        prog="python -m ddp_kit.doctor",
        description="Print what this machine can do and what will go wrong on it.",
        epilog="The exit code is 1 if a line wants a look, else 0. In a notebook: kit.doctor()",
    ).parse_args(argv)
    found = findings()
    print(report(found))
    return int(not all(finding.ok for finding in found))


if __name__ == "__main__":
    code = main()
    if "IPython" not in sys.modules:  # %run -m takes any exit but 0 for a failure of its own
        sys.exit(code)
