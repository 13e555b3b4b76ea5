"""One file a command: `run` does what the options say, prints, and returns the exit code."""

from pathlib import Path

RESULTS_FOLDER = Path("mtabench-results")  # where results go that are given no name
WRONG_RESULT = 4
