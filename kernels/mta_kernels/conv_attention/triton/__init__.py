"""Conv attention in Triton: the expanded form, fused, O(N) memory, on any CUDA GPU of sm_80 or later."""
