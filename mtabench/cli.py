"""The command line: parses, calls, prints. What a command needs is imported inside it, so that --help is quick."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mtabench.errors import MtabenchError

WRONG_RESULT = 4
RANGES = "512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies"

app = typer.Typer(
    help="Measure attention kernels so that the numbers can be trusted.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Text = str | None
Seq = Annotated[Text, typer.Option(help=f"Sequence lengths: {RANGES}.")]
HeadDim = Annotated[Text, typer.Option(help="Head dims, 16 to 256, such as 64,128.")]
Conv = Annotated[Text, typer.Option(help="Query taps x key taps, such as 6x11,3x3; 7 means 7x7.")]
Impl = Annotated[Text, typer.Option(help="Implementations, such as eager,triton; `mtabench list` shows all.")]
Batch = Annotated[Text, typer.Option(help="Batch sizes.")]
Tokens = Annotated[Text, typer.Option(help="Tokens in a batch, such as 16k: batch = tokens / seq.")]
Heads = Annotated[Text, typer.Option(help="Numbers of query heads.")]
KvHeads = Annotated[Text, typer.Option(help="Number of KV heads; divides --heads, and is the same if not given.")]
Dtype = Annotated[Text, typer.Option(help="One or more of fp16,bf16,fp32.")]
Causal = Annotated[bool, typer.Option("--causal/--no-causal", help="Whether a query sees only the past.")]
Splits = Annotated[str, typer.Option(help="Splits of the KV cache: auto, or such as auto,1..64.")]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
PresetName = Annotated[
    Text, typer.Option("--preset", help="Heads, head dim, conv and seq of mta-300m, mta-550m, mta-830m or mta-1b.")
]
Baseline = Annotated[Text, typer.Option(help="What speedups refer to; eager if it is measured.")]
Timer = Annotated[str, typer.Option(help="auto, events (CUDA events), graph (CUDA graph replay) or cpu.")]
Cache = Annotated[str, typer.Option(help="cold flushes the GPU's L2 cache before each sample, warm does not.")]
Rounds = Annotated[int | None, typer.Option(help="At most so many rounds of samples a cell.")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds after which no new round of a cell starts.")]
Out = Annotated[Path | None, typer.Option(help="The CSV file to write; mtabench-results/PASS-TIME.csv if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only the cells that --out does not have yet.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; no file is touched.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw charts next to the CSV file at the end.")]
CsvFiles = Annotated[list[Path], typer.Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[
    Path | None, typer.Option(help="The folder for the charts; NAME-charts beside NAME.csv if not given.")
]
Formats = Annotated[str, typer.Option(help="png, svg or both: png,svg.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure memory bandwidth and matmul rate as well.")]


@app.command()
def fwd(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    out: Out = None, resume: Resume = False, dry_run: DryRun = False, plot: Plot = True,
) -> None:  # fmt: skip
    """Time the forward pass."""
    _sweep("fwd", locals())


@app.command()
def bwd(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    out: Out = None, resume: Resume = False, dry_run: DryRun = False, plot: Plot = True,
) -> None:  # fmt: skip
    """Time the backward pass alone. All gradients are computed: of q, k, v and the convolution's weight."""
    _sweep("bwd", locals())


@app.command()
def decode(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    splits: Splits = "auto", device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    out: Out = None, resume: Resume = False, dry_run: DryRun = False, plot: Plot = True,
) -> None:  # fmt: skip
    """Time one decode step. Each sequence has one new query and a KV cache of --seq tokens."""
    _sweep("decode", locals())


@app.command()
def verify(impl: Impl = None, device: Device = "auto") -> None:
    """Check results, time nothing. Errors against float64, causality, and what else any correct kernel obeys."""
    from mtabench import commands

    _exit(commands.verify(impl, device))


@app.command("list")
def list_(device: Device = "auto") -> None:
    """Show what can be measured. Each implementation is ready on this machine, or the reason why not is given."""
    from mtabench import commands

    commands.list_implementations(device)


@app.command()
def env(measure: Measure = False, device: Device = "auto") -> None:
    """Show device and versions. With --measure also what the device can do at most."""
    from mtabench import commands

    commands.show_environment(device, measure)


@app.command()
def plot(csv: CsvFiles, out: PlotOut = None, formats: Formats = "png,svg") -> None:
    """Draw charts from results files."""
    from mtabench import commands

    commands.plot(csv, out, formats)


def _sweep(pass_: str, typed: dict[str, Any]) -> None:
    from mtabench import commands

    _exit(commands.sweep(pass_, typed, command_line=shlex.join(["mtabench", *sys.argv[1:]])))


def _exit(any_wrong: bool) -> None:
    if any_wrong:
        raise typer.Exit(WRONG_RESULT)


def main() -> None:
    """Run the command line; an error that a person can act on is one sentence on standard error."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="mtabench", standalone_mode=False)
    except MtabenchError as error:
        _fail(str(error), error.exit_code)
    except typer.Abort:
        _fail("stopped", 130)
    except Exception as error:
        # Typer's own usage errors: which class they are depends on its version, what they offer does not.
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message(), getattr(error, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"mtabench: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
