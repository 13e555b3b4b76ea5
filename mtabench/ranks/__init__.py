"""Cells whose sequence is shared by ranks, a process and a GPU each: `mtabench fwd --ranks 2`."""
