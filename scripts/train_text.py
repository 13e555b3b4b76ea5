"""Train a small language model by eager multi-token attention and by the fused kernels: the loss of every step.

    PYTHONPATH=.:kernels python3 scripts/train_text.py --out results/nvidia-h200/mta-text.csv

The text is this repository's own documents and sources, its tokens are their bytes. Layers are built as in the paper's
models (arXiv 2504.00927), with mixings of heads, norm and gate. Every fourth layer from the third on has both
convolutions as well. The rest is rotary positions, RMSNorm and gated networks. Every run has the same first weights and
the same batches, in bfloat16 by autocast on a GPU and in float32 on a CPU. A run called float32 is eager without
autocast: how far rounding alone takes a curve.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from text_task.chart import draw_chart
from text_task.model import Setting
from text_task.training import FLOAT32, MEASURED, make_model, read_text, train
from training_files import PLACE, write_results

import mtabench
from mta_kernels.multi_token_attention import BACKENDS
from mtabench.environment import describe, resolve_device
from mtabench.errors import UsageError

SIZES = {
    "cuda": {"steps": 150, "seq": 1024, "batch": 8, "layers": 4, "dim": 512, "heads": 8},
    "cpu": {"steps": 40, "seq": 64, "batch": 4, "layers": 4, "dim": 64, "heads": 4},
}
HELP = {
    "steps": "training steps",
    "seq": "bytes of a sequence",
    "batch": "sequences of a step",
    "layers": "layers, every fourth of which from the third on convolves",
    "dim": "width of the model, a multiple of twice the heads",
    "heads": "heads of attention",
}
RUNS = (*BACKENDS, FLOAT32)
COLUMNS = ("backend", *(field.name for field in fields(Setting)), *MEASURED, *PLACE)


def main() -> int:
    """Train, print, and write the table and its chart if `--out` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="reference,triton", help=f"runs, of {','.join(RUNS)}")
    for name, what in HELP.items():
        gpu, cpu = SIZES["cuda"][name], SIZES["cpu"][name]
        parser.add_argument(f"--{name}", type=int, help=f"{what}; {gpu} on a GPU and {cpu} on a CPU if not given")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="its largest; %(default)s if not given")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument("--out", type=Path, help="the CSV file to write; its charts go beside it")
    options = parser.parse_args()
    try:
        device, runs, setting = checked(options)
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    rows = run_all(setting, runs, device)
    if options.out:
        write_results(options.out, COLUMNS, rows, draw_chart)
    return 0


def checked(options: argparse.Namespace) -> tuple[str, list[str], Setting]:
    """Device, runs and setting of the options; raises UsageError or ValueError for what cannot run."""
    device = resolve_device(options.device)
    runs = list(dict.fromkeys(options.backends.split(",")))
    for run in runs:
        if run not in RUNS:
            raise UsageError(f"there is no backend {run!r}; expected some of {','.join(RUNS)}")
    typed = {name: getattr(options, name) for name in HELP}
    sizes = {name: SIZES[device][name] if value is None else value for name, value in typed.items()}
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"--{name} is {value}; expected at least 1")
    if sizes["dim"] % (2 * sizes["heads"]):
        raise UsageError(f"--dim is {sizes['dim']}; expected a multiple of {2 * sizes['heads']}, twice the heads")
    if options.out and options.out.exists():
        raise UsageError(f"{options.out} already exists; give another --out")
    setting = Setting(seed=options.seed, learning_rate=options.learning_rate, **sizes)
    for run in runs:
        make_model(setting, run, device)  # raises before anything is trained
    return device, runs, setting


def run_all(setting: Setting, runs: list[str], device: str) -> list[dict[str, Any]]:
    """The rows of each run, a step a row; a line on the terminal for a tenth of the steps."""
    text, facts = read_text(Path(mtabench.__file__).parents[1]), describe(device)
    where = {name: facts[name] for name in PLACE}
    rows = []
    for run in runs:
        for measured in train(setting, run, text, device):
            rows.append({"backend": run} | asdict(setting) | measured | where)
            step = measured["step"]
            if step % max(1, setting.steps // 10) == 0 or step == setting.steps - 1:
                print(f"{run}  step {step}  loss {measured['loss']:.4f}  {measured['seconds']:.1f} s", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
