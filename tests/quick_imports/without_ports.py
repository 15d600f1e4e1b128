"""Connects kernels by files instead of ports, in pytest's processes and in graders.

A port is chosen seconds before the kernel has imported what it needs to listen on it. By then a
rank of another test may have it, and the kernel dies. JupyterLab in tests/browser has ports.
"""

import functools
import tempfile
import weakref


def install(manager):
    """Change jupyter_client's KernelManager, and with it the managers derived from it."""
    initialize = manager.__init__

    @functools.wraps(initialize)
    def initialize_without_ports(self, *args, **given):
        folder = tempfile.TemporaryDirectory(prefix="kernel-")
        initialize(self, *args, **{"transport": "ipc", "ip": f"{folder.name}/kernel", **given})
        weakref.finalize(self, folder.cleanup)

    manager.__init__ = initialize_without_ports
