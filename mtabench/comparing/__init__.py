"""Two runs, or two revisions, compared: verdicts, noise, and what CI reads."""
