"""Decode steps of as many KV heads as query heads in CUDA C++, one read of K and V: keys.cu, values.cu and merge.cu."""
