"""Times variants of the backward in one process: packages mta_base and mta_h2, see README.md beside this."""
import importlib, json, statistics, sys, time
import torch
OVER = {}
def patched(name):
    m = importlib.import_module(f"mta_{name}.conv_attention.hopper.backward")
    own = m.Geometry.constants
    m.Geometry.constants = lambda self: {**own(self), **OVER}
    return m
mods = {n: patched(n) for n in ("base", "h2")}
from mta_base.conv_attention import conv_attention_reference
from mta_base.conv_attention.hopper.forward import conv_attention_forward
VARIANTS = [("base", "base", {})] + [(f"mode {m}, dp first {d}", "h2", {"MODE": m, "DP_FIRST": d}) for m in (1, 2, 3, 4) for d in (0, 1)]
out_path, limit = sys.argv[1], float(sys.argv[2])
begun = time.time()
torch.manual_seed(0)
def inputs(b, h, n, d):
    q, k, v, g = (torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return q, k, v, torch.randn(h, 6, 11, device="cuda", dtype=torch.bfloat16) / 8, g
def build(mod, over, x):
    OVER.clear(); OVER.update(over)
    mod._launches.clear(); mod.kernel.cache_clear()
    q, k, v, w, g = x
    options = dict(causal=True, scale=q.shape[3] ** -0.5, pad=5)
    out, lse = conv_attention_forward(q, k, v, w, spans=None, **options)
    l = mod.Launches(q, k, v, w, out, g, True, options["scale"], 5, False)
    l(q, k, v, w, out, lse, g); torch.cuda.synchronize()
    return lambda: l(q, k, v, w, out, lse, g)
flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
rows = []
for d in (128, 64):
    good = []
    for name, mod, over in VARIANTS:
        try:
            worst = 0
            for n in (1, 70, 700):
                x = inputs(1, 2, n, d)
                got = build(mods[mod], over, x)()
                exact = [t.double().requires_grad_() for t in x[:4]]
                want = torch.autograd.grad(conv_attention_reference(*exact, causal=True), exact, x[4].double())
                worst = max(worst, *(((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(got, want) if b.norm() > 1e-6))
            print(d, name, f"{worst:.4f}", flush=True)
            if worst < 0.01: good.append((name, mod, over))
        except Exception as e: print(d, name, "failed", repr(e)[:200])
    for b, n in ((4, 4096), (1, 16384)):
        x = inputs(b, 16, n, d)
        q, k, v, w, g = x
        fns = {}
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            plain = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        fns["cudnn"] = lambda: torch.autograd.grad(plain, leaves, g, retain_graph=True)
        for name, mod, over in good: fns[name] = build(mods[mod], over, x)
        times, names = {m: [] for m in fns}, list(fns)
        for r in range(7):
            for m in names[r % len(names):] + names[: r % len(names)]:
                fns[m]()
                for _ in range(3):
                    flush.zero_(); s, e = torch.cuda.Event(True), torch.cuda.Event(True)
                    s.record(); fns[m](); e.record(); times[m].append((s, e))
            torch.cuda.synchronize()
            if time.time() - begun > limit: break
        med = {m: statistics.median(s.elapsed_time(e) for s, e in t) for m, t in times.items()}
        for m in names:
            print(f"D={d} N={n} {m:24s} {med[m]:.4f} ms  x cudnn {med[m] / med['cudnn']:.3f}  x base {med[m] / med['base']:.3f}", flush=True)
            rows.append((d, n, m, med[m], med[m] / med["cudnn"], med[m] / med["base"]))
        del fns, plain, leaves; torch.cuda.empty_cache()
open(out_path, "w").write("head_dim,seq,variant,ms,over_cudnn,over_base\n" + "".join(",".join(map(str, r)) + "\n" for r in rows))
