#include <device.cuh>  // has the functions of mta_kernels/nvrtc/counters.cuh
