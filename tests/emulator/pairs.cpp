// hopper/pairs.cu for a CPU. Built and called by emulated_kernels.py: gives "", or what went wrong.
#include <pairs.cu>

extern "C" const char* hopper_forward_emulated(int x, int y, int threads, int shared_bytes, unsigned seed,
                                               const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                               const Arguments* args) {
    return emulator::launch(x, y, threads, shared_bytes, seed, [=] { hopper_forward(*q, *k, *v, *args); });
}
