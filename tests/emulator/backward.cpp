// hopper/backward.cu for a CPU; see forward.cpp.
#include <backward.cu>

extern "C" const char* hopper_backward_emulated(int x, int y, int threads, int shared_bytes, unsigned seed,
                                                const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                                const TensorMap* grad_out, const TensorMap* scratch, const Arguments* args) {
    const int at_once = 1 + seed % 3 * 2;  // blocks that wait for one another
    return emulator::launch(x, y, threads, shared_bytes, seed,
                            [=] { hopper_backward(*q, *k, *v, *grad_out, *scratch, *args); }, at_once);
}
