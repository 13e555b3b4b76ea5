"""The cases of the whole multi-token attention: any of its parts, in any combination.

As in `cases`, what kernels are compiled for is the same for a block of cases. So are strides, of which a block has a
few sets, since Triton compiles a kernel for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from mtabench.fuzzing.cases import (
    BLOCK,
    KINDS,
    VALUES,
    FuzzCase,
    Parts,
    decode_shape,
    decodes,
    draw_taps,
    dtypes,
    head_dims,
    layouts,
    probes,
    scale,
    shape,
    wanted,
)

MOST_TAPS = 8, 17
MOST_HEADS = 64
HEADS = (1, 2, 2, 3, 4, 4, 5, 6, 8, 10, 10, 12, 16, 16, 16, 20, 32, 40, 64)
SHARE = {"cuda": 1 / 4, "cpu": 1 / 8}  # of the largest size of conv attention: a mixing has all heads in memory
SETS_OF_LAYOUTS = 4  # of a block, one of them all contiguous
MIXERS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
AFTER = ("norm_weight", "gate_weight", "gate_bias")
STATE = ("logits", "logsumexp", "state_lengths")
WRITTEN_LAYOUTS = ("transposed", "offset", "steps", "rows apart", "columns first", "padded", "permuted")
# What a backend refuses, in one sentence: heads, head dim, taps before, taps after; None stands for what the block has.
UNFIT: dict[str, tuple[tuple[int | None, int | None, tuple[int, int] | None, tuple[int, int] | None], ...]] = {
    "triton": (
        (65, None, None, None), (None, 8, None, None), (None, 272, None, None), (None, None, (9, 3), None),
        (None, None, None, (2, 18)), (None, None, (17, 32), None), (None, None, None, (17, 2)),
    ),
    "auto": ((66, None, None, None), (None, 8, None, None), (None, None, None, (9, 18))),  # the reference takes these
    "eager": ((65, None, None, None), (None, 1, None, None), (None, None, (10, 20), (9, 18))),
}  # fmt: skip


@dataclass(frozen=True)
class MtaConstants:
    """What a backend's kernels are compiled for; mixings as the heads of a group, 0 without one, -1 for `[H, H]`."""

    decode: bool
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    pre_conv: tuple[int, int] | None
    pre_mix: int
    post_conv: tuple[int, int] | None
    post_mix: int
    pad_key: str
    causal: bool
    in_float32: tuple[str, ...]


def draw_mta(seed: int, number: int, backend: str, device: str) -> FuzzCase:
    """Case `number` of a seed for a backend of the whole multi-token attention."""
    block = number // BLOCK[device]
    kind = Random(f"{seed} {block} mta").randrange(KINDS[device])
    constants = draw_mta_constants(seed, kind, backend, device)
    if decodes(number, backend, device):
        constants = replace(constants, decode=True, causal=True)
    return draw_mta_for(constants, seed, number, backend, device)


def draw_mta_constants(seed: int, kind: int, backend: str, device: str) -> MtaConstants:
    """One of a seed's `KINDS`."""
    random = Random(f"{seed} {kind} {backend} {device} mta")
    decode = random.random() < 0.3
    heads = random.choice(HEADS) if random.random() < 0.85 else random.randint(1, MOST_HEADS)
    found = random.random()
    before = draw_taps(random, MOST_TAPS, device) if found < 0.6 else None
    after = draw_taps(random, MOST_TAPS, device) if found < 0.4 or found > 0.8 else None
    dims = tuple(head_dim for head_dim in head_dims("triton", device) if device == "cuda" or head_dim <= 64)
    names = (*MIXERS, *AFTER)
    in_float32 = random.choice(((), (), names, tuple(name for name in names if random.random() < 0.5)))
    return MtaConstants(
        decode=decode,
        dtype=random.choice(dtypes(backend, device)),
        head_dim=random.choice(dims),
        heads=heads,
        kv_heads=random.choice([x for x in range(1, heads + 1) if heads % x == 0]),
        pre_conv=before,
        pre_mix=_mixing(random, heads),
        post_conv=after,
        post_mix=_mixing(random, heads),
        pad_key=random.choice(("both", "both", "left", "right")),
        causal=decode or random.random() < 0.7,
        in_float32=in_float32,
    )


def _mixing(random: Random, heads: int) -> int:
    kind = random.random()
    if kind < 0.25:
        return 0
    return -1 if kind < 0.75 else random.choice([x for x in range(1, heads + 1) if heads % x == 0])


def draw_mta_for(constants: MtaConstants, seed: int, number: int, backend: str, device: str) -> FuzzCase:
    """Case `number` of a seed with given constants."""
    random = Random(f"{seed} {number} {backend} {device} mta case")
    heads, kv_heads, head_dim = constants.heads, constants.kv_heads, constants.head_dim
    before, after = constants.pre_conv, constants.post_conv
    if random.random() < 0.02:
        unfit = random.choice(UNFIT[backend])
        heads, kv_heads, head_dim = unfit[0] or heads, 1, unfit[1] or head_dim
        before, after = unfit[2] or before, unfit[3] or after
    on_gpu, taps = device == "cuda", before or (1, 1)
    parts = _parts(random, constants, heads, head_dim, before, after, backend, on_gpu)
    looks_back = taps[0] - 1 + parts.post_taps[0] - 1
    drawn: dict[str, Any] = {
        "seed": seed, "number": number, "op": "mta", "backend": backend, "device": device, "dtype": constants.dtype,
        "head_dim": head_dim, "query_taps": taps[0], "key_taps": taps[1], "pad_key": constants.pad_key,
        "causal": constants.causal, "scale": scale(random),
        "weight": random.choices(("random", "identity", "one tap", "large"), (80, 8, 7, 5))[0],
        "weight_dtype": "fp32" if "pre_conv" in constants.in_float32 else constants.dtype,
        "values": random.choice(VALUES) if random.random() < 0.3 else "normal",
    }  # fmt: skip
    of_heads = heads, kv_heads
    if constants.decode:
        drawn |= decode_shape(random, on_gpu, taps[0], backend, of_heads, looks_back)
    else:
        drawn |= shape(random, on_gpu, looks_back, of_heads, SHARE[device])
    drawn["head_chunk"], drawn["parts"] = None, parts
    drawn["pass_"] = "decode" if constants.decode else "bwd" if random.random() < 0.6 else "fwd"
    drawn["wanted"] = wanted(random, ("q", "k", "v", *_names(parts))) if drawn["pass_"] == "bwd" else ()
    drawn["way"] = _way(random, constants, parts, on_gpu)
    drawn["twice"] = random.random() < 1 / 3
    drawn["probe"] = random.choice(_probes(drawn, parts)) if random.random() < 0.5 else "none"
    # A set of a block, as far as each case can have it.
    chosen = random.randrange(SETS_OF_LAYOUTS) if on_gpu else number
    own = Random(f"{seed} {number // BLOCK[device]} {chosen} {backend} {device} mta layouts")
    found = list(layouts(own, drawn, on_gpu, ("q", "k", "v", "q_history", *_names(parts))))
    found += [(name, own.choice(WRITTEN_LAYOUTS)) for name in STATE if own.random() < 0.3]
    drawn["layouts"] = tuple(found) if chosen or not on_gpu else ()
    return FuzzCase(**drawn)


def _parts(
    random: Random, constants: MtaConstants, heads: int, head_dim: int, before: tuple[int, int] | None,
    after: tuple[int, int] | None, backend: str, on_gpu: bool,
) -> Parts:  # fmt: skip
    def mixing(size: int) -> tuple[int, ...]:
        if size > 0 and heads % size == 0:
            return heads // size, size, size
        return (heads, heads) if size else ()

    normed = random.random() < 0.4
    gate = random.choice(((), (), (), (1, head_dim), (head_dim, head_dim)))
    drops = {"triton": 0.02, "auto": 0.05, "eager": 0.15}[backend]
    return Parts(
        pre_conv=before is not None,
        pre_mix=mixing(constants.pre_mix),
        post_conv=after,
        post_mix=mixing(constants.post_mix),
        mixings=random.choices(("near identity", "random", "identity", "permutation", "zero"), (50, 30, 8, 8, 4))[0],
        norm_eps=random.choice((1e-5, 1e-5, 1e-6, 0.1)) if normed else None,
        depth=random.choice((0, 3, 20)) if normed and random.random() < 0.3 else None,
        gate=gate,
        gate_bias=bool(gate) and random.random() < 0.7,
        dropout=random.choice((0.1, 0.5)) if random.random() < drops and not constants.decode else 0.0,
        chunk_rows=random.choice((None, None, 16, 32, 128) if on_gpu else (None, None, 16, 32)),
        in_float32=constants.in_float32,
    )


def _names(parts: Parts) -> tuple[str, ...]:
    """Of the tensors that these parts have."""
    there = {
        "pre_conv": parts.pre_conv, "pre_mix": parts.pre_mix, "post_conv": parts.post_conv, "post_mix": parts.post_mix,
        "norm_weight": parts.norm_eps is not None, "gate_weight": parts.gate, "gate_bias": parts.gate_bias,
    }  # fmt: skip
    return tuple(name for name, is_there in there.items() if is_there)


def _way(random: Random, constants: MtaConstants, parts: Parts, on_gpu: bool) -> str:
    ways = {"plain": 40, "again": 22}
    ways |= {"autocast": 6} if constants.dtype != "fp32" else {}
    ways |= {} if constants.decode or not _fits_module(parts) else {"module": 8}
    ways |= {"stream": 8, "graph": 7} if on_gpu else {}
    return random.choices([*ways], [*ways.values()])[0]


def _fits_module(parts: Parts) -> bool:
    """Whether the module has these parts: it mixes scores of all heads, and its gate has a bias."""
    return len(parts.pre_mix) != 3 and bool(parts.gate) == parts.gate_bias and parts.norm_eps in (None, 1e-5)


def _probes(drawn: dict[str, Any], parts: Parts) -> list[str]:
    found = probes(drawn, drawn["pass_"] == "decode")
    if "future" in found:
        found += ["future"] * 3
    mixed = any(size and size[-1] > 1 for size in (parts.pre_mix, parts.post_mix))
    return [name for name in found if name != "other heads" or not mixed] or ["none"]
