"""The history of every cell over many results files, what changed in it and when, as a folder of static files."""
