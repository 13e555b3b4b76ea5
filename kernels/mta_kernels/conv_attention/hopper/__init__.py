"""Conv attention in CUDA C++ for Hopper: the convolution as banded products on the tensor cores."""
