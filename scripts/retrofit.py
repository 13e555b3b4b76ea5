"""Put multi-token attention into a trained model, train on, and compare with the same model trained on without it.

    PYTHONPATH=.:kernels python3 scripts/retrofit.py --out results/nvidia-h200/retrofit.csv

The paper (arXiv 2504.00927) calls it continual training. Convolutions and mixings start as the identity, so the loss at
first is the trained model's. The script ends with an error if it is not. Then both models take the same steps on the
same batches. The model is a small one of bytes, trained here first with plain attention. With --model it is a Hugging
Face checkpoint like Llama; --pretrain-steps and the sizes then do not apply. The text is this repository's own
documents and sources unless --text gives another. Numbers are bfloat16 by autocast on a GPU and float32 on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from retrofit_task.chart import draw_chart
from retrofit_task.models import PARTS, Setting, load_model, make_model, retrofit, tokens_of
from retrofit_task.training import MEASURED, split, train
from text_task.training import draw_batches, read_text
from torch import Tensor
from training_files import PLACE, write_results

import mtabench
from mtabench.environment import describe, resolve_device
from mtabench.errors import MtabenchError, UsageError

SIZES = {
    "cuda": {
        "seeds": 3, "pretrain_steps": 1500, "steps": 600, "seq": 1024, "batch": 16, "layers": 8, "dim": 256, "heads": 4
    },
    "cpu": {
        "seeds": 1, "pretrain_steps": 200, "steps": 60, "seq": 64, "batch": 4, "layers": 4, "dim": 64, "heads": 4
    },
}  # fmt: skip
HELP = {
    "seeds": "runs, with seeds from 0 on",
    "pretrain_steps": "steps of the small model with plain attention",
    "steps": "steps of both models after that",
    "seq": "tokens of a piece",
    "batch": "pieces of a step",
    "layers": "layers of the small model",
    "dim": "its width, a multiple of twice the heads",
    "heads": "its heads of attention",
}
OF_THE_SMALL_MODEL = ("pretrain_steps", "layers", "dim", "heads")
SAME = {"cpu": 1e-4, "cuda": 5e-3}  # how far rounding may take the loss before the first step
COLUMNS = ("phase", "attention", *(field.name for field in fields(Setting)), *MEASURED, *PLACE)


def main() -> int:
    """Train, print, and write the table and its chart if `--out` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the folder of a Hugging Face checkpoint with its tokenizer")
    parser.add_argument("--text", type=Path, help="the text to train on, a file")
    parser.add_argument(
        "--parts", default="conv", help="conv, or all that start as the identity; %(default)s if not given"
    )
    parser.add_argument("--every", type=int, default=4, help="put it into every nth layer; %(default)s if not given")
    for name, what in HELP.items():
        gpu, cpu = SIZES["cuda"][name], SIZES["cpu"][name]
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"{what}; {gpu} on a GPU and {cpu} on a CPU if not given")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="its largest; %(default)s if not given")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--out", type=Path, help="the CSV file to write; its charts go beside it")
    options = parser.parse_args()
    try:
        run(options)
    except UsageError as error:
        parser.error(str(error))
    except MtabenchError as error:
        print(f"retrofit.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    """Check the options, train every seed, and write what `--out` asks for."""
    if find_spec("transformers") is None:
        raise UsageError("transformers is not installed; pip install '.[transformers]'")
    device = resolve_device(options.device)
    loaded = None if options.model is None else load_model(options.model)
    setting, seeds = checked(options, device, loaded)
    text = tokens(options)
    split(text, setting.seq)  # raises before anything is trained
    facts = describe(device)
    where = {name: facts[name] for name in PLACE}

    def rows() -> Iterator[dict[str, Any]]:
        for seed in range(seeds):
            own = replace(setting, seed=seed)
            for row in run_seed(own, loaded, text, device):
                print(
                    f"seed {seed}  {row['phase']}  {row['attention']}  step {row['step']}  "
                    f"held-out loss {row['held_out_loss']:.4f}  {row['seconds']:.1f} s", flush=True,
                )  # fmt: skip
                yield row | asdict(own) | where

    if options.out:
        write_results(options.out, COLUMNS, rows(), draw_chart)
    else:
        list(rows())


def checked(options: argparse.Namespace, device: str, loaded: Any) -> tuple[Setting, int]:
    """The setting of the first seed and the number of seeds; raises UsageError for what cannot run."""
    typed = {name: getattr(options, name) for name in HELP}
    sizes = {name: SIZES[device][name] if value is None else value for name, value in typed.items()}
    if loaded is not None:
        for name in OF_THE_SMALL_MODEL:
            if typed[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} is of the small model; leave it out, or --model")
        config = loaded.config
        own = (0, config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
        sizes |= dict(zip(OF_THE_SMALL_MODEL, own, strict=True))
    for name, value in (*sizes.items(), ("every", options.every)):
        if value < 1 and name != "pretrain_steps":
            raise UsageError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    if loaded is None and sizes["dim"] % (2 * sizes["heads"]):
        raise UsageError(f"--dim is {sizes['dim']}; expected a multiple of {2 * sizes['heads']}, twice the heads")
    if options.parts not in PARTS:
        raise UsageError(f"there is no --parts {options.parts!r}; expected {' or '.join(PARTS)}")
    if options.out and options.out.exists():
        raise UsageError(f"{options.out} already exists; give another --out")
    seeds = sizes.pop("seeds")
    model = "small" if options.model is None else options.model.name
    setting = Setting(
        seed=0, model=model, parts=options.parts, every=options.every, learning_rate=options.learning_rate, **sizes
    )  # fmt: skip
    if not setting.changed_layers:
        raise UsageError(f"--every {setting.every} leaves out all {setting.layers} layers; give a smaller one")
    return setting, seeds


def tokens(options: argparse.Namespace) -> Tensor:
    """The text as tokens `[N]`: bytes for the small model, else tokens of the checkpoint's tokenizer."""
    try:
        given = None if options.text is None else options.text.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read --text {options.text}: {error.strerror}") from error
    if given is None:
        read = read_text(Path(mtabench.__file__).parents[1])
        if options.model is None:
            return read
        given = bytes(read.numpy())
    if options.model is not None:
        return tokens_of(options.model, given)
    return torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else torch.empty(0, dtype=torch.uint8)


def run_seed(setting: Setting, loaded: Any, text: Tensor, device: str) -> Iterator[dict[str, Any]]:
    """The rows of a seed: the small model's training, then both models, one after the other, on the same batches."""
    to_train, held_out = split(text, setting.seq)
    given: dict[str, Any] = {"held_out": held_out, "device": device, "learning_rate": setting.learning_rate}
    model = (make_model(setting) if loaded is None else loaded).to(device)
    if loaded is None:
        batches = draw_batches(to_train, replace(setting, seed=2 * setting.seed))
        for row in train(model, batches, steps=setting.pretrain_steps, **given):
            yield {"phase": "pretrain", "attention": "plain"} | row
    at_first: dict[str, float] = {}
    for attention in ("plain", "mta"):
        continued = copy.deepcopy(model) if attention == "plain" else retrofit(model, setting)
        batches = draw_batches(to_train, replace(setting, seed=2 * setting.seed + 1))
        for row in train(continued, batches, steps=setting.steps, **given):
            at_first.setdefault(attention, row["held_out_loss"])
            check_same(at_first, device)
            yield {"phase": "finetune", "attention": attention} | row


def check_same(losses: dict[str, float], device: str) -> None:
    """Raise MtabenchError if the models' losses before the first step differ by more than rounding."""
    if max(losses.values()) - min(losses.values()) > SAME[device]:
        text = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        raise MtabenchError(f"before the first step the losses differ ({text}): what was put in is not the identity")


if __name__ == "__main__":
    sys.exit(main())
