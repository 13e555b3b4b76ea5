"""Why a kernel is as fast as it is: a trace, a table of kernels, hardware counters, and a verdict in words."""

import os

# PyTorch's profiler prints its stages, unless this variable is set before torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
