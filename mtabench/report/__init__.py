"""`mtabench report`: what one results file says, as a page to explore."""
