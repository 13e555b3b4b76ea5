// banded/backward_exact.cu for a CPU; see forward.cpp.
#include <backward_exact.cu>

extern "C" const char* backward_exact_emulated(int x, int y, int threads, int shared_bytes, unsigned seed,
                                                      const Arguments* args) {
    return emulator::launch(x, y, threads, shared_bytes, seed, [=] { backward_exact(*args); });
}
