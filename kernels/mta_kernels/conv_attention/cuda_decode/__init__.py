"""Decode in CUDA C++ for every NVIDIA GPU from sm_80 on: see few_heads.cu and many_heads.cu."""
