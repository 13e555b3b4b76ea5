"""Sweeps on several GPUs and several machines: Dask starts and finds the workers, one process writes the file."""
