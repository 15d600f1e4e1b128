"""A notebook that regenerate.py has executed passes nbval, with spawned ranks.

All lessons are such notebooks; this one also prints and raises at random moments.
"""

from __future__ import annotations

import os

import nbformat
import pytest
from kernels import ROOT, call

CELLS = [
    "import random, time\nimport torch, torch.distributed as dist\nimport ddp_kit as kit",
    "def talk(rank, world_size):\n"
    "    for line in range(12):\n"
    "        time.sleep(random.random() * 0.1)\n"
    "        print('line', line)\n"
    "    tensor = torch.tensor([10 ** rank])\n"
    "    before = tensor.clone()\n"
    "    dist.all_reduce(tensor)\n"
    "    return {'before': before, 'after': tensor}\n"
    "result = kit.run(talk, world_size=2)",
    "kit.plot.tensors(result)",
    "def fail(rank, world_size):\n"
    "    time.sleep(random.random() * 0.1)\n"
    "    print('last words')\n"
    "    raise ValueError('boom')\n"
    "kit.run(fail, world_size=2)",
    "kit.run(lambda rank, world_size: rank, world_size=3)",
]


@pytest.mark.long
def test_a_notebook_of_runs_passes_nbval_as_it_was_regenerated(tmp_path):
    cells = [nbformat.v4.new_code_cell(code, id=f"c{i}") for i, code in enumerate(CELLS)]
    cells[3].metadata["tags"] = ["raises-exception"]
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)

    call(tmp_path, ROOT / "tests" / "notebooks" / "regenerate.py", path)
    outputs = [cell.outputs for cell in nbformat.read(path, as_version=4).cells]
    assert outputs[1][1].text.count("line 11\n") == 2
    assert set(outputs[2][0].data) == {"image/png", "text/plain"}
    assert outputs[3][-1].ename == "RankError"

    before = path.read_bytes()
    nbval = "-m pytest --nbval --nbval-current-env --nbval-cell-timeout=300 -p no:cacheprovider"
    printed = call(tmp_path, *nbval.split(), "-c", os.devnull, path.name)
    assert f"{len(CELLS)} passed" in printed
    assert path.read_bytes() == before
