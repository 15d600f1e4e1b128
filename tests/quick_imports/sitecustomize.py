"""Every Python that a test starts runs this first: gc is off while PyTorch is imported.

Nearly all objects that the import creates stay, and looking for garbage among them takes a fifth
of the time. The ranks of a pool do the same, see `ddp_kit/pool/rank/without_gc.py`.

On a busy machine, a kernel may need more than 10 s to send what a cell has printed; then ipykernel
would print "IOStream.flush timed out" into the cell. And a rank may fail or wait, as others do, so
late that it would be missing in their error.

With DDP_KIT_FORKED_SPAWN, ranks and torchrun's workers are forked from a process that has imported
PyTorch, and kernels are connected by files, not ports.
"""

import functools
import gc
import importlib.util
import os
import sys


class Import:
    """Changes how one module is executed, once, and leaves every other one to Python's finders."""

    def __init__(self, name, execute):
        self._name, self._execute = name, execute

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader.exec_module = functools.partial(self._execute, spec.loader.exec_module)
        return spec


def without_gc(execute, module):
    enabled = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def with_patience(execute, module):
    execute(module)
    module.OutStream.flush_timeout = 120


def with_grace(execute, module):
    execute(module)
    module.LONGEST_FAILURE_GRACE = 5.0  # seconds
    if "DDP_KIT_FORKED_SPAWN" in os.environ:
        module.RUN_JUDGED_AFTER, module.RANKS_JUDGED_AFTER = 1.5, 2.0


sys.meta_path[:0] = [
    Import("torch", without_gc),
    Import("ipykernel.iostream", with_patience),
    Import("ddp_kit.settings", with_grace),
]
if "DDP_KIT_FORKED_SPAWN" in os.environ:
    import forked_spawn
    import forked_torchrun
    import without_ports

    def with_files(execute, module):
        execute(module)
        without_ports.install(module.KernelManager)

    sys.meta_path.insert(0, Import("jupyter_client.manager", with_files))
    forked_spawn.install()
    forked_torchrun.install()
