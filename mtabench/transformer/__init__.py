"""A small transformer of ours, how it is trained and how it generates, and the same as cells of a sweep."""
