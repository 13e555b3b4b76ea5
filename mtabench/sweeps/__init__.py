"""Cells: from the words of a command line to a plan, inputs, checks and rows."""
