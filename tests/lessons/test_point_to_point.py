"""Point-to-point: what a message holds, and the races before wait()."""

from __future__ import annotations

import ddp_kit as kit
from ddp_kit.lessons import point_to_point


def test_a_write_before_wait_changes_the_message():
    result = kit.run(point_to_point.written_too_early, world_size=3, backend="gloo")
    assert list(result) == [99, 99, None]  # rank 0 had meant to send 1


def test_a_read_before_wait_sees_the_old_value():
    result = kit.run(point_to_point.read_too_early, world_size=3, backend="gloo")
    assert result[1] == {"before wait": 0, "after wait": 1}


def test_no_race_is_shown_where_there_is_one_rank():
    assert list(kit.run(point_to_point.written_too_early, world_size=1)) == [None]
    assert list(kit.run(point_to_point.read_too_early, world_size=1)) == [None]
