"""A lesson's cells and its module: what has the same name is the same code.

Learners write and run the code of a lesson in cells; `%run`, torchrun and the tests run the module.
So that the two cannot drift apart, each function and class that is defined at the top of a cell
under the name of one in the module is compared with it, as a syntax tree. Docstrings, annotations
and comments do not count, nor do the prefixes `kit.` and that of the module: `kit.device()` in a
cell is `device()` in the module, and `rings.neighbours()` is `neighbours()`.

A variant that a lesson shows to be wrong needs another name than the right one in the module.

REQUIRED: what the cells of a lesson must define. Add a lesson's names with its notebook.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from regenerate import FOLDER
from test_audit import lesson, numbered

LESSONS = {
    "01_point_to_point": "point_to_point",
    "06_init_methods": "init_methods",
    "07_data_parallel": "data_parallel",
    "08_ddp": "ddp",
    "09_ddp_mistakes": "ddp",
    "10_backends": "backends",
    "11_torchrun": "torchrun",
    "12_what_happens_at_1024": "what_happens_at_1024",
    "14_device_mesh": "device_mesh",
    "15_zero": "zero",
    "16_tensor_parallel": "tensor_parallel",
    "17_pipeline_parallel": "pipeline_parallel",
    "18_context_parallel": "context_parallel",
    "20_which_one_when": "which_one_when",
    "21_your_own_backend": "your_own_backend",
}
PARTS = {  # private modules from which a lesson's module imports
    "init_methods": ["_recording_store"],
    "data_parallel": ["_data_parallel_steps"],
    "ddp": ["_ddp_by_hand", "_ddp_buckets"],
    "device_mesh": ["_placements"],
    "zero": ["_gpt", "_sharded_optimizer", "_fully_sharded", "_zero_ways"],
    "tensor_parallel": ["_tensor_parallel_layers"],
    "pipeline_parallel": ["_pipeline_orders", "_pipeline_stages"],
    "context_parallel": ["_ring_attention", "_all_to_all", "_experts"],
    "which_one_when": ["_two_dimensions", "_planned_by_hand", "_published"],
    "your_own_backend": ["_shared_segment", "_segment_group"],
}
REQUIRED: dict[str, set[str]] = {
    "01_point_to_point": {
        *("blocking", "immediate", "exchange", "read_too_early", "written_too_early"),
        *("from_anyone", "last_two", "token"),
    },
    "06_init_methods": {
        *("sum_of_ranks", "by_environment", "by_file", "by_tcp", "by_store"),
        *("RecordingStore", "noted", "attempt"),
    },
    "07_data_parallel": {
        *("scatter", "replicate", "parallel_apply", "gather", "ByHand"),
        *("seconds_a_step", "ddp_seconds"),
    },
    "08_ddp": {
        *("Replicated", "DistributedDataParallel", "tied_and_frozen", "train_tied"),
        *("one_backward", "Stack", "watch", "buckets_by_hand", "Bucket"),
        *("BucketedDistributedDataParallel", "backwards", "step_seconds", "carry_slowly"),
        *("accumulate", "deal", "deal_by_hand"),
    },
    "09_ddp_mistakes": {"pull", "sum_gradients", "Heads", "use_heads", "running_means"},
    "10_backends": {
        *("accepts", "true_until", "measure", "fit_by_hand", "direct_and_wrapped"),
        *("lopsided_sum", "both_send_first"),
    },
    "11_torchrun": {"my_place", "rendezvous", "kill_rank"},
    "12_what_happens_at_1024": {"tree", "swap_halves", "two_level"},
    "14_device_mesh": {
        *("numbered", "lengths", "pieces", "pad", "own_part", "replicate_to_shard", "change"),
        *("shard_to_replicate", "partial_to_replicate", "partial_to_shard", "shard_to_shard"),
        *("by_hand", "by_dtensor", "bytes_sent", "mesh_groups", "on_mesh", "product"),
        *("counted", "forward", "mlp", "in_one_process"),
    },
    "15_zero": {
        *("Block", "Owners", "settings", "Partition", "ShardedStep", "fill_up", "own_rows", "cut"),
        *("ShardedGradient", "ReplicatedParameter", "ShardedGradients", "FreedParameter"),
        *("ShardedParameter", "ShardedModule", "UnshardedOnDemand", "Prefetching"),
        *("FullySharded", "take_steps", "start_zero_redundancy"),
        *("start_fully_shard", "train_and_save", "load_and_train"),
    },
    "16_tensor_parallel": {
        *("CopyToRegion", "ReduceFromRegion", "ColumnParallelLinear", "RowParallelLinear"),
        *("GatherFromSequence", "ReduceScatterToSequence", "VocabularyParallelEmbedding"),
        *("vocabulary_parallel_loss", "add_up_gradients", "own_part", "cut_block", "cut_gpt"),
        *("block_plan", "gpt_plan", "parallelize", "ForgottenCopy"),
    },
    "17_pipeline_parallel": {
        *("GPTStage", "cut", "Neighbours", "StageByHand", "Pipeline", "mean_loss", "order"),
        *("cell", "bubble", "ForwardByHand", "RecordedStage"),
    },
    "18_context_parallel": {
        *("OnlineSoftmax", "scores", "attend_in_blocks", "cut", "in_order", "zig_zag", "places"),
        *("start_exchange", "travel", "needed", "attend_forward", "BlockGradients"),
        *("attend_backward", "RingAttention", "ring_attention", "exchange_rows", "AllToAll"),
        *("to_heads", "to_sequence", "ulysses", "attention", "spread", "loss_of_part", "train"),
        *("route", "counts_of", "Experts"),
    },
    "20_which_one_when": {
        *("train_by_hand", "parallelize_2d", "train_2d", "states_by_hand", "layer_keeps"),
        *("memory_by_hand", "layer_by_hand", "dp_by_hand", "step_by_hand", "plans_by_hand"),
        *("stage_by_hand", "tflops"),
    },
    "21_your_own_backend": {
        *("through_a_socket", "create", "address", "attach", "see_each_other", "Flags", "Segment"),
        *("spin", "give_way", "nap", "give_way_then_nap", "all_reduce_of_two", "all_reduce"),
        *("Finished", "pieces", "BareGroup", "CollectiveGroup", "SegmentGroup", "mailbox", "send"),
        *("recv", "join", "ring", "train", "measure", "step_seconds"),
    },
}
MODULES = FOLDER.parent / "ddp_kit" / "lessons"


class Bare(ast.NodeTransformer):
    """Removes from code what a cell may leave out or write in another way.

    prefixes: the names through which a cell reaches what the module has in its own namespace.
    """

    def __init__(self, prefixes: set[str]) -> None:
        self._prefixes = prefixes

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self._prefixes:
            return ast.Name(node.attr, node.ctx)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return node.value and ast.Assign([node.target], node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._without_docstring(node)

    def _without_docstring(self, node):
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        self.generic_visit(node)
        return node


def definitions(source: str) -> list[ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes at the top of some code."""
    body = ast.parse(source).body
    return [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def in_cells(notebook: dict) -> Iterator[tuple[int, ast.FunctionDef | ast.ClassDef]]:
    """Yield what the cells define, with the number of the cell; `%%` cells do not count."""
    for number, cell in numbered(notebook, "code"):
        source = TransformerManager().transform_cell("".join(cell["source"]))
        for node in definitions(source):
            yield number, node


def imported_names(notebook: dict, module: str) -> set[str]:
    """Return the names by which the cells know the kit and the lesson's module."""
    found = {"kit", module}
    for _, cell in numbered(notebook, "code"):
        source = TransformerManager().transform_cell("".join(cell["source"]))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {a.asname for a in node.names if a.asname and a.name.endswith(module)}
    return found


def normal(node: ast.stmt, prefixes: set[str]) -> str:
    """Return code in one form for all that counts as the same."""
    return ast.unparse(ast.fix_missing_locations(Bare(prefixes).visit(node)))


def same_code_as_the_module(notebook: dict, module: str, source: str) -> Iterator[str]:
    prefixes = imported_names(notebook, module)
    there = {node.name: normal(node, prefixes) for node in definitions(source)}
    for number, node in in_cells(notebook):
        if node.name in there:
            ours, theirs = normal(node, prefixes), there[node.name]
            if ours != theirs:
                lines = ours.splitlines(), theirs.splitlines()
                diff = difflib.unified_diff(*lines, f"cell {number}", f"{module}.py", lineterm="")
                yield "\n".join([f"cell {number} and {module}.py differ in {node.name}:", *diff])


def required_names(notebook: dict, required: set[str]) -> Iterator[str]:
    missing = required - {node.name for _, node in in_cells(notebook)}
    yield from (f"no cell defines {name}" for name in sorted(missing))


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))


def code(module: str) -> str:
    names = [module, *PARTS.get(module, [])]
    return "\n".join((MODULES / f"{name}.py").read_text("utf-8") for name in names)


@pytest.mark.parametrize("name", LESSONS)
def test_the_cells_have_the_code_of_the_module(name):
    module = LESSONS[name]
    found = [*same_code_as_the_module(read(name), module, code(module))]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("name", REQUIRED)
def test_the_cells_define_what_the_lesson_is_about(name):
    assert list(required_names(read(name), REQUIRED[name])) == []
    in_module = {node.name for node in definitions(code(LESSONS[name]))}
    assert REQUIRED[name] <= in_module, "a name that the module lacks"


def test_the_modules_and_notebooks_exist():
    assert set(REQUIRED) <= set(LESSONS)
    for name, module in LESSONS.items():
        assert Path(FOLDER, f"{name}.ipynb").exists()
        assert Path(MODULES, f"{module}.py").exists()


# From here on the rules themselves are tested.

MODULE = '''
from ddp_kit import device

def swap(rank: int, world_size: int, *rest: int, tag: int = 0) -> list[torch.Tensor]:
    """Swap."""
    mine: torch.Tensor = torch.ones(1, device=device())  # a comment
    other: torch.Tensor
    other = neighbours(rank)
    return [mine, other]

class Net(nn.Module):
    """A net."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go."""
        return x

def neighbours(rank):
    return rank
'''
CELL = """
import ddp_kit as kit
from ddp_kit.lessons import ring as rings

def swap(rank, world_size, *rest, tag=0):
    # What a rank holds is on its own device.
    mine = torch.ones(1, device=kit.device())
    other = rings.neighbours(rank)
    return [mine, other]

class Net(nn.Module):
    def forward(self, x):
        return x

kit.run(swap)
"""


def with_cell(source: str) -> dict:
    notebook = lesson()
    notebook["cells"][3]["source"] = source
    return notebook


def differences(source: str) -> list[str]:
    return [*same_code_as_the_module(with_cell(source), "ring", MODULE)]


def test_code_that_is_the_same_is_blamed():
    assert differences(CELL) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tag=0", "tag=1"),
        ("torch.ones(1", "torch.ones(2"),
        ("kit.device()", "other.device()"),
        ("*rest", "rest"),
        ("return [mine, other]", "return [other, mine]"),
        (
            "    def forward(self, x):\n        return x",
            "    def forward(self, x):\n        return -x",
        ),
        ("class Net(nn.Module)", "class Net"),
        ("def swap", "@once\ndef swap"),
        ("def swap", "%matplotlib inline\n!ls\ndef swap(rank, world_size):\n    pass\n\ndef other"),
    ],
)
def test_code_that_differs_is_not_found(old, new):
    assert old in CELL
    [found] = differences(CELL.replace(old, new))
    assert found.startswith("cell 4 and ring.py differ in ")
    assert "\n--- cell 4\n+++ ring.py\n" in found


def test_a_wrong_definition_hides_behind_a_right_one():
    notebook = with_cell(CELL)
    notebook["cells"][1]["source"] = "def neighbours(rank):\n    return 0"
    assert len([*same_code_as_the_module(notebook, "ring", MODULE)]) == 1
    notebook = with_cell(CELL + "\ndef neighbours(rank):\n    return rank")
    assert [*same_code_as_the_module(notebook, "ring", MODULE)] == []


@pytest.mark.parametrize("line", ["%%ranks -n 2", "%%writefile scripts/ring.py"])
def test_a_cell_of_a_magic_is_compared(line):
    assert differences(f"{line}\ndef neighbours(rank):\n    return 0") == []


def test_a_required_name_that_is_missing_is_not_found():
    assert [*required_names(with_cell(CELL), {"swap", "Net"})] == []
    assert [*required_names(with_cell(CELL), {"swap", "train"})] == ["no cell defines train"]
    inner = "def train():\n    def swap():\n        pass"
    assert [*required_names(with_cell(inner), {"swap"})] == ["no cell defines swap"]
