"""What a case is, and those of conv attention: drawn from the seed, so that a number alone repeats a case.

What a kernel is compiled for (dtype, head dim, taps, padding, causal) is one of a seed's few `Constants` and the same
for a block of cases, so that most cases find their kernels compiled; all else is drawn for the case. On a GPU one case
in `STEPS_IN_BLOCK` decodes in each block: a minute of many workers ends within their first blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import isqrt
from random import Random
from typing import Any

from mta_kernels.operation import PAGE_SIZES

BLOCK = {"cuda": 200, "cpu": 1}  # cases; nothing is compiled for Triton's interpreter
KINDS = {"cuda": 40, "cpu": 1 << 20}  # of constants, for each backend: what the first worker compiles, all others find
STEPS_IN_BLOCK = 4
MOST_SCORES = {"cuda": 4 << 20, "cpu": 20_000}  # of all heads and sequences together
MULTIPLES = 32  # that a kernel's tiles are multiples of, more or less
CHUNK_ROWS = 2048  # rows of scores that a backward keeps at a time
LAYOUTS = ("transposed", "offset", "steps", "rows apart", "columns first", "padded", "permuted")
SHARED_LAYOUTS = ("expanded", "expanded heads")  # sequences, or heads, that share memory
KEYS_APART = ("steps", "columns first")  # the numbers of a key lie apart, which Triton's decode refuses
VALUES = ("large scores", "equal", "huge key", "huge value", "zero keys", "one value", "tiny")
# What a backend refuses, in one sentence: dtype, head dim, taps; None stands for what the block has.
UNFIT: dict[str, tuple[tuple[str | None, int | None, tuple[int, int] | None], ...]] = {
    "triton": ((None, 8, None), (None, 272, None), (None, None, (17, 3)), (None, None, (2, 32))),
    "hopper": (("fp32", None, None), (None, 20, None), (None, 136, None), (None, None, (9, 3)), (None, None, (2, 18))),
    "cuda": (("fp32", None, None), (None, 8, None), (None, 264, None), (None, None, (17, 3)), (None, None, (1, 32))),
    "auto": ((None, 8, None), (None, None, (17, 32))),  # the reference takes these
    "eager": ((None, 1, None), (None, 300, None), (None, None, (20, 40))),
}


@dataclass(frozen=True)
class Constants:
    """What a backend's kernels are compiled for."""

    decode: bool
    dtype: str
    head_dim: int
    taps: tuple[int, int]
    pad_key: str
    causal: bool


@dataclass(frozen=True)
class Parts:
    """What the whole multi-token attention has beside the convolution of scores; shapes, () where a part is missing."""

    pre_conv: bool  # by the taps of the case
    pre_mix: tuple[int, ...]
    post_conv: tuple[int, int] | None  # taps
    post_mix: tuple[int, ...]
    mixings: str
    norm_eps: float | None  # None without a norm
    depth: int | None
    gate: tuple[int, ...]
    gate_bias: bool
    dropout: float
    chunk_rows: int | None  # rows of scores that kernels store at a time, at most
    in_float32: tuple[str, ...]  # names of tensors that are not in the case's dtype

    @property
    def post_taps(self) -> tuple[int, int]:
        """Of the convolution of probabilities; one where there is none."""
        return self.post_conv or (1, 1)


@dataclass(frozen=True)
class FuzzCase:
    """One call, or some decode steps, and how it is made; `layouts` names the tensors that are not contiguous."""

    seed: int
    number: int
    op: str  # "conv-attention" or "mta"
    backend: str
    device: str
    pass_: str  # fwd (no gradients), bwd (with them) or decode
    form: str  # whole, chunk or packed; of decode contiguous or paged
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seq_len: int  # keys; of decode the cache's capacity, in whole pages
    query_rows: int  # of decode the steps
    history: int
    head_dim: int
    query_taps: int
    key_taps: int
    pad_key: str
    causal: bool
    scale: float | None
    weight: str
    weight_dtype: str
    values: str
    way: str
    twice: bool
    probe: str
    wanted: tuple[str, ...]
    head_chunk: int | None
    bounds: tuple[int, ...]
    lengths: tuple[int, ...]
    lengths_dtype: str
    page_size: int | None
    splits: int | str
    layouts: tuple[tuple[str, str], ...]
    parts: Parts | None = None

    @property
    def looks_back(self) -> int:
        """Queries before a row that it depends on."""
        return self.query_taps - 1 + (self.parts.post_taps[0] - 1 if self.parts else 0)

    def described(self) -> str:
        """All of it, a line a field."""
        return "\n".join(f"  {field.name:<13} {getattr(self, field.name)!r}" for field in fields(self))


def draw_conv(seed: int, number: int, backend: str, device: str) -> FuzzCase:
    """Case `number` of a seed for a backend of conv attention."""
    block = number // BLOCK[device]
    kind = Random(f"{seed} {block}").randrange(KINDS[device])
    constants = draw_constants(seed, kind, backend, device)
    if decodes(number, backend, device):
        constants = replace(constants, decode=True, causal=True)
    return draw_for(constants, seed, number, backend, device)


def decodes(number: int, backend: str, device: str) -> bool:
    """Whether a case decodes whatever its block does; on a CPU a block is a case."""
    return device == "cuda" and backend != "hopper" and number % STEPS_IN_BLOCK == STEPS_IN_BLOCK - 1


def draw_constants(seed: int, kind: int, backend: str, device: str) -> Constants:
    """One of a seed's `KINDS`."""
    random = Random(f"{seed} {kind} {backend} {device}")
    decode = backend != "hopper" and random.random() < 0.35
    banded = backend == "hopper" or (backend == "cuda" and not decode)  # a banded convolution on tensor cores
    most = (8, 17) if banded else (16, 31)
    return Constants(
        decode=decode,
        dtype=random.choice(dtypes(backend, device)),
        head_dim=random.choice(head_dims(backend, device, in_eights=banded)),
        taps=draw_taps(random, most, device),
        pad_key=random.choice(("both", "both", "left", "right")),
        causal=decode or random.random() < 0.7,
    )


def dtypes(backend: str, device: str) -> tuple[str, ...]:
    if backend in ("hopper", "cuda"):
        return "bf16", "fp16"
    if backend == "eager":
        return "fp32", "bf16"  # its scores overflow in float16
    if device == "cpu":
        return "fp32", "fp32", "fp16"
    return ("bf16", "bf16", "fp16", "fp32") if backend == "triton" else ("bf16", "bf16", "fp16")


def head_dims(backend: str, device: str, *, in_eights: bool = False) -> tuple[int, ...]:
    if device == "cpu":
        found: tuple[int, ...] = (16, 16, 16, 17, 24, 24, 32, 32, 40, 64, 96)
    else:
        found = (16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
        found += (17, 50, 100) if backend in ("triton", "cuda", "eager") else ()
    return tuple(head_dim for head_dim in found if head_dim % 8 == 0) if in_eights else found


def draw_taps(random: Random, most: tuple[int, int], device: str) -> tuple[int, int]:
    kind = random.random()
    if kind < 0.35:
        return random.choice(((6, 11), (6, 11), (1, 1), (3, 3), (2, 4), (4, 2), (1, 7), (7, 1)))
    if kind < 0.9 or (device == "cpu" and kind < 0.97):
        return random.randint(1, min(8, most[0])), random.randint(1, min(12, most[1]))
    if kind < 0.97:
        return random.randint(1, most[0]), random.randint(1, most[1])
    return most


def draw_for(constants: Constants, seed: int, number: int, backend: str, device: str) -> FuzzCase:
    """Case `number` of a seed with given constants."""
    random = Random(f"{seed} {number} {backend} {device} case")
    decode, dtype, head_dim, taps = constants.decode, constants.dtype, constants.head_dim, constants.taps
    causal, on_gpu = constants.causal, device == "cuda"
    if random.random() < 0.02:
        unfit = random.choice(UNFIT[backend])
        dtype, head_dim, taps = unfit[0] or dtype, unfit[1] or head_dim, unfit[2] or taps
    drawn: dict[str, Any] = {
        "seed": seed, "number": number, "op": "conv-attention", "backend": backend, "device": device, "dtype": dtype,
        "head_dim": head_dim,
        "query_taps": taps[0], "key_taps": taps[1], "pad_key": constants.pad_key, "causal": causal,
        "scale": scale(random),
        "weight": random.choices(("random", "identity", "one tap", "large"), (80, 8, 7, 5))[0],
        "weight_dtype": "fp32" if random.random() < 0.3 else dtype,
        "values": random.choice(VALUES) if random.random() < 0.3 else "normal",
    }  # fmt: skip
    drawn |= decode_shape(random, on_gpu, taps[0], backend) if decode else shape(random, on_gpu, taps[0] - 1)
    drawn["pass_"] = "decode" if decode else "bwd" if random.random() < 0.6 else "fwd"
    drawn["wanted"] = wanted(random, ("q", "k", "v", "weight")) if drawn["pass_"] == "bwd" else ()
    ways = {"plain": 40, "again": 22}  # how often each
    ways |= {"autocast": 6} if dtype != "fp32" else {}
    ways |= {} if decode else {"module": 5}
    ways |= {"stream": 8, "graph": 7} if on_gpu else {}
    drawn["way"] = random.choices([*ways], [*ways.values()])[0]
    if drawn["way"] == "module":
        drawn["weight_dtype"] = dtype
    drawn["twice"] = random.random() < 1 / 3
    drawn["probe"] = random.choice(probes(drawn, decode)) if random.random() < 0.4 else "none"
    drawn["layouts"] = tuple(layouts(random, drawn, on_gpu, ("q", "k", "v", "weight", "q_history")))
    return FuzzCase(**drawn)


def scale(random: Random) -> float | None:
    """Of `q . k`."""
    kind = random.random()
    if kind < 0.55:
        return None
    if kind < 0.6:
        return 0.0
    size = random.choice((1e-6, 0.01, 0.1, 0.15, 0.3, 1.0)) * random.uniform(0.8, 1.2)
    return -size if random.random() < 0.5 else size


def layouts(random: Random, drawn: dict[str, Any], on_gpu: bool, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Of the tensors that are not contiguous: of these names, and of those beside them."""
    possible: tuple[str, ...] = LAYOUTS
    if drawn["probe"] not in ("other sequences", "other heads") and drawn["form"] != "paged":
        possible += SHARED_LAYOUTS
    if on_gpu and drawn["batch"] == 2 and drawn["form"] != "paged" and random.random() < 0.01:
        yield random.choice(("q", "k", "v")), "far"  # offsets that 32 bits do not hold take gigabytes, and are rare
        return
    for name in names:
        if random.random() < 0.3:
            apart = drawn["backend"] == "triton" and drawn["pass_"] == "decode" and name in ("k", "v")
            yield name, random.choice([x for x in possible if not (apart and x in KEYS_APART)])
    if random.random() < 0.4:
        yield "grad_out", random.choice((*LAYOUTS, *SHARED_LAYOUTS, "expanded everywhere"))
    for name, possible in (
        ("lengths", ("steps", "offset", "expanded")),
        ("block_table", ("steps", "offset", "expanded", "columns first", "padded")),
        ("cu_seqlens", ("steps", "offset")),
    ):
        if random.random() < 0.35:
            yield name, random.choice(possible)


def wanted(random: Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors whose gradients are asked for: mostly all."""
    if random.random() < 0.85:
        return names
    return tuple(name for name in names if random.random() < 0.5) or (random.choice(names),)


def _heads(random: Random, most: int) -> tuple[int, int]:
    kv_heads = random.choice((1, 1, 2, 2, 3, 4))
    group = random.choice((1, 1, 1, 2, 2, 3, 4, 8))
    while kv_heads * group > most:
        kv_heads, group = max(1, kv_heads // 2), max(1, group // 2) if kv_heads == 1 else group
    return kv_heads * group, kv_heads


def _length(random: Random, on_gpu: bool) -> int:
    """Of a sequence: mostly short; now and then at the edge of a tile, and beyond a chunk or two."""
    if not on_gpu:
        return random.choice((1, 2, random.randint(1, 12), random.randint(1, 12), random.randint(1, 40), 33, 65))
    kind = random.random()
    if kind < 0.7:
        return random.randint(1, 200)
    if kind < 0.85:
        return max(1, MULTIPLES * random.randint(1, 16) + random.randint(-1, 1))
    if kind < 0.95:
        return random.randint(200, 700)
    if kind < 0.98:
        return random.randint(700, CHUNK_ROWS)
    if kind < 0.99:
        return random.choice((CHUNK_ROWS, 2 * CHUNK_ROWS)) + random.randint(-2, 2)
    return random.randint(CHUNK_ROWS, 5000)


def shape(
    random: Random, on_gpu: bool, looks_back: int, of_heads: tuple[int, int] | None = None, share: float = 1.0
) -> dict[str, Any]:
    """Of a forward, and a backward: of given query and KV heads, or of its own, and a share of the largest size."""
    found: dict[str, Any] = {
        "page_size": None, "splits": "auto", "lengths": (), "lengths_dtype": "", "head_chunk": None, "bounds": (),
        "history": 0,
    }  # fmt: skip
    most = int(MOST_SCORES["cuda" if on_gpu else "cpu"] * share)
    seq_len = _length(random, on_gpu)
    if of_heads is not None:
        seq_len = min(seq_len, isqrt(most // of_heads[0]))
    room = most // seq_len**2  # heads of all sequences
    batch = min(random.choice((1, 1, 2, 3) if on_gpu else (1, 1, 1, 2)), max(1, room // (of_heads or (1,))[0]))
    heads, kv_heads = of_heads or _heads(random, max(1, min(16, room // batch) if on_gpu else 4 // batch))
    if of_heads is None and on_gpu and random.random() < 0.002:  # more heads than a grid has in its second dimension
        batch, heads, kv_heads, seq_len = random.choice(((1, 65536, 65536, 3), (8193, 8, 4, 5), (65537, 1, 1, 2)))
    form = random.choices(("whole", "chunk", "packed"), (55, 20, 25))[0]
    query_rows = seq_len
    if form == "chunk":
        query_rows = random.randint(1, seq_len)
        found["history"] = min(looks_back, seq_len - query_rows) + random.choice((0, 0, 1, 5))
        found["history"] = min(found["history"], seq_len - query_rows)
    if form == "packed":
        batch = 1
        found["bounds"] = _bounds(random, seq_len)
    if random.random() < 0.2:
        group = heads // kv_heads
        found["head_chunk"] = random.choice(
            [x for x in range(1, group + 1) if group % x == 0] + [group * x for x in range(1, kv_heads + 1)]
        )
    return found | {
        "form": form, "batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_len": seq_len,
        "query_rows": query_rows,
    }  # fmt: skip


def _bounds(random: Random, rows: int) -> tuple[int, ...]:
    """Of documents, some of them empty or of a token."""
    inner = [random.randint(0, rows) for _ in range(random.choice((0, 1, 2, 3, 5, 8)))]
    for bound in list(inner):
        if random.random() < 0.3:
            inner.append(min(rows, bound + random.choice((0, 0, 1))))
    return (0, *sorted(inner), rows)


def decode_shape(
    random: Random, on_gpu: bool, query_taps: int, backend: str, of_heads: tuple[int, int] | None = None,
    looks_back: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Of a decode: one step, or with `looks_back`, the queries that all parts look back on, several."""
    batch = random.choice((1, 1, 2, 3, 5, 16, 40) if on_gpu else (1, 1, 2, 3))
    longest = random.choice((1, 5, 70, 70, 300, 300, 1000, 3000, 9000) if on_gpu else (1, 3, 20, 70, 140))
    longest = random.randint(max(1, longest // 3), longest)
    steps, rows, most = 1, query_taps, 2 << 20 if on_gpu else 4000
    if looks_back is not None and of_heads is not None:
        steps = random.choice((1, 1, 2, 3, 5))
        rows, most = looks_back + steps, most if on_gpu else 4 * most
        longest = min(longest, max(1, most // (rows * of_heads[0])))
    room = most // (rows * longest)
    batch = min(batch, max(1, room // (of_heads or (1,))[0]))
    heads, kv_heads = of_heads or _heads(random, max(1, min(32 if on_gpu else 4, room // batch)))
    lengths = tuple(_decode_length(random, longest) for _ in range(batch))
    before = min(query_taps - 1 if looks_back is None else looks_back, max(0, *lengths, steps) - steps)
    page_size = random.choice(PAGE_SIZES if on_gpu else PAGE_SIZES[:2]) if random.random() < 0.4 else None
    capacity = max(1, *lengths, 1) + random.choice((0, 0, 1, 7))
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    return {
        "form": "contiguous" if page_size is None else "paged", "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "seq_len": capacity, "query_rows": steps, "history": before + random.choice((0, 0, 0, 1, 4)),
        "page_size": page_size, "lengths": lengths, "lengths_dtype": random.choice(("int32", "int64")),
        "splits": _splits(random, on_gpu, backend),
        "head_chunk": None, "bounds": (),
    }  # fmt: skip


def _splits(random: Random, on_gpu: bool, backend: str) -> int | str:
    if backend in ("eager", "auto") or random.random() < 0.6:  # the reference takes no number
        return "auto"
    return random.choice((1, 2, 3, 7, 16, 128) if on_gpu else (1, 2, 3))


def _decode_length(random: Random, longest: int) -> int:
    kind = random.random()
    if kind < 0.05:
        return 0
    return random.choice((1, 2, longest)) if kind < 0.2 else random.randint(1, longest)


def probes(drawn: dict[str, Any], decode: bool) -> list[str]:
    """What may be changed without a change of some results."""
    found = []
    if decode:
        found += ["beyond lengths", "beyond lengths"]
    elif drawn["causal"] and drawn["seq_len"] > 1 and drawn["form"] != "packed":
        found += ["future"] * 3
    if len(drawn["bounds"]) > 2:
        found += ["other documents"] * 3
    if drawn["batch"] > 1:
        found.append("other sequences")
    if drawn["kv_heads"] > 1:
        found.append("other heads")
    return found or ["none"]
