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
Splits = Annotated[
    str, typer.Option(help="Splits of the keys, for kernels that split them: auto, numbers up to 128, or auto,1..128.")
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
PresetName = Annotated[
    Text, typer.Option("--preset", help="Heads, head dim, conv and seq of mta-300m, mta-550m, mta-830m or mta-1b.")
]
Baseline = Annotated[Text, typer.Option(help="What speedups refer to; eager if it is measured.")]
Timer = Annotated[str, typer.Option(help="auto, events (CUDA events), graph (CUDA graph replay) or cpu.")]
Cache = Annotated[str, typer.Option(help="cold flushes the GPU's L2 cache before each sample, warm does not.")]
Rounds = Annotated[int | None, typer.Option(help="At most so many rounds of samples a cell.")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds after which no new round of a cell starts.")]
Isolate = Annotated[
    bool, typer.Option("--isolate", help="Measure each cell in a fresh process; a crash costs one cell.")
]
CellTimeout = Annotated[
    float | None,
    typer.Option(help="With --isolate: seconds after which a cell's process is stopped; 600 if not given."),
]
Out = Annotated[Path | None, typer.Option(help="The CSV file to write; mtabench-results/PASS-TIME.csv if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only the cells that --out does not have yet.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; no file is touched.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw charts next to the CSV file at the end.")]
CsvFiles = Annotated[list[Path], typer.Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[
    Path | None, typer.Option(help="The folder for the charts; NAME-charts beside NAME.csv if not given.")
]
Formats = Annotated[str, typer.Option(help="png, svg or both: png,svg.")]
Passes = Annotated[str, typer.Option("--pass", help="One or more of fwd,bwd,decode.")]
TunedOut = Annotated[
    Path | None, typer.Option(help="The JSON file to add to; the one in your cache that kernels read if not given.")
]
BaseCsv = Annotated[Path, typer.Argument(help="Results of the code before.", metavar="BASE.csv")]
HeadCsv = Annotated[Path, typer.Argument(help="Results of the code after, on the same device.", metavar="HEAD.csv")]
Threshold = Annotated[str, typer.Option(help="The smallest change that counts, such as 1% or 5%.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 3 if it is unclear whether a cell changed.")]
CompareFormat = Annotated[str, typer.Option("--format", help="What to print: table or markdown.")]
MarkdownOut = Annotated[Path | None, typer.Option("--markdown", help="Write the comparison as Markdown.")]
JunitOut = Annotated[Path | None, typer.Option("--junit", help="Write the comparison as JUnit XML.")]
GithubOut = Annotated[
    Path | None, typer.Option("--github-action-benchmark", help="Write HEAD's times as customSmallerIsBetter JSON.")
]
BencherOut = Annotated[Path | None, typer.Option("--bencher", help="Write HEAD's times in Bencher's JSON (BMF).")]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure memory bandwidth and matmul rate as well, and keep them for sweeps.")
]
CeilingsOut = Annotated[
    Path | None, typer.Option(help="Where ceilings are kept; mtabench-results/ceilings.json if not given.")
]


@app.command()
def fwd(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
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
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
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
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
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
def env(measure: Measure = False, device: Device = "auto", out: CeilingsOut = None) -> None:
    """Show device and versions, and what the device can do at most if that was measured."""
    from mtabench import commands

    commands.show_environment(device, measure, out)


@app.command()
def tune(
    passes: Passes = "fwd,bwd,decode", seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None,
    batch: Batch = None, tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, preset: PresetName = None, out: TunedOut = None,
) -> None:  # fmt: skip
    """Choose the Triton kernels' tile sizes by timing. Kernels look the choice up from then on; no call tunes."""
    typed = locals()
    from mtabench.tune import tune_shapes

    _exit(tune_shapes(**typed))


@app.command()
def plot(csv: CsvFiles, out: PlotOut = None, formats: Formats = "png,svg") -> None:
    """Draw charts from results files."""
    from mtabench import commands

    commands.plot(csv, out, formats)


@app.command()
def compare(
    base: BaseCsv, head: HeadCsv, threshold: Threshold = "2%", strict: Strict = False,
    format_: CompareFormat = "table", markdown: MarkdownOut = None, junit: JunitOut = None,
    github_action_benchmark: GithubOut = None, bencher: BencherOut = None,
) -> None:  # fmt: skip
    """Compare two runs of the same cells. Exits with 1 if one got slower or broke, so that CI can be gated on it."""
    from mtabench.compare_command import compare_files

    outputs = {
        "markdown": markdown,
        "junit": junit,
        "github_action_benchmark": github_action_benchmark,
        "bencher": bencher,
    }
    raise typer.Exit(compare_files(base, head, threshold, strict, format_, outputs))


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
