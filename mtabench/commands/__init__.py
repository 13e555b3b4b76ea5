"""One file a command: `run` does what the options say, prints, and returns the exit code."""

from pathlib import Path

from mtabench import RESULTS

RESULTS_FOLDER = Path(RESULTS)  # where results go that are given no name
WRONG_RESULT = 4
