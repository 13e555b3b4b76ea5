"""CUDA C++ kernels from Python: compiled by NVRTC at the first call, loaded and launched by the CUDA driver."""
