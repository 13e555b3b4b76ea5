"""Rows of results in the formats of other projects."""
