"""Results as files: columns, rows, runs and their samples; read, checked, written and merged."""
