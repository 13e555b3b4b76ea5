"""Decode steps without grouped heads in CUDA C++, with one read of K and V: keys.cu, values.cu and merge.cu."""
