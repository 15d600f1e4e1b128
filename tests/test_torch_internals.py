"""Without an undocumented name of PyTorch, a run goes on and a line says what is lost."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ddp_kit
from ddp_kit import torch_internals
from ddp_kit.torch_internals import Feature

PACKAGE = Path(ddp_kit.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MESSAGES = {"send", "recv", "batch_isend_irecv"}
DDP = {f"DDP {name}" for name in ("all_reduce", "forward", "broadcast", "find_unused_parameters")}
DDP.add("DistributedDataParallel")
FUNCTIONAL = {
    f"functional {name.removesuffix('_').removesuffix('_out')}"
    for name in (*torch_internals.OPERATORS, "shard_dim_alltoall")
}
# Operations that are not in the trace, by the last of the names that are missing.
LOST = {
    **dict.fromkeys(("send", "recv", "recv_anysource"), MESSAGES),
    **{name: {name} for name in ("broadcast", "reduce", "gather", "scatter", "barrier")},
    **{name: {name} for name in ("reduce_scatter", "monitored_barrier", "all_to_all_single")},
    "allreduce": {"all_reduce", "DDP all_reduce"},
    "allreduce_coalesced": {"all_reduce_coalesced"},
    "allgather": {"all_gather"},
    "allgather_coalesced": {"all_gather_coalesced"},
    "all_gather_single": {"all_gather_into_tensor"},
    "reduce_scatter_single": {"reduce_scatter_tensor"},
    **{
        f"{op}_single_coalesced": {f"{old}_tensor_coalesced", f"{op}_single_coalesced"}
        for op, old in (("all_gather", "allgather_into"), ("reduce_scatter", "reduce_scatter"))
    },
    "_new_group_with_tag": {"new_group"},
    **dict.fromkeys(("_ddp_init_helper", "_execution_engine"), DDP),
    **dict.fromkeys(("_op_dk", "ops._c10d_functional.all_to_all_single"), FUNCTIONAL),
}
# Modules that have a page in PyTorch's documentation.
DOCUMENTED = """
    cloudpickle torch torch.autograd torch.autograd.graph torch.backends torch.backends.cudnn
    torch.backends.mha torch.backends.opt_einsum torch.cuda torch.distributed
    torch.distributed.checkpoint
    torch.distributed.algorithms.ddp_comm_hooks.default_hooks torch.distributed.fsdp
    torch.distributed.checkpoint.state_dict torch.distributed.device_mesh torch.distributed.optim
    torch.distributed.pipelining torch.distributed.tensor torch.distributed.tensor.parallel
    torch.func torch.futures torch.library torch.linalg torch.multiprocessing torch.nn
    torch.nn.attention torch.nn.functional torch.nn.init torch.nn.modules.module
    torch.nn.parallel torch.nn.utils
    torch.ops torch.optim torch.random torch.utils.checkpoint torch.utils.data torch.version
"""
IN_TABLE = {name.replace(":", ".").rpartition(".")[2] for f in Feature.all for name in f.names}
OF_PYTHON = {"_asdict", "_fields", "_replace", "_current_frames", "_getframe"}  # documented
ELSEWHERE = {  # other undocumented names
    ("notebook/magics.py", "_filename_map"),
    ("pool/ipython.py", "_ipython_cache"),
    # PyTorch's notes on extending it document TorchDispatchMode, under this name.
    ("check/too_large_for_one_rank.py", "_python_dispatch"),
    ("check/too_large_for_one_rank.py", "torch.utils._python_dispatch"),
    ("lessons/one_rank_first.py", "_python_dispatch"),
    ("lessons/one_rank_first.py", "torch.utils._python_dispatch"),
    # Lesson 13 wraps modules as torchtitan does, and counts FLOPs; neither module has a page.
    ("lessons/one_rank_first.py", "_checkpoint"),
    ("lessons/one_rank_first.py", "torch.ops.aten"),
    ("lessons/which_one_when.py", "_checkpoint"),
    (
        "lessons/which_one_when.py",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    ),
    (
        "lessons/one_rank_first.py",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    ),
    ("lessons/one_rank_first.py", "torch.utils.flop_counter"),
}
WORLD = "torch.distributed.distributed_c10d:_world"
BY_ANY_NAME = list(torch_internals.COLLECTIVES.values())
ALL_OR_NONE = [torch_internals.DDP, torch_internals.FUNCTIONAL]  # of which two names are tried
# Where releases use different names for one thing, all of them are missing at once.
CASES = [
    *(feature.names for feature in BY_ANY_NAME),
    *((f.names[place],) for f in ALL_OR_NONE for place in (0, -1)),
    *((n,) for f in Feature.all if f not in BY_ANY_NAME + ALL_OR_NONE for n in f.names),
    (WORLD,),
]


def ops(found):
    return {call.partition("(")[0] for call in found["calls"]}


@pytest.fixture(scope="module")
def found():
    """Return a function: what two ranks found in a case; (): nothing is missing."""
    program = [sys.executable, str(Path(__file__).with_name("renamed_names.py"))]
    out = subprocess.run(
        program, input=json.dumps([[], *CASES]), capture_output=True, text=True, timeout=600
    )
    assert out.returncode == 0, out.stderr
    ranks = dict(zip([(), *CASES], json.loads(out.stdout), strict=True))

    def ranks_of(*case):
        assert all(isinstance(rank, dict) for rank in ranks[case]), "".join(map(str, ranks[case]))
        return ranks[case]

    return ranks_of


def test_this_pytorch_has_all_names(found):
    assert torch_internals.notices() == []
    other = {name for f in BY_ANY_NAME for name in f.missing}  # of another release
    wanted = {op for op in set().union(*LOST.values()) if not any(m.endswith(op) for m in other)}
    for rank in found():
        assert rank["notices"] == []
        assert wanted - ops(rank) <= {"send", "recv"}  # each at one rank


@pytest.mark.parametrize("names", CASES, ids=[case[-1].partition(":")[2] for case in CASES])
def test_without_a_name_a_run_goes_on_and_one_line_says_what_is_lost(names, found):
    for whole, rank in zip(found(), found(*names), strict=True):
        assert rank["values"] == whole["values"]
        (notice,) = rank["notices"]
        missing = " and no ".join(name.replace(":", ".") for name in names)
        assert notice.startswith(f"this PyTorch has no {missing}: ")
        path = names[-1].rpartition(":")[2]
        lost = LOST.get(path, LOST.get(path.rpartition(".")[2], set()))
        assert ops(whole) - ops(rank) == lost & ops(whole)


def test_a_group_that_cannot_be_counted_counts_as_changed(found):
    def counted(*case):
        keys = "an unchanged group is equal", "a changed group is equal", "any group made"
        return [tuple(rank[key] for key in keys) for rank in found(*case)]

    assert counted() == [(True, False, False)] * 2
    for name in (WORLD, f"{WORLD}.group_count", f"{WORLD}.pg_map"):
        assert counted(name) == [(False, False, True)] * 2


def test_the_timeout_of_a_group_is_known_or_none_is(found):
    assert [rank["timeout"] for rank in found()] == [60, 60]
    for name in torch_internals.GROUP_TIMEOUT.names:
        assert [rank["timeout"] for rank in found(name)] == [None, None]


def test_a_sender_is_known_or_left_open(found):
    assert "recv(src=0, tag=4)" in found()[1]["calls"]
    assert "recv(tag=4)" in found("torch.distributed:Work._source_rank")[1]["calls"]


@pytest.mark.parametrize("name", ["_start_coalescing", "_end_coalescing"])
def test_a_batch_is_awaited_unless_its_ends_are_not_seen(name, found):
    assert [rank["unawaited in a batch"] for rank in found()] == [0, 0]
    without = found(f"torch.distributed:ProcessGroup.{name}")
    assert [rank["unawaited in a batch"] for rank in without] == [2, 2]


def test_a_typed_storage_is_taken_apart_and_made_without_a_warning(recwarn):
    tensor = torch.arange(3.0)
    torch.storage._reset_warn_typed_storage_removal()  # it warns once
    typed = torch_internals.typed_storage(tensor.untyped_storage(), tensor.dtype)
    assert typed.dtype is torch.float32
    torch.storage._reset_warn_typed_storage_removal()
    assert torch_internals.untyped_storage(typed).data_ptr() == tensor.data_ptr()
    assert not recwarn.list


def is_private(name):
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def defined(tree):
    """Return the private names that a module, its classes and their instances have."""
    for node in ast.walk(tree):
        for one in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []:
            if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
                yield one.name
            elif isinstance(one, (ast.Assign, ast.AnnAssign)):
                yield from (node.id for node in ast.walk(one) if is_stored(node))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def is_stored(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def of_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(tree):
    """Return the private names that a module takes from anything but `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not of_self(node):
            yield node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield from [*alias.name.split("."), *(getattr(node, "module", "") or "").split(".")]
        elif isinstance(node, ast.Constant) and node.value in IN_TABLE:
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def torch_modules(tree):
    """Return the modules of PyTorch and cloudpickle from which a module takes something."""
    paths = {}  # what a name of the module stands for
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            paths |= {alias.asname or alias.name: start + alias.name for alias in node.names}
    used = set(paths.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name, *names = ast.unparse(node).split(".")
            if name in paths and all(map(str.isidentifier, names)):
                used.add(".".join([paths[name], *names]))
    return {module_in(path) for path in used if path.split(".")[0] in ("torch", "cloudpickle")}


def module_in(path):
    """Return the longest beginning of a dotted path that is a module."""
    first, *names = path.split(".")
    module = import_module(first)
    for name in names:
        if not hasattr(module, name):
            with suppress(ModuleNotFoundError):
                import_module(f"{module.__name__}.{name}")
        if not isinstance(getattr(module, name, None), ModuleType):
            break
        module = getattr(module, name)
    return module.__name__


def undocumented(file, tree, own):
    names = {name for name in private_names(tree) if is_private(name)}
    modules = torch_modules(tree) - {*DOCUMENTED.split()}
    known = {name for path, name in ELSEWHERE if path == file}
    return (names - (own - IN_TABLE) - OF_PYTHON | modules) - known


def test_only_one_module_uses_undocumented_names():
    trees = {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in SOURCES}
    own = {name for tree in trees.values() for name in defined(tree)}
    own |= {path.stem for path in SOURCES}
    found = {file: undocumented(file, tree, own) for file, tree in trees.items()}
    assert found.pop("torch_internals.py")
    assert {file: names for file, names in found.items() if names} == {}
