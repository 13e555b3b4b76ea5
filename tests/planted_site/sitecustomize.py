"""Python runs it at its start where this folder is on the path: so measuring processes have planted implementations."""

import planted_workers

planted_workers.plant()
