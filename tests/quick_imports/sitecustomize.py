"""Every Python that a test starts runs this first: gc is off while PyTorch is imported.

Nearly all objects that the import creates stay, and looking for garbage among them takes a fifth
of the time. The ranks of a pool do the same, see `ddp_kit/pool/rank/without_gc.py`.

rfc3987_syntax builds 38 parsers when jsonschema imports it, for 2 s of CPU time, and pytest and
JupyterLab import jsonschema. Without it, jsonschema leaves some formats of addresses unchecked.
"""

import gc
import importlib.util
import os
import sys


class ImportsTorch:
    """Finds PyTorch, once, and leaves every other module to Python's own finders."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def without_gc(module):
                enabled = gc.isenabled()
                gc.disable()
                try:
                    execute(module)
                finally:
                    gc.freeze()
                    if enabled:
                        gc.enable()

            spec.loader.exec_module = without_gc
        return spec


sys.meta_path.insert(0, ImportsTorch())
sys.modules["rfc3987_syntax"] = None  # so its import raises an ImportError
if "DDP_KIT_FORKED_SPAWN" in os.environ:
    import forked_spawn
    import forked_torchrun

    forked_spawn.install()
    forked_torchrun.install()
