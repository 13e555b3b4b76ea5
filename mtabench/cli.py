"""The command line: parses, calls, prints. What a command needs is imported inside it, so that --help is quick."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mtabench.errors import MtabenchError, UsageError
from mtabench.sweeps.case import PASSES

WRONG_RESULT = 4
RANGES = "512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies"

app = typer.Typer(
    help="Measure attention kernels so that the numbers can be trusted.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

results_app = typer.Typer(help="Make results files of other ones.", rich_markup_mode=None)
app.add_typer(results_app, name="results")

Text = str | None
Seq = Annotated[Text, typer.Option(help=f"Sequence lengths: {RANGES}.")]
HeadDim = Annotated[Text, typer.Option(help="Head dims, 16 to 256, such as 64,128.")]
Conv = Annotated[Text, typer.Option(help="Query taps x key taps, such as 6x11,3x3; 7 means 7x7.")]
Impl = Annotated[
    Text, typer.Option(help="Implementations, such as eager,triton, or ladder; `mtabench list` shows all.")
]
Op = Annotated[Text, typer.Option(help="Only implementations of conv-attention, or of plain attention.")]
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
Timer = Annotated[
    str, typer.Option(help="auto, events (CUDA events), graph (CUDA graph replay), cpu or nvbench (NVIDIA's, a check).")
]
Cache = Annotated[str, typer.Option(help="cold flushes the GPU's L2 cache before each sample, warm does not.")]
Rounds = Annotated[int | None, typer.Option(help="At most so many rounds of samples a cell.")]
TimeLimit = Annotated[float | None, typer.Option(help="Seconds after which no new round of a cell starts.")]
Isolate = Annotated[
    bool, typer.Option("--isolate", help="Measure each cell in a fresh process; a crash costs one cell.")
]
Gpus = Annotated[
    Text, typer.Option(help="Spread the sweep over GPUs of this machine: all, or numbers such as 0,2. Needs [cluster].")
]
Workers = Annotated[
    int | None, typer.Option(help="With --device cpu: so many processes, each on its share of the cores.")
]
Scheduler = Annotated[
    Text, typer.Option(help="Spread the sweep over a Dask cluster that is there: tls://HOST:PORT; docs/cluster.md.")
]
On = Annotated[
    Text, typer.Option(help="With --gpus or --scheduler: only GPUs whose name has this in it, such as H200.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="With --scheduler: the PEM file of the authority; Dask's configuration if not given."),
]
TlsCert = Annotated[Path | None, typer.Option(help="With --scheduler: the PEM file of this side's certificate.")]
TlsKey = Annotated[Path | None, typer.Option(help="With --scheduler: the PEM file of the certificate's key.")]
Ranks = Annotated[
    int | None,
    typer.Option(help="Share each sequence over so many GPUs of this machine, and compare with one of them."),
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
ChartKinds = Annotated[
    Text,
    typer.Option(
        help="One or more of time, speedup, heatmap-conv, heatmap-head-dim, roofline, bandwidth, memory, error, splits "
        "and ladder; all that the results can give if not given."
    ),
]
Themes = Annotated[str, typer.Option(help="light, dark or both: light,dark. A dark chart is called NAME-dark.")]
Formats = Annotated[str, typer.Option(help="png, svg or both: png,svg.")]
Passes = Annotated[str, typer.Option("--pass", help="One or more of fwd,bwd,decode.")]
TunedOut = Annotated[
    Path | None, typer.Option(help="The JSON file to add to; the one in your cache that kernels read if not given.")
]
PassName = Annotated[str, typer.Argument(help="fwd, bwd or decode.", metavar="PASS")]
ProfiledPass = Annotated[Text, typer.Argument(help="fwd, bwd or decode.", metavar="[PASS]")]
Tools = Annotated[
    Text, typer.Option(help="Profilers, one or more of trace,proton,ncu; those that can be had here if not given.")
]
ProfileOut = Annotated[
    Path | None, typer.Option(help="The folder to write; mtabench-results/profile-PASS-TIME if not given.")
]
NcuReport = Annotated[
    Path | None, typer.Option(help="Instead of measuring, read a saved `ncu --import REPORT --csv --page raw`.")
]
DeviceName = Annotated[Text, typer.Option(help="The GPU to predict for, such as h200; this machine's if not given.")]
ResultsCsv = Annotated[
    list[Path] | None, typer.Option("--results", help="A results file: its times stand beside the predicted ones.")
]
CeilingsIn = Annotated[
    Path | None, typer.Option(help="Ceilings measured on that GPU; mtabench-results/ceilings.json if it is there.")
]
ProfileIn = Annotated[
    list[Path] | None,
    typer.Option("--profile", help="A folder of `mtabench profile`: bytes that Nsight Compute counted stand beside."),
]
RooflineOut = Annotated[Path | None, typer.Option(help="A CSV file to write besides.")]
RunCsv = Annotated[Path, typer.Argument(help="A results file of mtabench.", metavar="RUN.csv")]
ReportOut = Annotated[Path | None, typer.Option(help="The HTML page; NAME-report.html beside NAME.csv if not given.")]
ReportMarkdown = Annotated[
    Path | None, typer.Option("--markdown", help="The same as Markdown; NAME-report.md beside NAME.csv if not given.")
]
ReportForce = Annotated[bool, typer.Option("--force", help="Replace files that are there and are no report.")]
ResultsFolder = Annotated[
    Path, typer.Argument(help="A folder of results files; those below it count.", metavar="RESULTS")
]
SiteOut = Annotated[Path, typer.Option("--out", "-o", help="The folder to write: a new one, or an earlier dashboard.")]
RepoUrl = Annotated[Text, typer.Option(help="The repository, for links to commits, such as https://github.com/me/it.")]
Title = Annotated[Text, typer.Option(help="What the page is called.")]
Days = Annotated[int, typer.Option(help="Changes of so many days before the last run are news.")]
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
CsvFile = Annotated[Path, typer.Argument(help="A results file of mtabench.", metavar="CSV")]
Where = Annotated[
    list[str] | None,
    typer.Option(help="Only rows such as impl=triton,eager,seq=1k..4k,status!=ok; * stands for any text."),
]
Sort = Annotated[Text, typer.Option(help="Columns to sort by, such as seq,-speedup; - puts the largest first.")]
ExportOut = Annotated[
    Path | None, typer.Option(help="The file to write: .md, .tex, .parquet or .csv (for spreadsheets).")
]
ExportFormat = Annotated[Text, typer.Option("--format", help="What to print without --out: markdown or latex.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out if it is there.")]
NewCsv = Annotated[Path, typer.Option("--out", help="The results file to write; samples go beside it.")]
Latest = Annotated[
    bool, typer.Option("--latest", help="Of a cell that several files have, take the row that started last.")
]
RerunUnclear = Annotated[
    bool,
    typer.Option("--rerun-unclear", help="Measure unclear cells again in pairs of both revisions, at most twice."),
]
SweepArguments = Annotated[
    list[str], typer.Argument(help="fwd, bwd or decode, and after it any options of that sweep.", metavar="PASS")
]
BaseRevision = Annotated[str, typer.Option("--base", help="The code before: a branch, a tag or a commit.")]
HeadRevision = Annotated[Text, typer.Option("--head", help="The code after; the working tree as it is if not given.")]
Pairs = Annotated[int, typer.Option(help="Pairs of processes, one of each side, that take turns.")]
FolderOut = Annotated[
    Path | None, typer.Option("--out", help="The new folder for the results; mtabench-results/ab-TIME if not given.")
]
NoiseOut = Annotated[
    Path | None, typer.Option("--out", help="The CSV file to write; mtabench-results/noise-TIME.csv if not given.")
]
NoiseResume = Annotated[bool, typer.Option("--resume", help="Keep the processes that ended, and measure the others.")]
Targets = Annotated[
    Text, typer.Option("--target", help="Compute capabilities, such as sm_90,sm_100, or all; needs none of these GPUs.")
]
KernelNames = Annotated[Text, typer.Option("--kernel", help="Only kernels whose names hold one of these: fwd,decode.")]
IfCausal = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Whether a query sees only the past.")]
AllShapes = Annotated[
    bool, typer.Option("--all-shapes", help="Every shape that takes a path of its own through the kernels.")
]
Sass = Annotated[
    bool | None, typer.Option("--sass/--no-sass", help="Disassemble, for the instruction mix; not with --baseline.")
]
StaticBaseline = Annotated[
    Path | None, typer.Option("--baseline", help="Compare with a file of --json; exit with 1 if a kernel got worse.")
]
Accept = Annotated[bool, typer.Option("--accept", help="With --baseline: write what is compiled now into that file.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Write the kernels as JSON; also makes a baseline.")]
CsvOut = Annotated[Path | None, typer.Option("--csv", help="Write the kernels as CSV.")]
MemoryPass = Annotated[str, typer.Option("--pass", help="fwd, bwd or decode.")]
MemorySize = Annotated[Text, typer.Option(help="Memory to fit into, such as 80GB or 24GiB; the device's if not given.")]
MemoryOf = Annotated[Text, typer.Option(help="The GPU that is meant, such as h200; this machine's if not given.")]
Trace = Annotated[
    bool, typer.Option("--measure", help="Call each cell on this machine's GPU and trace its peak, beside the model's.")
]
CellsCsv = Annotated[Path | None, typer.Option("--csv", help="Write a row a cell as CSV.")]
CellsJson = Annotated[Path | None, typer.Option("--json", help="Write a row a cell as JSON.")]
OverwriteFiles = Annotated[bool, typer.Option("--overwrite", help="Replace the files of --csv and --json.")]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure memory bandwidth and matmul rate as well, and keep them for sweeps.")
]
CeilingsOut = Annotated[
    Path | None, typer.Option(help="Where ceilings are kept; mtabench-results/ceilings.json if not given.")
]


@app.command()
def fwd(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, op: Op = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
    gpus: Gpus = None, workers: Workers = None, scheduler: Scheduler = None, on: On = None, tls_ca: TlsCa = None,
    tls_cert: TlsCert = None, tls_key: TlsKey = None, ranks: Ranks = None,
    out: Out = None, resume: Resume = False, dry_run: DryRun = False, plot: Plot = True,
) -> None:  # fmt: skip
    """Time the forward pass."""
    _sweep("fwd", locals())


@app.command()
def bwd(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, op: Op = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
    gpus: Gpus = None, workers: Workers = None, scheduler: Scheduler = None, on: On = None, tls_ca: TlsCa = None,
    tls_cert: TlsCert = None, tls_key: TlsKey = None, ranks: Ranks = None,
    out: Out = None, resume: Resume = False, dry_run: DryRun = False, plot: Plot = True,
) -> None:  # fmt: skip
    """Time the backward pass alone. All gradients are computed: of q, k, v and the convolution's weight."""
    _sweep("bwd", locals())


@app.command()
def decode(
    seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None, op: Op = None, batch: Batch = None,
    tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    splits: Splits = "auto", device: Device = "auto", preset: PresetName = None, baseline: Baseline = None,
    timer: Timer = "auto", cache: Cache = "cold", rounds: Rounds = None, time_limit: TimeLimit = None,
    isolate: Isolate = False, cell_timeout: CellTimeout = None,
    gpus: Gpus = None, workers: Workers = None, scheduler: Scheduler = None, on: On = None, tls_ca: TlsCa = None,
    tls_cert: TlsCert = None, tls_key: TlsKey = None,
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
    from mtabench.sweeps.tune import tune_shapes

    _exit(tune_shapes(**typed))


@app.command()
def profile(
    pass_: ProfiledPass = None, seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None,
    batch: Batch = None, tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, splits: Splits = "auto", device: Device = "auto", preset: PresetName = None,
    tools: Tools = None, out: ProfileOut = None, ncu_report: NcuReport = None,
) -> None:  # fmt: skip
    """Say why kernels are as fast as they are: traces, times of kernels, hardware counters, and what bounds each."""
    typed = locals()
    from mtabench.profiling.command import profile_cells

    _exit(profile_cells(**typed))


@app.command()
def explain(
    pass_: PassName, seq: Seq = None, head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None,
    batch: Batch = None, tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None, dtype: Dtype = None,
    causal: Causal = True, splits: Splits = "auto", preset: PresetName = None, device_name: DeviceName = None,
    results: ResultsCsv = None, ceilings: CeilingsIn = None,
) -> None:  # fmt: skip
    """Predict the time of cells and say what it is made of. Needs no GPU if one is named; measures nothing."""
    typed = locals()
    from mtabench.explain_command import explain_cells

    explain_cells(**typed | {"results": results or []})


@app.command()
def memory(
    pass_: MemoryPass = "fwd", seq: Seq = "1k..128k", head_dim: HeadDim = None, conv: Conv = None, impl: Impl = None,
    op: Op = None, batch: Batch = None, tokens: Tokens = None, heads: Heads = None, kv_heads: KvHeads = None,
    dtype: Dtype = None, causal: Causal = True, splits: Splits = "auto", preset: PresetName = None,
    device_name: MemoryOf = None, memory: MemorySize = None, measure: Trace = False, csv: CellsCsv = None,
    json: CellsJson = None, overwrite: OverwriteFiles = False,
) -> None:  # fmt: skip
    """Say what implementations store and move: score matrix against tile, traffic, and where memory ends."""
    typed = locals()
    from mtabench.memory_command import show_memory

    show_memory(**typed)


@app.command("inspect")
def inspect_(
    target: Targets = None, kernel: KernelNames = None, head_dim: HeadDim = None, conv: Conv = None,
    dtype: Dtype = None, seq: Seq = None, causal: IfCausal = None, all_shapes: AllShapes = False, sass: Sass = None,
    baseline: StaticBaseline = None, accept: Accept = False, json: JsonOut = None, csv: CsvOut = None,
) -> None:  # fmt: skip
    """Compile the kernels for GPUs that are not there. Shows registers, spills, occupancy and what limits it, SASS."""
    from mtabench.static.command import inspect_kernels
    from mtabench.static.shapes import Asked

    asked = Asked(head_dim, conv, dtype, seq, causal)
    outputs = {"json": json, "csv": csv}
    raise typer.Exit(inspect_kernels(target, kernel, asked, all_shapes, sass, baseline, accept, outputs))


@app.command()
def roofline(
    csv: CsvFiles, profile: ProfileIn = None, out: RooflineOut = None, overwrite: Overwrite = False
) -> None:  # fmt: skip
    """Place results below the roofline: work, bytes, the least time that they take, and what is left to win."""
    from mtabench.roofline_command import show_roofline

    show_roofline(csv, profile or [], out, overwrite)


@app.command()
def plot(
    csv: CsvFiles, kind: ChartKinds = None, theme: Themes = "light", formats: Formats = "png,svg", out: PlotOut = None
) -> None:
    """Draw charts from results files. Each says in its title what the results show."""
    from mtabench import commands

    commands.plot(csv, kind, theme, formats, out)


@app.command()
def report(
    csv: RunCsv, out: ReportOut = None, markdown: ReportMarkdown = None, force: ReportForce = False
) -> None:  # fmt: skip
    """Write one run as a page to explore and as Markdown. The page is one file and asks for nothing outside it."""
    from mtabench.report.command import write_report

    for path in write_report(csv, out, markdown, force):
        print(f"report: {path}")


@app.command()
def dashboard(
    results: ResultsFolder, out: SiteOut, repo_url: RepoUrl = None, title: Title = None, threshold: Threshold = "2%",
    days: Days = 30,
) -> None:  # fmt: skip
    """Write the history of every cell as a web site. It says what got slower, when and by which commit."""
    from mtabench.dashboard.command import build_dashboard

    build_dashboard(results, out, repo_url, title, threshold, days)


@app.command()
def compare(
    base: BaseCsv, head: HeadCsv, threshold: Threshold = "2%", strict: Strict = False,
    format_: CompareFormat = "table", markdown: MarkdownOut = None, junit: JunitOut = None,
    github_action_benchmark: GithubOut = None, bencher: BencherOut = None, rerun_unclear: RerunUnclear = False,
) -> None:  # fmt: skip
    """Compare two runs of the same cells. Exits with 1 if one got slower or broke, so that CI can be gated on it."""
    typed = locals()
    from mtabench.comparing.compare_command import compare_files

    raise typer.Exit(compare_files(base, head, _wanted(typed), rerun_unclear))


@app.command(context_settings={"ignore_unknown_options": True})
def ab(
    sweep: SweepArguments, base: BaseRevision, head: HeadRevision = None, pairs: Pairs = 5, out: FolderOut = None,
    threshold: Threshold = "2%", strict: Strict = False, format_: CompareFormat = "table",
    markdown: MarkdownOut = None, junit: JunitOut = None, github_action_benchmark: GithubOut = None,
    bencher: BencherOut = None, rerun_unclear: RerunUnclear = False,
) -> None:  # fmt: skip
    """Measure two revisions and compare them. Both run here, in fresh processes that take turns; exits as compare."""
    typed = locals()
    from mtabench.comparing.ab import compare_revisions

    words = _sweep_words(sweep)
    raise typer.Exit(compare_revisions(words, base, head, pairs, out, rerun_unclear, _wanted(typed)))


@app.command(context_settings={"ignore_unknown_options": True})
def noise(
    sweep: SweepArguments, pairs: Pairs = 5, threshold: Threshold = "2%", out: NoiseOut = None,
    resume: NoiseResume = False,
) -> None:  # fmt: skip
    """Measure this machine's own noise. Says how often the same code fails, and the smallest change that is seen."""
    from mtabench.comparing.noise_command import measure_noise

    measure_noise(_sweep_words(sweep), pairs, threshold, out, resume)


@app.command()
def show(csv: CsvFile, where: Where = None, sort: Sort = None) -> None:
    """Print a results file as a table that fits the terminal, with pictures of its rounds."""
    from mtabench.files.show_command import show_file

    show_file(csv, where or [], sort)


@app.command()
def export(
    csv: CsvFile, out: ExportOut = None, format_: ExportFormat = None, where: Where = None, sort: Sort = None,
    overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Turn a results file into Markdown, LaTeX, Parquet or a CSV file for spreadsheets."""
    from mtabench.files.export_command import export_file

    export_file(csv, out, format_, where or [], sort, overwrite)


@results_app.command()
def merge(csv: CsvFiles, out: NewCsv, latest: Latest = False, overwrite: Overwrite = False) -> None:
    """Put the rows of several results files and their samples into one."""
    from mtabench.files.results_command import merge

    merge(csv, out, latest, overwrite)


@results_app.command()
def select(csv: CsvFile, out: NewCsv, where: Where = None, overwrite: Overwrite = False) -> None:
    """Put some rows of a results file and their samples into another."""
    from mtabench.files.results_command import select_rows

    select_rows(csv, where or [], out, overwrite)


def _wanted(typed: dict[str, Any]) -> Any:
    """The options of a comparison, parsed."""
    from mtabench.comparing.compare_command import REPORTS, wanted

    outputs = {name: typed[name] for name in REPORTS}
    return wanted(typed["threshold"], typed["strict"], typed["format_"], outputs)


def _sweep_words(words: list[str]) -> Any:
    """PASS and the options of a sweep, checked by the command that they are for."""
    from mtabench.sweeps.sweep_words import SweepWords

    pass_, options = words[0], words[1:]
    if pass_ not in PASSES:
        raise UsageError(f"{pass_!r} is no pass; expected fwd, bwd or decode, and after it the options of that sweep")
    command = typer.main.get_command(app).commands[pass_]  # type: ignore[attr-defined]
    return SweepWords(tuple(words), command.make_context(pass_, options).params)


def _sweep(pass_: str, typed: dict[str, Any]) -> None:
    from mtabench import commands

    _exit(commands.sweep(pass_, typed, command_line=shlex.join(["mtabench", *sys.argv[1:]])))


def _exit(any_wrong: bool) -> None:
    if any_wrong:
        raise typer.Exit(WRONG_RESULT)


def main() -> None:
    """Run the command line; an error that a person can act on is one sentence on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as its number
        sys.stdout.reconfigure(errors="backslashreplace")
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
    from mtabench.escaping import in_log, printable

    print(in_log(printable(f"mtabench: {' '.join(message.split())}")), file=sys.stderr)
    sys.exit(code)
