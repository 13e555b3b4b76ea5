"""A sweep: from the words of a command line to a plan, to measured rows, to the table that a person sees."""
