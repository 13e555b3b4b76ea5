"""The corners in which kernels were found wrong, small enough for Triton's interpreter and the emulator.

A corner is what a case of it has beside a kind of the kernels: their `usual` one unless it names another. The sequence
of 140 tokens has whole tiles and a rest.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from fuzz.calls import PUBLIC
from fuzz.cases import AFTER, MIXERS, STATE, FuzzCase, Parts
from kernel_inputs import DEVICE

from conformance.kernels import EAGER, Kernels

Corner = dict[str, Any]
EVERY = ("q", "k", "v", "weight", "grad_out", "q_history", *MIXERS, *AFTER)
OF_PARTS = {"gate": "", "gate_bias": False, "mixings": "near identity", "norm_eps": None, "depth": None, "dropout": 0.0}
NAMED = (*MIXERS, "in_float32", *OF_PARTS)  # what a corner may have otherwise than its kind
DOCUMENTS = (0, 0, 1, 3, 33, 33, 70)  # two of no token, one of one


def laid_out(layout: str, *others: str) -> tuple[tuple[str, str], ...]:
    """All tensors in a layout, some of them in turn in `others`."""
    layouts = (layout, *others)
    return tuple((name, layouts[i % len(layouts)]) for i, name in enumerate(EVERY))


CORNERS: dict[str, Corner] = {
    "one token": {"batch": 2, "seq_len": 1},
    "fewer tokens than taps": {"seq_len": 3, "batch": 2, "probe": "other sequences", "values": "uneven"},
    "tiles and a rest": {"seq_len": 140, "probe": "future", "twice": True, "chunk_rows": 128},
    "every key seen": {"kind": "other", "heads": 4, "probe": "other heads", "layouts": laid_out("permuted")},
    "wide heads": {"kind": "wide", "heads": 1, "probe": "future"},
    "documents": {"bounds": DOCUMENTS, "values": "uneven", "probe": "other documents", "twice": True},
    "documents in which every key is seen": {"kind": "other", "bounds": (0, 40, 41, 70), "probe": "other documents"},
    "documents of wide heads": {"kind": "wide", "bounds": (0, 3, 3, 50)},
    "a chunk of a prompt": {"query_rows": 33, "history": 11, "probe": "future"},
    "the newest row": {"kind": "other", "query_rows": 1, "history": 9, "layouts": laid_out("steps")},
    "heads at a time": {"heads": 4, "kv_heads": 2, "head_chunk": 1, "seq_len": 33, "probe": "other heads"},
    "groups of heads at a time": {"kind": "other", "heads": 4, "kv_heads": 4, "head_chunk": 2, "seq_len": 13},
    "a scale of zero": {"scale": 0.0, "layouts": laid_out("transposed")},
    "a negative scale": {"kind": "other", "scale": -0.3, "layouts": laid_out("columns first", "offset")},
    "a tiny scale": {"scale": 1e-6, "seq_len": 20, "weight": "large"},
    "scores of 60000": {"values": "large scores"},
    "negative scores of 60000": {"values": "large scores", "scale": -0.5, "kind": "other"},
    "equal scores": {"values": "equal", "weight": "one tap"},
    "keys of zero": {"values": "zero keys", "seq_len": 33},
    "a huge key": {"values": "huge key", "probe": "future"},
    "a huge key after a tiny scale": {"values": "huge key", "scale": 1e-7, "seq_len": 33},
    "a huge value": {"values": "huge value", "probe": "future"},
    "the identity": {"weight": "identity", "seq_len": 33, "layouts": laid_out("padded", "rows apart")},
    "a weight of float32": {"weight_dtype": "fp32", "seq_len": 33, "layouts": laid_out("columns first", "steps")},
    "shared memory": {"batch": 2, "seq_len": 20, "layouts": laid_out("expanded", "expanded heads")},
    "a gradient without strides": {"batch": 2, "seq_len": 20, "layouts": (("grad_out", "expanded everywhere"),)},
    "by the module": {"seq_len": 20, "way": "module"},
    "under autocast": {"seq_len": 20, "way": "autocast", "weight_dtype": "fp32"},
    "some gradients": {"seq_len": 20, "wanted": ("k", "weight"), "way": "again"},
}
STEPS: dict[str, Corner] = {
    "ragged": {"lengths": (40, 0, 130, 1, 5, 17), "probe": "other sequences", "twice": True},
    "one program": {"lengths": (140, 33), "splits": 1, "probe": "other heads", "heads": 4},
    "three programs": {"lengths": (140, 33, 2), "splits": 3, "probe": "beyond lengths"},
    "more programs than keys": {"lengths": (9, 3, 1, 12), "splits": 16, "twice": True},
    "the first token": {"lengths": (1, 1)},
    "older queries": {"lengths": (3, 90), "older": 5, "kind": "other"},
    "pages": {"lengths": (16, 65, 130), "page_size": 16, "probe": "other sequences", "splits": 2},
    "large pages": {"lengths": (16, 250, 5), "page_size": 128, "probe": "beyond lengths", "kind": "wide"},
    "wide heads": {"lengths": (70, 9), "kind": "wide"},
    "many heads": {"lengths": (70, 9), "heads": 16, "kv_heads": 2, "kind": "wide", "probe": "other heads"},
    "a scale of zero": {"lengths": (40,), "scale": 0.0},
    "a negative scale": {"lengths": (40, 3), "scale": -0.3, "kind": "other"},
    "scores of 60000": {"lengths": (40, 3), "values": "large scores"},
    "negative scores of 60000": {"lengths": (40, 3), "values": "large scores", "scale": -0.5, "kind": "other"},
    "equal scores": {"lengths": (40, 3), "values": "equal"},
    "a huge key": {"lengths": (70, 33), "values": "huge key"},
    "rows apart": {
        "lengths": (40, 3), "layouts": (
            ("q", "columns first"), ("k", "transposed"), ("v", "rows apart"), ("weight", "steps"),
            ("lengths", "steps"),
        ),
    },
    "shared memory": {
        "lengths": (40, 40), "layouts": (
            ("q", "steps"), ("k", "expanded"), ("v", "expanded heads"), ("weight", "expanded"), ("lengths", "expanded"),
        ),
    },
    "off by one": {"lengths": (40, 3), "page_size": 16, "layouts": (
        ("q", "offset"), ("k", "offset"), ("v", "padded"), ("weight", "offset"), ("block_table", "columns first"),
    )},
    "a weight of float32": {"lengths": (40, 3), "weight_dtype": "fp32", "weight": "identity"},
    "under autocast": {"lengths": (40, 3), "way": "autocast", "weight_dtype": "fp32"},
}  # fmt: skip


MTA_CORNERS: dict[str, Corner] = {
    "one token": {"batch": 2, "seq_len": 1},
    "fewer tokens than taps": {"seq_len": 3, "batch": 2, "probe": "other sequences", "values": "uneven", "twice": True},
    "chunks of rows": {"seq_len": 44, "chunk_rows": 32, "probe": "future"},
    "every key seen": {
        "kind": "other", "heads": 4, "kv_heads": 2, "seq_len": 17, "chunk_rows": 16, "probe": "other heads",
        "layouts": laid_out("permuted", "columns first", "padded"),
    },
    "documents": {
        "bounds": (0, 0, 1, 3, 14, 14, 36), "chunk_rows": 16, "values": "uneven", "probe": "other documents",
    },
    "documents in which every key is seen": {
        "kind": "other", "bounds": (0, 10, 11, 17), "probe": "other documents", "layouts": laid_out("steps"),
    },
    "a chunk of a prompt": {
        "seq_len": 28, "query_rows": 19, "chunk_rows": 16, "probe": "future",
        "layouts": laid_out("steps", "transposed"),
    },
    "the last rows of a prompt": {  # a run of rows ends where keys of a block begin
        "seq_len": 155, "query_rows": 39, "chunk_rows": 16, "probe": "future", "emulated": True,
        "layouts": laid_out("offset", "rows apart"),
    },
    "rows of fewer blocks of keys than a chunk has": {"seq_len": 132, "emulated": True},
    "heads mixed alone": {"kind": "wide", "chunk_rows": 32, "probe": "future"},
    "documents of heads mixed alone": {"kind": "wide", "bounds": (0, 3, 3, 50), "chunk_rows": 32},
    "many heads": {"kind": "wide", "heads": 40, "kv_heads": 8, "seq_len": 20},
    "convolved after alone": {"seq_len": 36, "pre_conv": False, "pre_mix": 0, "post_mix": 0, "scale": -0.3},
    "mixed and convolved after": {"seq_len": 36, "pre_conv": False, "chunk_rows": 16},
    "convolved and mixed after": {"seq_len": 20, "post_conv": None, "gate": "full", "gate_bias": True, "norm_eps": 0.1},
    "parts of a batch": {"batch": 3, "seq_len": 20, "chunk_rows": 16, "chunk_bytes": 1 << 16},
    "a scale of zero": {"seq_len": 13, "scale": 0.0, "post_mix": 0, "layouts": laid_out("expanded", "expanded heads")},
    "scores of 60000": {"kind": "wide", "seq_len": 20, "values": "large scores"},
    "a huge key": {"seq_len": 20, "values": "huge key", "pre_conv": False, "gate": ""},
    "scores that grow": {"seq_len": 200, "query_rows": 8, "values": "large scores"},
    "by the module": {"seq_len": 13, "way": "module", "in_float32": (), "gate_bias": True, "norm_eps": 1e-5},
    "under autocast": {"seq_len": 13, "way": "autocast"},
    "some gradients": {"seq_len": 20, "wanted": ("k", "post_conv"), "way": "again", "pre_mix": 0},
    "dropout": {"seq_len": 13, "dropout": 0.5, "twice": True},
}  # fmt: skip
MTA_STEPS: dict[str, Corner] = {
    "ragged": {"lengths": (40, 0, 70, 1, 5), "query_rows": 2, "probe": "other sequences", "twice": True},
    "from the first token": {"lengths": (5, 3), "query_rows": 5, "kind": "other", "splits": 1, "gate": "one"},
    "a sequence in the place of another": {"lengths": (9, 33), "query_rows": 3, "replaced": (1, 1), "splits": 3},
    "more programs than keys": {"lengths": (9, 1, 12), "splits": 16, "kind": "wide", "twice": True},
    "groups of heads": {
        "lengths": (33, 7), "heads": 4, "kv_heads": 2, "kind": "other", "probe": "other heads", "older": 2,
        "layouts": (
            ("q", "columns first"), ("k", "transposed"), ("v", "transposed"), ("pre_conv", "steps"),
            ("post_mix", "permuted"), ("norm_weight", "steps"), *((name, "steps") for name in STATE),
        ),
    },
    "pages": {
        "lengths": (16, 65), "page_size": 16, "probe": "beyond lengths", "splits": 2, "gate": "full",
        "layouts": (("block_table", "steps"),),
    },
    "wide heads in pages": {"lengths": (16, 65), "page_size": 64, "kind": "wide", "gate": "full", "gate_bias": True},
    "many keys": {"lengths": (300,), "gate_bias": True, "norm_eps": 0.1, "splits": 1},
    "many programs": {"lengths": (1700,), "splits": 104, "kind": "wide", "gate": ""},
    "convolved before alone": {"lengths": (40, 3), "post_conv": None, "post_mix": 0, "scale": -0.3},
    "convolved after alone": {"lengths": (40, 3), "pre_conv": False, "pre_mix": 0, "post_mix": 0, "query_rows": 2},
    "scores of 60000": {"lengths": (40,), "values": "large scores", "query_rows": 2},
    "under autocast": {"lengths": (20,), "way": "autocast", "query_rows": 2},
}  # fmt: skip
TABLES = {
    ("conv-attention", False): CORNERS, ("conv-attention", True): STEPS,
    ("mta", False): MTA_CORNERS, ("mta", True): MTA_STEPS,
}  # fmt: skip


def corners_of(kernels: Kernels) -> dict[str, Corner]:
    """Their table."""
    table = TABLES[kernels.op, kernels.decode]
    return {name: table[name] for name in kernels.corners} if kernels.corners else table


def case_of(kernels: Kernels, name: str, **changes: Any) -> FuzzCase | None:
    """A corner for kernels, None if they have no such call."""
    corner = TABLES[kernels.op, kernels.decode][name] | changes
    of_kind = getattr(kernels, corner.get("kind", "usual"))
    given: Corner = {"heads": 2, "kv_heads": 1, "batch": 1, "form": "whole", "weight_dtype": of_kind["dtype"]}
    given |= corner | of_kind | {name: x for name, x in corner.items() if name in changes or name in NAMED}
    given.pop("kind", None)
    if given.pop("emulated", False) and not kernels.played:  # too long for Triton's interpreter
        return None
    if kernels.decode:
        given |= {"causal": True, "form": "paged" if "page_size" in given else "contiguous"}
    else:
        given.setdefault("seq_len", given.get("bounds", (70,))[-1])
        given.setdefault("query_rows", given["seq_len"])
        if "bounds" in given:
            given["form"] = "packed"
        elif given["query_rows"] < given["seq_len"]:
            given["form"] = "chunk"
    if given["form"] not in kernels.forms or not _is_called(kernels, given):
        return None
    if kernels.op == "mta":
        given["parts"] = _parts(given)
    looks_back = given["query_taps"] - 1 + (given["parts"].post_taps[0] - 1 if "parts" in given else 0)
    if kernels.decode:
        given |= _of_step(given, looks_back, kernels.groups)
    elif given["form"] == "chunk":
        given.setdefault("history", looks_back)
    given["pass_"] = "decode" if kernels.decode else "bwd" if kernels.gradients else "fwd"
    given.setdefault("wanted", ("q", "k", "v", *(given["parts"].names if "parts" in given else ("weight",))))
    if given["pass_"] != "bwd":
        given["wanted"] = ()
    defaults: dict[str, Any] = {
        "seed": 0, "number": crc32(name.encode()) // 10 * 10 + 1, "op": kernels.op, "backend": kernels.backend,
        "device": DEVICE, "scale": None, "weight": "random", "values": "normal", "way": "plain", "twice": False,
        "probe": "none", "head_chunk": None, "chunk_rows": None, "chunk_bytes": None, "bounds": (), "lengths": (),
        "lengths_dtype": "", "page_size": None, "splits": "auto", "layouts": (), "history": 0,
    }  # fmt: skip
    return FuzzCase(**defaults | given)


def _parts(given: Corner) -> Parts:
    """The parts of a case, removed from the corner."""

    def shape(size: int) -> tuple[int, ...]:
        heads = given["heads"]
        return () if not size else (heads, heads) if size < 0 else (heads // size, size, size)

    found = {name: given.pop(name) for name in MIXERS} | {"in_float32": given.pop("in_float32")}
    found |= {name: given.pop(name, default) for name, default in OF_PARTS.items()}
    found |= {name: shape(found[name]) for name in ("pre_mix", "post_mix")}
    if not found["pre_conv"]:
        given["query_taps"] = given["key_taps"] = 1
    rows = {"": 0, "one": 1, "full": given["head_dim"]}[found["gate"]]
    return Parts(**found | {"gate": (rows, given["head_dim"]) if rows else ()})


def _is_called(kernels: Kernels, given: Corner) -> bool:
    """Whether a corner is one of their function."""
    public = kernels.operation is PUBLIC
    return not (
        (not public and ("head_chunk" in given or given.get("way", "plain") != "plain"))
        or ("splits" in given and kernels.backend == EAGER and public)
        or ("dropout" in given and kernels.backend != EAGER)
        or ("wanted" in given and not kernels.gradients)
    )


def _of_step(given: Corner, looks_back: int, groups: int) -> Corner:
    """The numbers of a decode's case; `groups` are keys of which a cache has a whole number."""
    lengths, page, steps = given["lengths"], given.get("page_size", groups), given.get("query_rows", 1)
    return {
        "batch": len(lengths), "lengths_dtype": ("int32", "int64")[len(lengths) % 2], "query_rows": steps,
        "seq_len": -(-(max(lengths) + 2) // page) * page,
        "history": max(0, min(looks_back, max(lengths) - steps)) + given.pop("older", 0),
    }  # fmt: skip
