"""Python runs it at its start where this folder is on the path: so measuring processes have planted implementations."""

import sys

if "dask" not in sys.orig_argv:  # its scheduler and workers measure nothing themselves, and start without torch
    import planted_workers

    planted_workers.plant()
