"""What a case is, and how it is drawn: from the seed, so that a number alone repeats a case.

What a kernel is compiled for is a `Kind`: dtype, head dim, taps, heads and parts, padding and the mask. Many cases
share one, and a few *shapes*: form, sizes, strides, page size and splits, for which Triton compiles as well. A case
draws all else, and its numbers of rows and keys. These keep their remainders by 32, since Triton compiles another
kernel for multiples of 16. So most cases find their kernels compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import isqrt, lcm
from random import Random
from typing import Any, NamedTuple

from mta_kernels.operation import PAGE_SIZES

BLOCK = {"cuda": 240, "cpu": 1}  # cases of a target in a row; nothing is compiled for Triton's interpreter
OF_A_KIND = {False: 240, True: 120}  # cases on a GPU, of all rows and of decode, whose kernels compile sooner
SHAPES = 4  # of a kind
# A shape that a case has for itself: offsets that 32 bits do not hold, as many rows of scores as a backward keeps, and
# more blocks than a grid has in its second dimension.
RARE = ("far", "far", "long", "long", "blocks")
MOST_SCORES = {"cuda": 2 << 20, "cpu": 7_500}  # of all heads and sequences together
MOST_CACHED = {"cuda": 1 << 20, "cpu": 4_000}  # scores of a decode: of all rows in its window
MOST_IN_CACHE = 16 << 20  # numbers of the keys of all query heads and sequences
MULTIPLES = 32  # that a kernel's tiles are multiples of, more or less
CHUNK_ROWS = 2048  # rows of scores that a backward keeps at a time
LAYOUTS = ("transposed", "offset", "steps", "rows apart", "columns first", "padded", "permuted")
SHARED_LAYOUTS = ("expanded", "expanded heads")  # sequences, or heads, that share memory
KEYS_APART = ("steps", "columns first")  # the numbers of a key lie apart, which Triton's decode refuses
VALUES = ("large scores", "equal", "huge key", "huge value", "zero keys", "one value", "tiny", "uneven", "uneven")
MOST_TAPS = {"mta": (8, 17), "banded": (8, 17), "": (16, 31)}
MIXERS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
AFTER = ("norm_weight", "gate_weight", "gate_bias")
STATE = ("logits", "logsumexp", "state_lengths")
HEADS = (1, 2, 2, 3, 4, 4, 5, 6, 8, 10, 12, 15, 16, 16, 16, 20, 24, 32, 40, 64)
HEAD_DIMS = {  # all are taken in turn: prime numbers of them, so that whatever the other blocks are of, each gets all
    "cpu": (16, 16, 16, 18, 24, 24, 32, 32, 40, 64, 72),  # 11
    "cuda": (16, 18, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 100, 112, 128, 128, 128, 136, 152, 160, 192, 248, 256),
}
# What a backend refuses, in one sentence: heads, head dim, taps before, taps after; None stands for what the kind has.
Taps = tuple[int, int]
UNFIT: dict[tuple[str, str], tuple[tuple[int | None, int | None, Taps | None, Taps | None], ...]] = {
    ("conv-attention", "triton"): ((None, 8, None, None), (None, 272, None, None), (None, None, (17, 3), None)),
    ("conv-attention", "hopper"): ((None, 20, None, None), (None, 136, None, None), (None, None, (9, 3), None)),
    ("conv-attention", "cuda"): ((None, 8, None, None), (None, 264, None, None), (None, None, (1, 32), None)),
    ("mta", "triton"): (
        (65, None, None, None), (None, 8, None, None), (None, None, (9, 18), None), (None, None, None, (17, 32)),
    ),
}  # fmt: skip


class Target(NamedTuple):
    """What a case is of: a decode, or a call of all rows, with its gradients or without."""

    op: str
    backend: str
    decode: bool = False


# By operation, the backends of a device that has them, and those that a run takes which names none.
BACKENDS: dict[str, dict[str, tuple[str, ...]]] = {
    "conv-attention": {"known": ("triton", "hopper", "cuda", "auto", "eager"), "cuda": ("cuda", "hopper", "triton")},
    "mta": {"known": ("triton", "auto", "eager"), "cuda": ("triton",)},
}


@dataclass(frozen=True)
class Kind:
    """What a backend's kernels are compiled for; mixings as the heads of a group, 0 without one, -1 for `[H, H]`."""

    dtype: str
    head_dim: int
    heads: int  # of conv attention, each case has its own
    kv_heads: int
    pre_conv: Taps | None
    pre_mix: int
    post_conv: Taps | None
    post_mix: int
    norm: bool
    gate: str  # "", "one" or "full"
    gate_bias: bool
    pad_key: str
    causal: bool
    in_float32: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """What the whole multi-token attention has beside the convolution of scores; shapes, () where a part is missing."""

    pre_conv: bool  # by the taps of the case
    pre_mix: tuple[int, ...]
    post_conv: Taps | None
    post_mix: tuple[int, ...]
    mixings: str
    norm_eps: float | None  # None without a norm
    depth: int | None
    gate: tuple[int, ...]
    gate_bias: bool
    dropout: float
    in_float32: tuple[str, ...]  # names of tensors that are not in the case's dtype

    @property
    def post_taps(self) -> Taps:
        """Of the convolution of probabilities; one where there is none."""
        return self.post_conv or (1, 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that these parts have."""
        there = {
            "pre_conv": self.pre_conv, "pre_mix": self.pre_mix, "post_conv": self.post_conv, "post_mix": self.post_mix,
            "norm_weight": self.norm_eps is not None, "gate_weight": self.gate, "gate_bias": self.gate_bias,
        }  # fmt: skip
        return tuple(name for name, is_there in there.items() if is_there)


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
    chunk_rows: int | None  # rows of scores that kernels store at a time, at most
    chunk_bytes: int | None
    bounds: tuple[int, ...]
    lengths: tuple[int, ...]
    lengths_dtype: str
    page_size: int | None
    splits: int | str
    layouts: tuple[tuple[str, str], ...]
    parts: Parts | None = None
    replaced: tuple[int, int] | None = None  # a sequence, and the step before which it takes another one's place
    repeat: int = 0  # of the same case with other values

    @property
    def looks_back(self) -> int:
        """Queries before a row that it depends on."""
        return self.query_taps - 1 + (self.parts.post_taps[0] - 1 if self.parts else 0)

    @property
    def heads_that_meet(self) -> int:
        """The fewest heads, neighbours, that depend on no others: by KV heads and by mixings."""
        mixed = (self.parts.pre_mix, self.parts.post_mix) if self.parts else ()
        return lcm(self.heads // self.kv_heads, *(mix[-1] for mix in mixed if mix))

    def described(self) -> str:
        """All of it, a line a field."""
        return "\n".join(f"  {field.name:<13} {getattr(self, field.name)!r}" for field in fields(self))


def draw(seed: int, number: int, targets: Sequence[Target], device: str) -> FuzzCase:
    """Case `number` of a seed, for one of the targets; the same as with that target alone."""
    target = targets[number // BLOCK[device] % len(targets)]
    kind_number = number // (OF_A_KIND[target.decode] if device == "cuda" else 1)
    name = f"{seed} {kind_number} {device} {' '.join(map(str, target))}"
    dims = HEAD_DIMS[device]
    head_dim = Random(seed).sample(dims, len(dims))[kind_number % len(dims)]
    return draw_for(draw_kind(Random(name), head_dim, target, device), name, seed, number, target, device)


def draw_kind(random: Random, head_dim: int, target: Target, device: str) -> Kind:
    """What the cases of a name share."""
    op, backend, decode = target
    mta, banded = op == "mta", backend == "hopper" or (backend == "cuda" and not decode)  # by tensor cores, in eights
    unit = 1 if not banded else 8 if head_dim <= 128 else 16
    most = MOST_TAPS["mta" if mta else "banded" if banded else ""]
    heads = random.choice(HEADS) if random.random() < 0.85 else random.randint(1, 64)
    before = _taps(random, most, device)
    after, found = _taps(random, most, device) if mta else None, random.random()
    names = (*MIXERS, *AFTER) if mta else ("weight",)
    drawn_in_float32 = random.choice(((), (), names, tuple(name for name in names if random.random() < 0.5)))
    all_parts = mta and random.random() < 0.3
    gate = random.choice(("one", "full") if all_parts else ("", "", "one", "full")) if mta else ""
    return Kind(
        dtype=random.choice(_dtypes(backend, device)),
        head_dim=head_dim // unit * unit,
        heads=heads,
        kv_heads=random.choice([x for x in range(1, heads + 1) if heads % x == 0]),
        pre_conv=None if mta and not all_parts and 0.6 < found < 0.85 else before,
        pre_mix=_mixing(random, heads, all_parts) if mta else 0,
        post_conv=after if all_parts or found < 0.45 or found > 0.75 else None,
        post_mix=_mixing(random, heads, all_parts) if mta else 0,
        norm=all_parts or (mta and random.random() < 0.4),
        gate=gate,
        gate_bias=bool(gate) and random.random() < 0.7,
        pad_key=random.choice(("both", "both", "left", "right")),
        causal=decode or random.random() < 0.75,
        in_float32=drawn_in_float32,
    )


def _dtypes(backend: str, device: str) -> tuple[str, ...]:
    if backend in ("hopper", "cuda"):
        return "bf16", "fp16"
    if backend == "eager":
        return "fp32", "bf16"  # its scores overflow in float16
    if device == "cpu":
        return "fp32", "fp32", "fp16"
    return "bf16", "bf16", "fp16", "fp16", "fp32"


def _taps(random: Random, most: Taps, device: str) -> Taps:
    kind = random.random()
    if kind < 0.35:
        return random.choice(((6, 11), (6, 11), (1, 1), (3, 3), (2, 4), (4, 2), (1, 7), (7, 1)))
    if kind < 0.9 or (device == "cpu" and kind < 0.97):
        return random.randint(1, min(8, most[0])), random.randint(1, min(12, most[1]))
    if kind < 0.97:
        return random.randint(1, most[0]), random.randint(1, most[1])
    return most


def _mixing(random: Random, heads: int, is_there: bool) -> int:
    kind = random.random()
    if kind < 0.25 and not is_there:
        return 0
    return -1 if kind < 0.55 else random.choice([x for x in range(1, heads + 1) if heads % x == 0])


def draw_for(kind: Kind, name: str, seed: int, number: int, target: Target, device: str) -> FuzzCase:
    """Case `number` of a seed and of the kind of this name."""
    op, backend, decode = target
    random, on_gpu = Random(f"{name} {number}"), device == "cuda"
    # What kernels are compiled for is drawn by `shared`; kernels of all rows in CUDA C++ read strides at run time.
    compiles_shapes = on_gpu and (decode or backend in ("triton", "auto"))
    shared, rare = random, random.choice(RARE) if on_gpu and random.random() < 0.005 else ""
    if compiles_shapes and not rare:
        shared = Random(f"{name} shape {random.randrange(SHAPES)}")
    heads, taps = (kind.heads, kind.kv_heads), kind.pre_conv or (1, 1)
    if (op, backend) in UNFIT and random.random() < 0.005:
        unfit = random.choice(UNFIT[op, backend])
        heads = (unfit[0], 1) if unfit[0] else heads
        kind = replace(
            kind, head_dim=unfit[1] or kind.head_dim, pre_conv=unfit[2] or kind.pre_conv,
            post_conv=unfit[3] or kind.post_conv, pre_mix=min(kind.pre_mix, 0), post_mix=min(kind.post_mix, 0),
        )  # fmt: skip
        taps = kind.pre_conv or (1, 1)
    parts = _parts(random, kind, heads[0], backend, decode) if op == "mta" else None
    looks_back = taps[0] - 1 + (parts.post_taps[0] - 1 if parts else 0)
    weight_dtype = "fp32" if {"weight", "pre_conv"} & {*kind.in_float32} else kind.dtype
    drawn: dict[str, Any] = {
        "seed": seed, "number": number, "op": op, "backend": backend, "device": device, "dtype": kind.dtype,
        "head_dim": kind.head_dim, "query_taps": taps[0], "key_taps": taps[1], "pad_key": kind.pad_key,
        "causal": kind.causal, "scale": _scale(random),
        "weight": random.choices(("random", "identity", "one tap", "large"), (80, 8, 7, 5))[0],
        "weight_dtype": weight_dtype, "values": random.choice(VALUES) if random.random() < 0.3 else "normal",
        "parts": parts, "chunk_rows": None, "chunk_bytes": None, "head_chunk": None, "bounds": (), "lengths": (),
        "lengths_dtype": "", "page_size": None, "splits": "auto", "history": 0,
    }  # fmt: skip
    of_heads = heads if parts else None
    if decode:
        drawn |= _decode_shape(shared, kind, on_gpu, target, taps[0], looks_back, of_heads)
    else:
        drawn |= _shape(shared, on_gpu, looks_back, of_heads, rare)
        if parts or backend == "triton":
            sizes = (None, None, 16, 16, 32, 128, 128) if parts else (None, None, 128, 256)
            drawn["chunk_rows"] = shared.choice(sizes)
            drawn["chunk_bytes"] = shared.choice((None, None, 1 << 16, 1 << 19, 1 << 21)) if parts else None
    names = ("q", "k", "v", *(parts.names if parts else ("weight",)))
    drawn["pass_"] = "decode" if decode else "bwd" if shared.random() < 0.65 else "fwd"
    drawn["wanted"] = _wanted(shared, names) if drawn["pass_"] == "bwd" else ()
    drawn["way"] = _way(shared, kind, parts, decode, on_gpu)
    drawn["twice"] = random.random() < 1 / 3
    case = FuzzCase(**drawn, probe="none", layouts=())
    if not on_gpu or shared.random() > 1 / 3:
        case = replace(case, layouts=tuple(_layouts(shared, case, (*names, "q_history"), rare)))
    case = _with_own_lengths(random, case)
    return replace(case, probe=random.choice(_probes(case)) if random.random() < 0.6 else "none")


def _with_own_lengths(random: Random, case: FuzzCase) -> FuzzCase:
    """The case with fewer rows and keys, as far as its shape has room, and with documents or lengths of its own."""
    dropped = MULTIPLES * random.randint(0, case.seq_len // (2 * MULTIPLES)) if case.seq_len < CHUNK_ROWS - 2 else 0
    rows, keys = case.query_rows, case.seq_len - dropped
    if case.pass_ == "decode":
        keys = keys if case.page_size is None and keys >= rows + case.history else case.seq_len
        lengths = tuple(_decode_length(random, keys) for _ in range(case.batch))
        return replace(case, seq_len=keys, lengths=lengths, replaced=_replaced(random, case, lengths))
    if case.form != "chunk":
        return replace(case, seq_len=keys, query_rows=keys, bounds=case.bounds and _bounds(random, keys))
    if rows > dropped and random.random() < 0.5:
        return replace(case, seq_len=keys, query_rows=rows - dropped)
    return replace(case, seq_len=keys) if keys - rows >= case.history else case


def _scale(random: Random) -> float | None:
    """Of `q . k`."""
    kind = random.random()
    if kind < 0.55:
        return None
    if kind < 0.6:
        return 0.0
    size = random.choice((1e-6, 0.01, 0.1, 0.15, 0.3, 1.0)) * random.uniform(0.8, 1.2)
    return -size if random.random() < 0.5 else size


def _parts(random: Random, kind: Kind, heads: int, backend: str, decode: bool) -> Parts:
    def mixing(size: int) -> tuple[int, ...]:
        if size > 0 and heads % size == 0:
            return heads // size, size, size
        return (heads, heads) if size else ()

    drops = {"triton": 0.0, "auto": 0.05, "eager": 0.15}[backend]
    return Parts(
        pre_conv=kind.pre_conv is not None,
        pre_mix=mixing(kind.pre_mix),
        post_conv=kind.post_conv,
        post_mix=mixing(kind.post_mix),
        mixings=random.choices(("near identity", "random", "identity", "permutation", "zero"), (50, 30, 8, 8, 4))[0],
        norm_eps=random.choice((1e-5, 1e-5, 1e-6, 0.1)) if kind.norm else None,
        depth=random.choice((0, 3, 20)) if kind.norm and random.random() < 0.3 else None,
        gate={"": (), "one": (1, kind.head_dim), "full": (kind.head_dim, kind.head_dim)}[kind.gate],
        gate_bias=kind.gate_bias,
        dropout=random.choice((0.1, 0.5)) if random.random() < drops and not decode else 0.0,
        in_float32=kind.in_float32,
    )


def _way(random: Random, kind: Kind, parts: Parts | None, decode: bool, on_gpu: bool) -> str:
    """How it is called; a module has one dtype of weights, no mixing of scores by groups, and a bias in its gate."""
    fits = parts is None or (
        len(parts.pre_mix) != 3 and bool(parts.gate) == parts.gate_bias and parts.norm_eps in (None, 1e-5)
    )
    ways = {"plain": 50, "again": 22}  # how often each
    ways |= {"autocast": 5} if kind.dtype != "fp32" else {}
    ways |= {"module": 6} if fits and not decode and (parts or not kind.in_float32) else {}
    ways |= {"stream": 8, "graph": 4} if on_gpu else {}
    return random.choices([*ways], [*ways.values()])[0]


def _layouts(random: Random, case: FuzzCase, names: tuple[str, ...], rare: str) -> Iterator[tuple[str, str]]:
    """Of the tensors that are not contiguous."""
    possible = LAYOUTS if case.form == "paged" else (*LAYOUTS, *SHARED_LAYOUTS)
    if rare == "far" and case.batch == 2 and case.form != "paged":
        yield random.choice(("q", "k", "v")), "far"
        return
    for name in names:
        apart = case.backend == "triton" and case.pass_ == "decode" and name in ("k", "v")
        if random.random() < 0.3:
            yield name, random.choice([x for x in possible if not (apart and x in KEYS_APART)])
    for name, share, choices in (
        ("grad_out", 0.4, (*possible, "expanded everywhere")),
        ("lengths", 0.35, ("steps", "offset", "expanded")),
        ("block_table", 0.35, ("steps", "offset", "expanded", "columns first", "padded")),
        ("cu_seqlens", 0.35, ("steps", "offset")),
        *((name, 0.3, LAYOUTS) for name in STATE),
    ):
        if random.random() < share:
            yield name, random.choice(choices)


def _wanted(random: Random, names: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors whose gradients the case computes: mostly all."""
    if random.random() < 0.9:
        return names
    return tuple(name for name in names if random.random() < 0.5) or (random.choice(names),)


def _heads(random: Random, most: int) -> tuple[int, int]:
    kv_heads = random.choice((1, 1, 2, 2, 3, 4))
    group = random.choice((1, 1, 1, 2, 2, 3, 4, 8))
    while kv_heads * group > most:
        kv_heads, group = max(1, kv_heads // 2), max(1, group // 2) if kv_heads == 1 else group
    return kv_heads * group, kv_heads


def _length(random: Random, on_gpu: bool) -> int:
    """Of a sequence: mostly short, now and then at the edge of a tile."""
    if not on_gpu:
        return random.choice((1, 2, random.randint(1, 12), random.randint(1, 12), random.randint(1, 40), 33, 65))
    kind = random.random()
    if kind < 0.15:
        return random.randint(1, 16)
    if kind < 0.55:
        return random.randint(17, 200)
    if kind < 0.75:
        return max(1, MULTIPLES * random.randint(1, 16) + random.randint(-1, 1))
    if kind < 0.95:
        return random.randint(200, 700)
    return random.randint(700, CHUNK_ROWS)


def _shape(
    random: Random, on_gpu: bool, looks_back: int, of_heads: tuple[int, int] | None, rare: str
) -> dict[str, Any]:  # fmt: skip
    """Of all rows: of given query and KV heads, or of its own."""
    found: dict[str, Any] = {}
    most = MOST_SCORES["cuda" if on_gpu else "cpu"] // (1 if on_gpu or of_heads is None else 3)
    seq_len = _length(random, on_gpu)
    if on_gpu:
        most //= random.choice((1, 4, 8, 8))
    if rare == "long":
        most, seq_len = 16 * MOST_SCORES["cuda"], CHUNK_ROWS + random.randint(-2, 900)
    if of_heads is not None:
        seq_len = min(seq_len, isqrt(most // of_heads[0]))
    room = most // seq_len**2  # heads of all sequences
    batch = min(random.choice((1, 1, 2, 3, 5) if on_gpu else (1, 1, 1, 2)), max(1, room // (of_heads or (1,))[0]))
    heads, kv_heads = of_heads or _heads(random, max(1, min(16, room // batch) if on_gpu else 4 // batch))
    if rare == "blocks":
        if of_heads is None:
            batch, heads, kv_heads, seq_len = random.choice(((1, 65536, 65536, 3), (8193, 8, 4, 5), (65537, 1, 1, 2)))
        elif heads > 8:
            batch, seq_len = 65536 // heads + 1, 2
    form = random.choices(("whole", "chunk", "packed"), (50, 20, 30))[0]
    query_rows = seq_len
    if form == "chunk":
        query_rows = random.randint(1, seq_len)
        found["history"] = min(looks_back, seq_len - query_rows) + random.choice((0, 0, 1, 5))
        found["history"] = min(found["history"], seq_len - query_rows)
    if form == "packed":
        batch = 1
        found["bounds"] = _bounds(random, seq_len)
    if of_heads is None and random.random() < 0.2:
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
            inner += [min(rows, bound + random.choice((0, 0, 1))) for _ in range(random.choice((1, 1, 2)))]
    return (0, *sorted(inner), rows)


def _decode_shape(
    random: Random, kind: Kind, on_gpu: bool, target: Target, query_taps: int, looks_back: int,
    of_heads: tuple[int, int] | None,
) -> dict[str, Any]:  # fmt: skip
    """Of conv attention one step, of the whole operation several, behind a prefill."""
    batch = random.choice((1, 1, 2, 3, 5, 8, 16, 40) if on_gpu else (1, 1, 2, 3))
    longest = random.choice((1, 5, 40, 70, 300, 300, 1000, 3000, 9000) if on_gpu else (1, 3, 20, 70, 140))
    longest = random.randint(max(1, longest // 3), longest)
    steps, rows, most = 1, query_taps, MOST_CACHED["cuda" if on_gpu else "cpu"]
    if on_gpu:
        most //= random.choice((1, 2, 8))
    if of_heads is not None:
        steps = random.choice((1, 1, 2, 3, 5))
        rows, most = looks_back + steps, most if on_gpu else 4 * most
        longest = min(longest, max(1, most // (rows * of_heads[0])))
    room = min(most // rows, MOST_IN_CACHE // kind.head_dim) // longest
    batch = min(batch, max(1, room // (of_heads or (1,))[0]))
    heads, kv_heads = of_heads or _heads(random, max(1, min(32 if on_gpu else 4, room // batch)))
    page_size = random.choice(PAGE_SIZES if on_gpu else PAGE_SIZES[:2]) if random.random() < 0.4 else None
    capacity = longest + random.choice((0, 0, 1, 7))
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    before = min(looks_back, max(0, capacity - steps))
    return {
        "form": "contiguous" if page_size is None else "paged", "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "seq_len": capacity, "query_rows": steps, "history": before + random.choice((0, 0, 0, 1, 4)),
        "page_size": page_size, "lengths_dtype": random.choice(("int32", "int64")),
        "splits": _splits(random, on_gpu, target.backend),
    }  # fmt: skip


def _splits(random: Random, on_gpu: bool, backend: str) -> int | str:
    if backend in ("eager", "auto") or random.random() < 0.4:  # the reference takes no number
        return "auto"
    return random.choice((1, 2, 3, 7, 16, 16, 128) if on_gpu else (1, 2, 3))


def _decode_length(random: Random, longest: int) -> int:
    kind = random.random()
    if kind < 0.05:
        return 0
    return random.choice((1, min(2, longest), longest)) if kind < 0.2 else random.randint(1, longest)


def _replaced(random: Random, case: FuzzCase, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """A sequence that begins in the middle of some steps, or goes on there, in the place of one that has ended."""
    if case.parts is None or case.parts.post_taps[0] == 1 or dict(case.layouts).get("lengths") == "expanded":
        return None
    step = random.randint(1, max(1, case.query_rows - 1))
    possible = [number for number, length in enumerate(lengths) if length >= step]  # keys for the one before it
    return (random.choice(possible), step) if case.query_rows > 1 and possible and random.random() < 0.7 else None


def _probes(case: FuzzCase) -> list[str]:
    """What may be changed without a change of some results: not what shares memory with the rest."""
    found = []
    layouts = {layout for name, layout in case.layouts if name in ("q", "k", "v", "grad_out", "q_history")}
    if case.pass_ == "decode":
        found += ["beyond lengths", "beyond lengths"]
    elif case.causal and case.seq_len > 1 and case.form != "packed":
        found += ["future"] * 2
    if len(case.bounds) > 2 and "expanded everywhere" not in layouts:
        found += ["other documents"] * 3
    if not layouts & {*SHARED_LAYOUTS, "expanded everywhere"}:
        found += ["other sequences"] * 2 * (case.batch > 1)
        found += ["other heads"] * (case.heads > case.heads_that_meet)
    return found or ["none"]
