"""The model that is retrofitted: a small one of bytes that is trained first, or a Hugging Face checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtabench.errors import UsageError
from mtabench.problem.layers import convolves

BYTES = 256
WIDENING = 3  # of the gated networks over the width of the small model
PARTS: dict[str, dict[str, Any]] = {
    "conv": {"pre_conv": (6, 11)},
    "all": {"pre_conv": (6, 11), "pre_mix": True, "post_conv": (6, 11), "post_mix": True},
}  # each starts as the identity, which a norm or a gate would not


@dataclass(frozen=True)
class Setting:
    """A model, what is put into which of its layers, and how it is trained; `seq` in tokens."""

    seed: int
    model: str
    parts: str
    every: int
    layers: int
    dim: int
    heads: int
    seq: int
    batch: int
    pretrain_steps: int
    steps: int
    learning_rate: float

    @property
    def changed_layers(self) -> list[int]:
        """Indices of the layers that get multi-token attention: of four the third, as in the paper's models."""
        return [layer for layer in range(self.layers) if convolves(layer, self.every)]


def make_model(setting: Setting) -> Any:
    """The small model of a seed, with PyTorch's attention, before any training: bytes to logits of the next byte."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(setting.seed)
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=setting.dim, intermediate_size=WIDENING * setting.dim,
        num_hidden_layers=setting.layers, num_attention_heads=setting.heads, num_key_value_heads=setting.heads,
        max_position_embeddings=setting.seq, initializer_range=setting.dim**-0.5, tie_word_embeddings=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def load_model(path: Path) -> Any:
    """The model of a checkpoint's folder, in float32; raises UsageError if transformers cannot load it."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load --model {path}: {first_line(error)}") from error


def tokens_of(path: Path, text: bytes) -> Tensor:
    """The tokens `[N]` of a text by a checkpoint's tokenizer; raises UsageError if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot load the tokenizer of --model {path}: {first_line(error)}") from error
    return torch.tensor(tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"])


def retrofit(model: Any, setting: Setting) -> Any:
    """A copy of the model with multi-token attention, the identity at first, in some of its layers."""
    from mta_kernels.integrations.transformers import add_multi_token_attention

    changed = copy.deepcopy(model)
    add_multi_token_attention(changed, layers=setting.changed_layers, **PARTS[setting.parts])
    return changed


def first_line(error: Exception) -> str:
    """What an error says, without its advice."""
    return str(error).strip().partition("\n")[0]
