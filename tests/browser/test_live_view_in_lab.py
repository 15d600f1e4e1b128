"""The live view of a run, as the page shows it."""

from __future__ import annotations

import lab

COUNTS = """
import os, time, torch, torch.distributed as dist
import ddp_kit as kit

def counts(rank, world_size):
    step = 0
    while rank == 1 and not os.path.exists("enough"):
        step += 1
        print(f"step {step}")
        time.sleep(0.1)
    if rank == 1:
        dist.send(torch.ones(1), dst=0)
    else:
        dist.recv(torch.zeros(1), src=1)

kit.run(counts, world_size=2);
"""

NEWER = """step => {
    const shown = document.querySelector('.jp-CodeCell .jp-OutputArea')?.textContent ?? '';
    const steps = [...shown.matchAll(/step (\\d+)/g)].map(found => Number(found[1]));
    return Math.max(0, ...steps) > step && Math.max(...steps);
}"""
# These are non-breaking spaces.
WAITS_LONGER = """seconds => {
    const shown = document.querySelector('.jp-CodeCell .jp-OutputArea tr')?.textContent ?? '';
    const found = shown.match(/rank\\s0waiting\\sin\\srecv\\(src=1\\)\\s([\\d.]+)\\ss/);
    return found && Number(found[1]) > seconds && Number(found[1]);
}"""


def test_the_live_view_moves_while_a_run_lasts_and_goes_with_it(open_notebook, server):
    document = open_notebook(lab.notebook(COUNTS))
    document.run()
    step, seconds = 0, 0.0
    for _ in range(3):
        step = document.wait(NEWER, arg=step)
        seconds = document.wait(WAITS_LONGER, arg=seconds)
    (server.folder / "enough").touch()
    document.wait_for_number(1)
    document.wait_until_idle()
    outputs = document.saved()["cells"][0]["outputs"]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "[rank 1] step 1\n" in printed
    assert document.shown(1).strip() == printed.strip()
