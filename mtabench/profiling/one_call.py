"""`python -m mtabench.profiling.one_call CASE`: one warm call of a cell between the marks that a profiler looks for.

CASE is the cell as JSON: its columns, `device`, and what --impl takes as `typed`. What comes before the call lies
outside the marks, compilation included.
"""

import json
import sys

import torch

from mtabench.measuring.timing import synchronize
from mtabench.problem.case import Case
from mtabench.profiling.trace import ready
from mtabench.registry import load_again


def main() -> None:
    """Make the cell ready, then mark and call it."""
    row = json.loads(sys.argv[1])
    load_again(row.get("typed"))
    case = Case.of_row(row, row["device"])
    cell = ready(case)
    state = cell.setup() if cell.setup else None
    wait = synchronize(case.device)
    wait()
    if case.device == "cuda":
        torch.cuda.profiler.start()
    cell.run(state)
    wait()
    if case.device == "cuda":
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
