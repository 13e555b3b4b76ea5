"""`python -m mtabench` is `mtabench`."""

from mtabench.cli import main

main()
