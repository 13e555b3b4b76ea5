"""The options of the command line: what each is called, takes and says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from mtabench import registry
from mtabench.problem.axes import PRESETS
from mtabench.problem.case import DTYPES, KERNEL_PASSES, MODES
from mtabench.problem.operations import GATES, NONE, OPS
from mtabench.sweeps.measuring_options import CACHES, TIMERS

RANGES = "512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies"

# Groups of options in --help, in the order shown.
PANELS = (
    "Shapes and kernels", "Output", "All steps of multi-token attention", "How to measure",
    "Several GPUs or processes",
)  # fmt: skip
Shape, Output, Steps, How, Crew = (partial(Option, rich_help_panel=name) for name in PANELS)
COMMANDS = ("Measure", "Look", "Compare", "Understand")  # groups of commands
OUT = ("--out", "-o")


def _number(kind: Callable[[str], Any], name: str, metavar: str) -> dict[str, Any]:
    """An option that takes a number, and names what was typed if that is none."""

    def parse(text: Any) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise BadParameter(f"{text!r} is no {name}") from None

    return {"parser": parse, "metavar": metavar}


WHOLE, SECONDS = _number(int, "whole number", "N"), _number(float, "number of seconds", "SECONDS")


def _one_of(names: Iterable[str]) -> dict[str, Any]:
    """An option that the shell completes with one of these names."""
    return {"autocompletion": lambda incomplete: [name for name in names if name.startswith(incomplete)]}


def _some_of(names: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """An option of names with commas between, the last of which the shell completes."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return {"autocompletion": complete}


Text = str | None
File = Path | None
Seq = Annotated[Text, Shape(help=f"Sequence lengths: {RANGES}.")]
HeadDim = Annotated[Text, Shape(help="Head dims, 16 to 256, such as 64,128.")]
Taps = Annotated[Text, Shape("--conv", help="Query taps x key taps, such as 6x11,3x3; 7 means 7x7.")]
Conv = Annotated[Text, Shape(help="Query taps x key taps, such as 6x11,3x3; 7 means 7x7. With --op mta also none.")]
Mix = Annotated[
    Text,
    Steps(
        **_some_of(lambda: ("heads", NONE)),
        help="With --op mta, the heads mixed before and after the softmax: heads (all), 4 (groups), none.",
    ),
]
PostConv = Annotated[Text, Steps(help="With --op mta, taps after the softmax, such as 6x11; none if not given.")]
Norm = Annotated[
    Text,
    Steps(
        **_some_of(lambda: ("rms", "depth2", NONE)),
        help="With --op mta, the norm of each head's output: rms, depth2 (as layer 2 rescales it); none if not given.",
    ),
]
Gate = Annotated[
    Text,
    Steps(
        **_some_of(lambda: GATES),
        help="With --op mta, the gate of each head's output: one (a number a row), full; none if not given.",
    ),
]
Layer = Annotated[
    Text,
    Steps(
        **_one_of(("mix", "full")),
        help="With --preset, the steps of a layer of that model: mix (heads alone) or full (all).",
    ),
]
Impl = Annotated[
    Text,
    Shape(
        **_some_of(lambda: (*registry.names(), *registry.GROUPS)),
        help="Implementations, such as eager,triton or ladder (see `mtabench list`), or ./FILE.py:FUNCTION of yours.",
    ),
]
Cells = Annotated[
    File, Shape("--cells", help="The cells of this results file, in the place of all axes; those of --impl if given.")
]
Op = Annotated[
    Text,
    Shape(
        **_one_of(OPS),
        help="Only implementations of conv-attention, or of attention; or mta, with --mix, --norm and more.",
    ),
]
Mode = Annotated[
    Text, Shape(**_some_of(lambda: MODES), help="One or more of train,prefill,generate; train if not given.")
]
Attention = Annotated[
    Text,
    Shape(
        **_some_of(lambda: ("conv", "conv/4", "mta/4", "mix")),
        help="In all layers conv; in every fourth conv/4; mta/4 as the paper's models; mix for heads alone.",
    ),
]
Layers = Annotated[Text, Shape(help="Number of layers, with --heads and --dim in the place of --preset.")]
Dim = Annotated[Text, Shape(help="Width of the model: heads times head dim.")]
ModelImpl = Annotated[
    Text,
    Shape("--impl", **_some_of(registry.model_names), help=f"One or more of {','.join(registry.model_names())}."),
]
ModelPreset = Annotated[
    Text, Shape("--preset", **_some_of(lambda: PRESETS), help=f"One or more of {','.join(PRESETS)}.")
]
ModelHeads = Annotated[Text, Shape("--heads", help="Number of heads.")]
OneConv = Annotated[Text, Shape("--conv", help="Query taps x key taps of the convolutions; 6x11 if not given.")]
Batch = Annotated[Text, Shape(help="Batch sizes.")]
Tokens = Annotated[Text, Shape(help="Tokens in a batch, such as 16k: batch = tokens / seq.")]
Heads = Annotated[Text, Shape(help="Numbers of query heads.")]
KvHeads = Annotated[Text, Shape(help="Number of KV heads; divides --heads, and is the same if not given.")]
CheckedKvHeads = Annotated[
    Text, Shape("--kv-heads", help="KV heads, such as 2,8; each serves as many query heads as it did.")
]
Dtype = Annotated[Text, Shape(**_some_of(lambda: DTYPES), help="One or more of fp16,bf16,fp32.")]
Causal = Annotated[bool, Shape("--causal/--no-causal", help="Whether a query sees only the past.")]
Splits = Annotated[
    str, Shape(help="Splits of the keys, for kernels that split them: auto, numbers up to 128, or auto,1..128.")
]
PageSize = Annotated[
    str, Shape("--page-size", help="Caches in pages of 16, 32, 64, 128 or 256 keys, or none: contiguous. A list.")
]
Device = Annotated[str, Option(**_one_of(("auto", "cuda", "cpu")), help="auto, cuda or cpu.")]
PresetName = Annotated[
    Text,
    Shape(
        "--preset", **_one_of(PRESETS), help="Heads, head dim, conv and seq of mta-300m, mta-550m, mta-830m or mta-1b."
    ),
]
Baseline = Annotated[
    Text, How(help="What speedups refer to; eager if it is measured, of plain attention the best library.")
]
Timer = Annotated[
    str,
    How(
        **_one_of(TIMERS),
        help="auto, events (CUDA events), graph (CUDA graph replay), cpu or nvbench (NVIDIA's, a check).",
    ),
]
Cache = Annotated[
    str,
    How(**_one_of(CACHES), help="cold flushes a GPU's L2 cache before each sample, warm does not; a CPU's stay warm."),
]
Rounds = Annotated[int | None, How(**WHOLE, help="At most so many rounds of samples a cell; 200 if not given.")]
Target = Annotated[
    Text,
    How(
        metavar="PERCENT",
        help="A cell is done when half the 95 % interval of its median is at most this; 0.5% on a GPU and 3% on a CPU "
        "if not given.",
    ),
]
TimeLimit = Annotated[
    float | None, How(**SECONDS, help="No round of a cell but the first five starts after these; 10 if not given.")
]
Isolate = Annotated[bool, How("--isolate", help="Measure each cell in a fresh process; a crash costs one cell.")]
Gpus = Annotated[
    Text, Crew(help="Spread the sweep over GPUs of this machine: all, or numbers such as 0,2. Needs [cluster].")
]
Workers = Annotated[
    int | None, Crew(**WHOLE, help="With --device cpu: so many processes, each on its share of the cores.")
]
Scheduler = Annotated[
    Text, Crew(help="Spread the sweep over a Dask cluster that is there: tls://HOST:PORT; docs/cluster.md.")
]
On = Annotated[Text, Crew(help="With --gpus or --scheduler: only GPUs whose name has this in it, such as H200.")]
TlsCa = Annotated[
    File, Crew(help="With --scheduler: the PEM file of the authority; Dask's configuration if not given.")
]
TlsCert = Annotated[File, Crew(help="With --scheduler: the PEM file of this side's certificate.")]
TlsKey = Annotated[File, Crew(help="With --scheduler: the PEM file of the certificate's key.")]
Ranks = Annotated[
    int | None,
    Crew(**WHOLE, help="Share each sequence over so many GPUs of this machine, and compare with one of them."),
]
CellTimeout = Annotated[
    float | None, How(**SECONDS, help="With --isolate: a cell's process is stopped after these; 600 if not given.")
]
Seed = Annotated[
    int | None, How(**WHOLE, help="What inputs and checked rows are drawn from; another one each time if not given.")
]
Out = Annotated[File, Output(*OUT, help="The CSV file to write; mtabench-results/PASS-TIME.csv if not given.")]
Resume = Annotated[bool, Output("--resume", help="Measure only the cells that --out does not have yet.")]
Quiet = Annotated[bool, Output("--quiet", "-q", help="Print only where the results are, and errors.")]
DryRun = Annotated[bool, Output("--dry-run", help="Print the plan and stop; no file is touched.")]
Plot = Annotated[bool, Output("--plot/--no-plot", help="Draw charts next to the CSV file at the end, in some seconds.")]
CsvFiles = Annotated[list[Path], Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[File, Output(*OUT, help="The folder for the charts; NAME-charts beside NAME.csv if not given.")]
KINDS_OF_CHARTS = sorted(
    path.stem.replace("_", "-") for path in (Path(__file__).parent / "charts/kinds").glob("[!_]*.py")
)
ChartKinds = Annotated[
    Text,
    Option(
        **_some_of(lambda: KINDS_OF_CHARTS),
        help=f"One or more of {', '.join(KINDS_OF_CHARTS)}; all that the results can give if not given.",
    ),
]
Themes = Annotated[str, Option(help="light, dark or both: light,dark. A dark chart is called NAME-dark.")]
Formats = Annotated[str, Option(help="png, svg or both: png,svg.")]
CheckedOp = Annotated[
    Text,
    Shape(
        "--op",
        **_one_of(OPS),
        help="Only what computes conv-attention, attention or mta.",
    ),
]
Passes = Annotated[str, Option("--pass", **_some_of(lambda: KERNEL_PASSES), help="One or more of fwd,bwd,decode.")]
TunedOut = Annotated[
    File, Output(*OUT, help="The JSON file to add to; the one in your cache that kernels read if not given.")
]
PassName = Annotated[str, Argument(**_one_of(KERNEL_PASSES), help="fwd, bwd or decode.", metavar="PASS")]
ProfiledPass = Annotated[Text, Argument(**_one_of(KERNEL_PASSES), help="fwd, bwd or decode.", metavar="[PASS]")]
Tools = Annotated[
    Text, Option(help="Profilers, one or more of trace,proton,ncu; those that can be had here if not given.")
]
ProfileOut = Annotated[File, Output(*OUT, help="The folder to write; mtabench-results/profile-PASS-TIME if not given.")]
NcuReport = Annotated[File, Option(help="Instead of measuring, read a saved `ncu --import REPORT --csv --page raw`.")]
DeviceName = Annotated[Text, Option(help="The GPU that is meant, such as h200; this machine's if not given.")]
ResultsCsv = Annotated[
    list[Path] | None,
    Option("--results", metavar="<path>", help="A results file: its times stand beside the predicted ones."),
]
CeilingsIn = Annotated[
    File, Option(help="Ceilings measured on that GPU; mtabench-results/ceilings.json if it is there.")
]
ProfileIn = Annotated[
    list[Path] | None,
    Option(
        "--profile",
        metavar="<path>",
        help="A folder of `mtabench profile`: bytes that Nsight Compute counted stand beside.",
    ),
]
RooflineOut = Annotated[File, Output(*OUT, help="A CSV file to write besides.")]
RunCsv = Annotated[Path, Argument(help="A results file of mtabench.", metavar="RUN.csv")]
ReportOut = Annotated[File, Output(*OUT, help="The HTML page; NAME-report.html beside NAME.csv if not given.")]
ReportMarkdown = Annotated[File, Output("--markdown", help="The same as Markdown; beside the page if not given.")]
ReportOverwrite = Annotated[bool, Output("--overwrite", help="Replace files that are there and are no report.")]
ResultsFolder = Annotated[Path, Argument(help="A folder of results files; those below it count.", metavar="RESULTS")]
SiteOut = Annotated[Path, Output(*OUT, help="The folder to write: a new one, or an earlier dashboard.")]
RepoUrl = Annotated[Text, Option(help="The repository, for links to commits, such as https://github.com/me/it.")]
Title = Annotated[Text, Option(help="What the page is called.")]
Days = Annotated[int, Option(**WHOLE, help="Changes of so many days before the last run are news.")]
BaseCsv = Annotated[Path, Argument(help="Results of the code before.", metavar="BASE.csv")]
HeadCsv = Annotated[Path, Argument(help="Results of the code after, on the same device.", metavar="HEAD.csv")]
Threshold = Annotated[str, Option(help="The smallest change that counts, such as 1% or 5%.")]
FailOn = Annotated[str, Option(help="What fails: any of broken, slower, gone, unclear, new and faster.")]
CompareFormat = Annotated[str, Output("--format", help="What to print: table, markdown or json.")]
MarkdownOut = Annotated[File, Output("--markdown", help="Write the comparison as Markdown.")]
JunitOut = Annotated[File, Output("--junit", help="Write the comparison as JUnit XML.")]
GithubOut = Annotated[
    File, Output("--github-action-benchmark", help="Write HEAD's times as customSmallerIsBetter JSON.")
]
BencherOut = Annotated[File, Output("--bencher", help="Write HEAD's times in Bencher's JSON (BMF).")]
CsvFile = Annotated[Path, Argument(help="A results file of mtabench.", metavar="CSV")]
Where = Annotated[
    list[str] | None,
    Option(metavar="<str>", help="Only rows such as impl=triton,eager,seq=1k..4k,status!=ok; * stands for any text."),
]
Sort = Annotated[Text, Option(help="Columns to sort by, such as seq,-speedup; - puts the largest first.")]
ExportOut = Annotated[
    File, Output(*OUT, help="The file to write: .md, .tex, .parquet, .csv (for spreadsheets) or .jsonl.")
]
ExportFormat = Annotated[
    Text,
    Output(
        "--format",
        help="markdown, latex, parquet, csv, jsonl, flashinfer-trace (.jsonl) or pytorch-benchmark (.json); that of "
        "the suffix of --out, or markdown, if not given.",
    ),
]
Overwrite = Annotated[bool, Output("--overwrite", help="Replace --out if it is there.")]
NewCsv = Annotated[Path, Output(*OUT, help="The results file to write; samples go beside it.")]
Latest = Annotated[bool, Option("--latest", help="Of a cell that several files have, take the row that started last.")]
RerunUnclear = Annotated[
    bool, Option("--rerun-unclear", help="Measure unclear cells again in pairs of both revisions, at most twice.")
]
AcrossDevices = Annotated[
    bool, Output("--across-devices", help="Show the ratios of times on two devices, without a verdict.")
]
PrintJson = Annotated[bool, Output("--json", help="Print one JSON document for programs instead: docs/json.md.")]
SweepArguments = Annotated[
    list[str], Argument(help="fwd, bwd, decode or model, and after it any options of that sweep.", metavar="PASS")
]
BaseRevision = Annotated[str, Option("--base", help="The code before: a branch, a tag or a commit.")]
HeadRevision = Annotated[Text, Option("--head", help="The code after; the working tree as it is if not given.")]
Pairs = Annotated[int, Option(**WHOLE, help="Pairs of processes, one of each side, that take turns.")]
FolderOut = Annotated[File, Output(*OUT, help="The new folder for the results; mtabench-results/ab-TIME if not given.")]
Commits = Annotated[str, Argument(help="A range of commits, such as v1.0..main or HEAD~20.. .", metavar="REV..REV")]
MostCommits = Annotated[int | None, Option("--most", **WHOLE, help="At most so many of them, spread evenly.")]
HistoryOut = Annotated[Path, Output(*OUT, help="The folder for the results, a file a commit; those there are kept.")]
ActionName = Annotated[
    Text, Option("--action", help="The action, such as OWNER/mtabench@v0.1.0; where mtabench came from if not given.")
]
Runner = Annotated[str, Option(help="Labels of the runner that measures.")]
OverwriteWorkflows = Annotated[bool, Output("--overwrite", help="Replace workflows of these names.")]
NoiseOut = Annotated[File, Output(*OUT, help="The CSV file to write; mtabench-results/noise-TIME.csv if not given.")]
NoiseResume = Annotated[bool, Output("--resume", help="Keep the processes that ended, and measure the others.")]
Targets = Annotated[
    Text, Option("--target", help="Compute capabilities, such as sm_90,sm_100, or all; needs none of these GPUs.")
]
KernelNames = Annotated[Text, Option("--kernel", help="Only kernels whose names hold one of these: fwd,decode.")]
IfCausal = Annotated[bool | None, Shape("--causal/--no-causal", help="Whether a query sees only the past.")]
AllShapes = Annotated[
    bool, Option("--all-shapes", help="Every shape that takes a path of its own through the kernels.")
]
Sass = Annotated[
    bool | None, Option("--sass/--no-sass", help="Disassemble, for the instruction mix; not with --baseline.")
]
StaticBaseline = Annotated[
    File, Option("--baseline", help="Compare with a file of --json-file; exit with 1 if a kernel got worse.")
]
Accept = Annotated[bool, Option("--accept", help="With --baseline: write what is compiled now into that file.")]
JsonOut = Annotated[File, Output("--json-file", help="Write the kernels as JSON; also makes a baseline.")]
CsvOut = Annotated[File, Output("--csv", help="Write the kernels as CSV.")]
MemoryPass = Annotated[str, Option("--pass", **_one_of(KERNEL_PASSES), help="fwd, bwd or decode.")]
MemorySize = Annotated[Text, Option(help="Memory to fit into, such as 80GB or 24GiB; the device's if not given.")]
Trace = Annotated[
    bool, Option("--measure", help="Call each cell on this machine's GPU and trace its peak, beside the planned one.")
]
CellsCsv = Annotated[File, Output("--csv", help="Write a row a cell as CSV.")]
CellsJson = Annotated[File, Output("--json-file", help="Write a row a cell as JSON.")]
OverwriteOutputs = Annotated[bool, Output("--overwrite", help="Replace files of these options that are there.")]
Measure = Annotated[
    bool, Option("--measure", help="Measure memory bandwidth and matmul rate as well, and keep them for sweeps.")
]
CeilingsOut = Annotated[
    File, Output(*OUT, help="Where ceilings are kept; mtabench-results/ceilings.json if not given.")
]
Anew = Annotated[bool, Option("--anew", help="Look again, instead of showing what was found here within a day.")]
