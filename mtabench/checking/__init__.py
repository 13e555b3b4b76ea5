"""Whether results can be believed: the oracle in float64, probes, and `verify`."""
