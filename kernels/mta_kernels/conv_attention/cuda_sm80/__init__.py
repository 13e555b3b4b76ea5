"""Forward and backward in CUDA C++ for every NVIDIA GPU from sm_80 on: see forward.cu."""
