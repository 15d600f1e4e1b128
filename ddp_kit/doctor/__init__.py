"""What this machine can do, and what will go wrong on it."""

from __future__ import annotations

__all__ = ["doctor"]


def doctor() -> None:
    """Print what this machine can do and what will go wrong: one line each, then a summary."""
    from ddp_kit.doctor.report import findings, report  # a rank has no use for them

    print(report(findings()))
