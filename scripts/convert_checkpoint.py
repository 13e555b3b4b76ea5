"""Write a checkpoint of the original multi-token attention as a Hugging Face folder of a Llama with mixers.

    PYTHONPATH=kernels python3 scripts/convert_checkpoint.py checkpoints/0000200000/consolidated converted

The first folder has consolidated.pth and params.json, as Meta's code (facebookresearch/RAM, projects/mta) leaves them.
Its rotary embedding rotates pairs of neighbouring numbers, Llama's the halves of a head. So rows of the projections of
queries and keys change places. Which mixers a layer has is read from its entries. The tokenizer is not converted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {  # of a layer's entries in both layouts
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
WHOLE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
DERIVED = ("output.tied_module.weight", "rope_embeddings.freqs_cis")


def main() -> int:
    """Convert the folder that the command line names; exit code 2 with one sentence for what it cannot convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder with consolidated.pth and params.json")
    parser.add_argument("folder", type=Path, help="the folder to write, which is not there yet")
    options = parser.parse_args()
    try:
        convert(options.checkpoint, options.folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"wrote {options.folder}; load it with attn_implementation='mta', and a tokenizer of your own beside it")
    return 0


def convert(checkpoint: Path, folder: Path) -> None:
    """Write `folder` from a checkpoint's; raises OSError for a missing file and ValueError for another layout."""
    from transformers import AutoModelForCausalLM

    import mta_kernels.integrations.transformers  # noqa: F401 - registers attn_implementation="mta"

    if folder.exists():
        raise ValueError(f"{folder} exists; give a folder that is not there yet")
    given = json.loads((checkpoint / "params.json").read_text())["model"]
    state = torch.load(checkpoint / "consolidated.pth", map_location="cpu", weights_only=True)["model"]
    state = {name: x for name, x in state.items() if name not in DERIVED}
    config = llama_config(given, state)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="mta")
    model.load_state_dict(llama_state(state, config), assign=True, strict=not config.tie_word_embeddings)
    model.tie_weights()
    model.save_pretrained(folder)


def llama_config(given: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """The config of a Llama with the mixers of `state`; `given` is the part `model` of params.json."""
    from transformers import LlamaConfig

    mixing = given.get("mta") or {}
    if mixing.get("curse_norm") or given.get("sliding_window"):
        raise ValueError("params.json has curse_norm or a sliding_window, which a Llama with mixers does not have")
    heads = given.get("n_heads") or given["dim"] // given["head_dim"]
    mixers = [mixers_of(state, layer, mixing) for layer in range(given["n_layers"])]
    groups = [
        {"layers": [layer for layer, other in enumerate(mixers) if other == options]} | options
        for number, options in enumerate(mixers)
        if options and options not in mixers[:number]
    ]
    return LlamaConfig(
        vocab_size=len(state["tok_embeddings.weight"]), hidden_size=given["dim"],
        intermediate_size=len(state["layers.0.feed_forward.w1.weight"]), num_hidden_layers=given["n_layers"],
        num_attention_heads=heads, num_key_value_heads=given.get("n_kv_heads") or heads,
        head_dim=given.get("head_dim") or given["dim"] // heads, rms_norm_eps=given.get("norm_eps", 1e-5),
        rope_parameters={"rope_type": "default", "rope_theta": float(given.get("rope_theta", 10000.0))},
        max_position_embeddings=given.get("max_seqlen", 1024), tie_word_embeddings=bool(given.get("weight_tying")),
        bos_token_id=None, eos_token_id=None, mta=groups or {"layers": []},
    )  # fmt: skip


def mixers_of(state: dict[str, Tensor], layer: int, mixing: dict[str, Any]) -> dict[str, Any]:
    """The options of `MultiTokenAttention` that fit a layer's entries; none for plain attention."""

    def find(name: str) -> Tensor | None:
        return state.get(f"layers.{layer}.attention.{name}")

    before, after, kernel, gate = map(find, ("mta_kernel", "mta_kernel_after_sm", "head_kernel", "gate.weight"))
    has_norm = find("subln.weight") is not None
    options = {
        "pre_conv": None if before is None else list(before.shape[2:]),
        "pre_mix": find("wpsm.weight") is not None,
        "post_conv": None if after is None else list(after.shape[2:]),
        "post_mix": kernel.shape[1] if kernel is not None else "linear" if find("wposm.weight") is not None else False,
        "norm": has_norm,
        "gate": False if gate is None else "full" if len(gate) > 1 else True,
    }
    if not any(options.values()):
        return {}
    depth = "layer" if has_norm and mixing.get("layer_norm_rescale") else None
    return options | {"pad_key": mixing.get("pad_key", "both"), "depth": depth}


def llama_state(state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The entries by Llama's names, with queries and keys in its order."""
    found = {}
    for name, x in state.items():
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            part, _, end = rest.rpartition(".")
            if part in ("attention.wq", "attention.wk"):
                x = x.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            new = f"{NAMES[part]}.{end}" if part in NAMES else rest.replace("attention.", "self_attn.mta.", 1)
            found[f"model.layers.{layer}.{new}"] = x
        else:
            part, _, end = name.rpartition(".")
            if part not in WHOLE:
                raise ValueError(f"consolidated.pth has {name}, which a checkpoint of the original does not have")
            found[f"{WHOLE[part]}.{end}"] = x
    return found


if __name__ == "__main__":
    raise SystemExit(main())
