"""The options of the command line: what each is called, takes and says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RANGES = "512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies"

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
Seed = Annotated[
    int | None, typer.Option(help="What inputs and checked rows are drawn from; another one each time if not given.")
]
Out = Annotated[Path | None, typer.Option(help="The CSV file to write; mtabench-results/PASS-TIME.csv if not given.")]
Resume = Annotated[bool, typer.Option("--resume", help="Measure only the cells that --out does not have yet.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; no file is touched.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw charts next to the CSV file at the end.")]
CsvFiles = Annotated[list[Path], typer.Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[
    Path | None, typer.Option(help="The folder for the charts; NAME-charts beside NAME.csv if not given.")
]
KINDS_OF_CHARTS = sorted(
    path.stem.replace("_", "-") for path in (Path(__file__).parent / "charts/kinds").glob("[!_]*.py")
)
ChartKinds = Annotated[
    Text,
    typer.Option(help=f"One or more of {', '.join(KINDS_OF_CHARTS)}; all that the results can give if not given."),
]
Themes = Annotated[str, typer.Option(help="light, dark or both: light,dark. A dark chart is called NAME-dark.")]
Formats = Annotated[str, typer.Option(help="png, svg or both: png,svg.")]
Fuzz = Annotated[
    float | None,
    typer.Option(help="Run random cases of conv attention for so many seconds instead.", metavar="SECONDS"),
]
CaseNumber = Annotated[
    int | None, typer.Option("--case", help="With --fuzz 0 and --seed: run this case alone, and show what it is.")
]
Jobs = Annotated[int, typer.Option(help="With --fuzz: so many processes share the cases and the device.")]
FuzzOut = Annotated[Path | None, typer.Option("--out", help="With --fuzz: the CSV file that gets the totals.")]
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
DeviceName = Annotated[Text, typer.Option(help="The GPU that is meant, such as h200; this machine's if not given.")]
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
ReportOverwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there and are no report.")]
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
FailOn = Annotated[str, typer.Option(help="What fails: any of broken, slower, gone, unclear, new and faster.")]
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
