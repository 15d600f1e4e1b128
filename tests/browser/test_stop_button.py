"""■ in JupyterLab's toolbar, while a run is stuck."""

from __future__ import annotations

import lab
import pytest
from processes import assert_gone

BOUND = 10.0  # seconds; it takes less than 1 where nothing else runs


@pytest.mark.parametrize("keeps_busy", ["time.sleep(600)", "while True: pass"])
def test_the_stop_button_frees_a_stuck_run_and_leaves_no_rank(open_notebook, keeps_busy):
    document = open_notebook(lab.stuck_notebook(keeps_busy))
    ranks = lab.get_stuck(document)
    document.click("notebook:interrupt-kernel")
    document.wait_for_number(2, BOUND)
    document.wait_for("KeyboardInterrupt", cell=2)
    document.wait_until_idle(BOUND)
    assert_gone(ranks, "the stop button")
    lab.assert_next_run_works(document)
