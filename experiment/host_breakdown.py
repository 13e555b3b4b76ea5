"""What the parts of a repeated call take on the host, us: medians and least of batches of 20 calls."""

import ctypes
import functools
import importlib.util
import sys
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from mta_kernels.conv_attention import conv_attention, identity_weight, repeated
from mta_kernels.cuda import driver

spec = importlib.util.spec_from_file_location("host_time", Path(__file__).parents[1] / "scripts/host_time.py")
host_time = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host_time)

BATCHES = int(sys.argv[1])


def _empty_kernel():
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(b'extern "C" __global__ void f(int x) {}', b"f.cu", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"])
    code = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, code)
    return driver.load(code, "f", 0, 0)


def tensors(gradient):
    x = [torch.randn(1, 16, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=gradient) for _ in range(3)]
    return (*x, identity_weight(16, 6, 11, dtype=torch.bfloat16, device="cuda").requires_grad_(gradient))


q, k, v, w = x = tensors(False)
g = tensors(True)
conv_attention(*x)
conv_attention(*x)
(seen,) = (s for entries in repeated._seen.values() for s in entries)
launches = seen.launches
call = launches._idle[0]
cf, u8, dev = torch.contiguous_format, torch.uint8, q.device
one = call.launches._calls
n = launches._layout.end
lib = ctypes.PyDLL("libcuda.so.1")


def held_gil():
    for f in again:
        f()


again = [functools.partial(lib.cuLaunchKernelEx, *f.args) for f in one]
alloc, free, stream = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete, 0
out = conv_attention(*g)
do = torch.randn_like(out)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    conv_attention(*x)
single = torch.cuda.CUDAGraph()
with torch.cuda.graph(single):
    torch.add(q, q, out=q)
trivial = driver.Launches(driver.Launch(_empty_kernel(), (1,), 32, 0, 0, ctypes.c_int(0)))
parts = {
    "conv_attention, auto": lambda: conv_attention(*x),
    "  earlier()": lambda: repeated.earlier(q, k, v, w, True, None, "both", "auto", False),
    "    guards alone": lambda: seen.is_like(q, k, v, w),
    "  out_alone()": lambda: launches.out_alone(q, k, v, w),
    "    empty_like out": lambda: torch.empty_like(q),
    "    empty_like scratch": lambda: launches._byte.new_empty(n),
    "    both launches": call.launches,
    "      prepare, bare": one[0],
    "      forward, bare": one[1],
    "      both with the GIL held": held_gil,
    "    current stream and device": lambda: (torch._C._cuda_getDevice(), torch._C._cuda_getCurrentRawStream(0)),
    "(launch of an empty kernel)": trivial,
    "(torch.empty, bytes)": lambda: torch.empty(n, dtype=u8, device=dev),
    "(raw alloc and delete)": lambda: free(alloc(n, 0)),
    "(data_ptr)": q.data_ptr,
    "(graph of both, replayed)": graph.replay,
    "(graph of an add, replayed)": single.replay,
    "(an add)": lambda: torch.add(q, q, out=q),
    "sdpa": lambda: sdpa(q, k, v, is_causal=True),
    "conv_attention, gradient": lambda: conv_attention(*g),
    "sdpa, gradient": lambda: sdpa(*g[:3], is_causal=True),
    "backward": lambda: torch.autograd.grad(conv_attention(*g), g, do),
    "sdpa, backward": lambda: torch.autograd.grad(sdpa(*g[:3], is_causal=True), g[:3], do),
}
for name, part in parts.items():
    times = host_time.host_times(part, BATCHES if "backward" not in name else -(-BATCHES // 5))
    print(f"{name:28} {median(times):7.2f} {min(times):7.2f}", flush=True)
q2, k2, v2, w2 = (t.float() for t in x)
want = conv_attention(q2, k2, v2, w2, backend="reference")
for name, got in (("no gradient", conv_attention(*x)), ("gradient", conv_attention(*g))):
    y = x if name == "no gradient" else g
    want = conv_attention(*(t.float() for t in y), backend="reference")
    print(f"error, {name}: {((got - want).norm() / want.norm()).item():.5f}")
