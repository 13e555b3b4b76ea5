// cuda_decode/decode.cu for a CPU; see forward.cpp. KERNEL is its path.
#include <device.cuh>
namespace kernel {
#include KERNEL
}

extern "C" const char* emulated(int x, int y, int threads, int shared_bytes, unsigned seed, const kernel::Arguments* args) {
    return emulator::launch(x, y, threads, shared_bytes, seed, [=] { kernel::cuda_decode(*args); });
}
