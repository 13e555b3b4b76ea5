"""What is computed: a cell, its axes as typed, its inputs, its work. Knows no clock and no file."""
