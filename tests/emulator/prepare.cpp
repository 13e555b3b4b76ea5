// hopper/prepare.cu for a CPU; see forward.cpp.
#include <prepare.cu>

extern "C" const char* hopper_prepare_emulated(int x, int y, int threads, int shared_bytes, unsigned seed,
                                               const Preparation* args) {
    return emulator::launch(x, y, threads, shared_bytes, seed, [=] { hopper_prepare(*args); });
}
