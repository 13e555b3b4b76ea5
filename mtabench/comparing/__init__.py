"""Two runs, or two revisions, compared: verdicts, and what CI reads."""
