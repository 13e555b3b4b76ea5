"""Train a small transformer on the toy task of Multi-Token Attention, with conv attention and with plain attention.

`--attention mta,mta-eager` trains all parts of multi-token attention in every layer: the fused kernels, where they run,
and the eager reference. Both have the same weights and sequences.

A sequence holds blocks of letters and a query of two letters; one block alone has both, in any order. The answer is
that block, or its first or last letter. Plain attention scores one query token against one key token. Conv attention
adds up the scores of both letters of the query over the letters of a block.

From the paper (arXiv 2504.00927) and its code (facebookresearch/RAM, projects/mta): 26 letters, 52 blocks of 5
different ones, queries of 2, a mark between blocks and another before the query. Batches of 64. 4 layers of width 256
with 2 heads, rotary positions, gated networks of width 768, embeddings tied to the output. Weights drawn with a
standard deviation of one over the root of their inputs. Convolutions of 2 x 9 taps in all layers that start as the
identity. Adam with beta2 0.98, a loss on the answer alone, wrong answers counted over 3 seeds. Ours: fresh sequences in
every step (there a million, seen 6.4 times) and so no dropout; 18000 steps (there 100000); a learning rate that rises
to 5e-4 and falls to zero (there 1e-4, constant), three times higher for the convolutions' weights; no tokens for begin
and end; without a GPU a smaller task and model.

Its code's README gives the errors of its three seeds, with the whole block as the answer, in %:

    conv attention    H100:  0.0   0.0  0.2    H200:  0.1   0.0   0.1
    plain attention   H100: 77.7  75.3  1.9    H200: 83.9  83.1  37.6

So plain attention can come near, with luck and many steps; here both get the same number, and the same sequences.
"""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from toy_task.chart import ATTENTIONS, draw_chart
from toy_task.sequences import ANSWERS, Setting
from toy_task.training import MEASURED, train

from mta_kernels import torch_compile
from mtabench.environment import describe, resolve_device
from mtabench.errors import MtabenchError, UsageError
from mtabench.problem.axes import parse_names

# What learns in minutes.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"blocks": 52, "width": 256, "heads": 2, "layers": 4, "batch": 64, "steps": 18000, "learning_rate": 5e-4},
    "cpu": {"blocks": 10, "width": 128, "heads": 2, "layers": 3, "batch": 64, "steps": 1000, "learning_rate": 2e-3},
}
PLACE = ("device", "torch", "triton", "git_sha", "git_dirty")
COLUMNS = (*(field.name for field in fields(Setting)), *MEASURED, *PLACE, "command")


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise UsageError for a name that is not known."""
    if name not in known:
        raise UsageError(f"there is no {what} {name!r}; expected {' or '.join(known)}")


def prepare_output(folder: Path, variant: str) -> Path:
    """The CSV file to write in `folder`, which is made; raises UsageError if that cannot be or the file exists."""
    path = folder / f"toy-{variant}.csv"
    if path.exists():
        raise UsageError(f"{path} exists; give another folder with --output, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; give another --output") from error
    return path


app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def size(name: str, what: str) -> Any:
    """An option whose default depends on the device."""
    gpu, cpu = SIZES["cuda"][name], SIZES["cpu"][name]
    return typer.Option(min=1, help=f"{what}; {gpu} on a GPU and {cpu} on a CPU if not given.")


@app.command()
def run(
    attention: Annotated[str, typer.Option(help="Models to train, of conv,plain,mta,mta-eager.")] = "conv,plain",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each model, from 0 on.")] = 3,
    variant: Annotated[str, typer.Option(help="The answer: all letters of the block, first or last.")] = "all",
    blocks: Annotated[int | None, size("blocks", "Blocks in a sequence")] = None,
    batch: Annotated[int | None, size("batch", "Sequences in a step")] = None,
    steps: Annotated[int | None, size("steps", "Training steps")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the CSV file and charts.")] = None,
) -> None:
    """Train a small transformer on the toy task of Multi-Token Attention, with conv and with plain attention.

    Writes a CSV file with the error rate on held-out sequences, and a chart of it, anew after each run.
    """
    typed = locals()
    device = resolve_device(device)
    if device == "cuda" and (lack := torch_compile.missing(device)):
        raise UsageError(lack)
    sizes = {name: value if typed.get(name) is None else typed[name] for name, value in SIZES[device].items()}
    names = parse_names(attention, "--attention")
    for name in names:
        check_name("attention", name, ATTENTIONS)
    check_name("variant", variant, ANSWERS)
    settings = [Setting(name, seed, variant, **sizes) for seed in range(seeds) for name in names]
    folder = output or Path("mtabench-results") / f"toy-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    run_all(settings, device, prepare_output(folder, variant))


def run_all(settings: list[Setting], device: str, path: Path) -> None:
    """Train each setting: a row in the file for each evaluation, a line and a new chart for each run."""
    where = {name: value for name, value in describe(device).items() if name in PLACE}
    where["command"] = shlex.join(["python", *sys.argv])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with path.open("w", newline="") as file, Progress(*columns, console=Console(soft_wrap=True)) as progress:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        bar = progress.add_task("", total=sum(setting.steps for setting in settings))
        for index, setting in enumerate(settings):
            title = f"{setting.attention} attention, seed {setting.seed}"
            progress.update(bar, description=title)
            for measured in train(setting, device):
                writer.writerow(asdict(setting) | measured | where)
                file.flush()
                shown = f"{measured['error_rate']:.1%} wrong, loss {measured['train_loss']:.3f}"
                done = index * setting.steps + measured["step"]
                progress.update(bar, completed=done, description=f"{title}: {shown}")
            progress.console.print(f"{title}: {shown}, {measured['seconds']:.0f} s")
            charts = draw_chart(path)
    for written in (path, *charts):
        print(written)


def main() -> None:
    """Run the command line; an error that a person can act on is one sentence on standard error."""
    try:
        code = app(sys.argv[1:], prog_name="train_toy.py", standalone_mode=False)
    except MtabenchError as error:
        fail(str(error), error.exit_code)
    except typer.Abort:
        fail("stopped", 130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # Typer's own usage errors have it
            raise
        fail(error.format_message(), 2)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> NoReturn:
    """End the process with one sentence."""
    print(f"train_toy.py: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
