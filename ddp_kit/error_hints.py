"""What usually helps against an error that ranks raise, by the text of the error."""

from __future__ import annotations

import re

# Patterns, each found in "TYPE: MESSAGE" or in the learner's line below it, and their hint.
_TABLE = r"""
SyncBatchNorm (layers only work|expected input tensor to be on)
    SyncBatchNorm needs a GPU: convert the model only if kit.device() is one.
device_ids and output_device arguments only work
    Put the model on kit.device(), and leave out device_ids.
NCCL built in|Duplicate GPU detected
    nccl needs a GPU for each rank: leave out the backend, and put tensors on kit.device().
not compiled with \w+ enabled|without CUDA support|requires CUDA support|not linked with support for
accelerator device|torch\.cuda\.is_available\(\) is False|No CUDA GPUs|no NVIDIA driver
arguments from the '(CUDA|MPS|XPU)' backend
no CUDA-capable device|invalid device ordinal|dummy base class|CUDA library MUST|NVTX functions
'_cuda_\w+'|'allocated_bytes|modulo by zero\n.*device_count\(\)
'NoneType' .* 'type'\n.*(accelerator|device)
    This rank has no such device: put models and tensors on kit.device(), its GPU or else the CPU.
did not receive grad
    Use these parameters in the loss, or pass find_unused_parameters=True to DDP.
mark a variable ready only once
    One backward used a parameter twice: pass use_reentrant=False to checkpoint, if you call that.
training graph has changed in this iteration
    Leave out static_graph=True, because not every step uses the same parameters.
expects same model across all ranks|appears not to match sizes of the same param
    Build the same model on every rank before DDP wraps it.
is not needed when a module doesn't have any parameter
    Unfreeze a parameter before DDP wraps the model, or use the model without DDP.
'DistributedDataParallel' object has no attribute '(\w+)'
    The model itself is in the attribute module: write .module.\1.
Missing key\(s\) in state_dict: "module\.
    These keys are of a model without DDP: load them into the model before DDP wraps it.
Unexpected key\(s\) in state_dict: "module\.
    These keys are of a DDP model: save model.module.state_dict() instead.
debuggers do not work in a rank
    To look at variables in a notebook, raise an error at this line, and enter %ranks debug.
^AttributeError: '(\w+)' object has no attribute '(\w+)'\n.*\b(torch|dist|kit)\.\2\b
    \3 is a variable of type \1 here: give that another name, and repeat the import.
^UnboundLocalError: .*local variable '(\w+)'
    \1 is a local variable, because the function assigns to it: do so on every rank, or rename it.
'await' outside|'async \w+' outside|asynchronous comprehension outside
    A %%ranks cell cannot await: write an async function, and pass its call to asyncio.run().
'return' outside
    A %%ranks cell is no function: its value is that of its last line, without return.
"""


def hint_for(error: str) -> str:
    """Return a sentence on what usually helps; "" if nothing is known.

    error: "TYPE: MESSAGE", and the line of the learner's code below it.
    """
    found = None
    for line in _TABLE.strip().splitlines():
        if not line.startswith("    "):
            found = found or re.search(line, error)
        elif found:
            return found.expand(line.strip())
    return ""
