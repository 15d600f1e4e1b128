"""What ends a kernel in JupyterLab also ends its ranks."""

from __future__ import annotations

import lab
from processes import assert_gone


def restart(document: lab.Document) -> None:
    document.click("notebook:restart-kernel")
    document.page.click(".jp-Dialog button.jp-mod-accept")
    document.page.wait_for_selector(".jp-Dialog", state="detached")


def test_a_restart_ends_ranks_that_are_stuck_and_ranks_that_are_idle(open_notebook):
    document = open_notebook(lab.stuck_notebook())
    stuck = lab.get_stuck(document)
    restart(document)
    assert_gone(stuck, "a restart during a run")
    document.select(1)
    idle = lab.warm_ranks(document)
    restart(document)
    assert_gone(idle, "a restart between two runs")
    document.select(1)
    lab.warm_ranks(document)
    document.select(3)
    lab.assert_next_run_works(document)
