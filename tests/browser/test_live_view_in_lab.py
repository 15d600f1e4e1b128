"""The live view of a run, as the page shows it."""

from __future__ import annotations

import lab

COUNTS = """
import os, time
import ddp_kit as kit

def counts(rank, world_size):
    step = 0
    while not os.path.exists("enough"):
        step += 1
        print(f"step {step}")
        time.sleep(0.1)

kit.run(counts, world_size=2);
"""


NEWER = """step => {
    const shown = document.querySelector('.jp-CodeCell .jp-OutputArea')?.textContent ?? '';
    const steps = [...shown.matchAll(/step (\\d+)/g)].map(found => Number(found[1]));
    return Math.max(0, ...steps) > step && Math.max(...steps);
}"""


def test_the_live_view_moves_while_a_run_lasts_and_goes_with_it(open_notebook, server):
    document = open_notebook(lab.notebook(COUNTS))
    document.run()
    step = 0
    for _ in range(3):
        step = document.wait(NEWER, arg=step)
    (server.folder / "enough").touch()
    document.wait_for_number(1)
    document.wait_until_idle()
    outputs = document.saved()["cells"][0]["outputs"]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "[rank 1] step 1\n" in printed
    assert document.shown(1).strip() == printed.strip()
