"""Self-contained HTML pages: one file, no request to anywhere, and nothing from a results file can run in it."""
