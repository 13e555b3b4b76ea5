"""The options of the command line: what each is called, takes and says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

RANGES = "512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies"

Text = str | None
File = Path | None
Seq = Annotated[Text, Option(help=f"Sequence lengths: {RANGES}.")]
HeadDim = Annotated[Text, Option(help="Head dims, 16 to 256, such as 64,128.")]
Conv = Annotated[Text, Option(help="Query taps x key taps, such as 6x11,3x3; 7 means 7x7. With --op mta also none.")]
Mix = Annotated[
    Text, Option(help="With --op mta, the heads mixed before and after the softmax: heads (all), 4 (groups), none.")
]
PostConv = Annotated[Text, Option(help="With --op mta, taps after the softmax, such as 6x11; none if not given.")]
Layer = Annotated[
    Text, Option(help="With --preset, the steps of a layer of that model: mix (heads alone) or full (all).")
]
Impl = Annotated[Text, Option(help="Implementations, such as eager,triton, or ladder; `mtabench list` shows all.")]
Op = Annotated[
    Text, Option(help="Only implementations of conv-attention, or of attention; or mta, with --mix and --post-conv.")
]
Batch = Annotated[Text, Option(help="Batch sizes.")]
Tokens = Annotated[Text, Option(help="Tokens in a batch, such as 16k: batch = tokens / seq.")]
Heads = Annotated[Text, Option(help="Numbers of query heads.")]
KvHeads = Annotated[Text, Option(help="Number of KV heads; divides --heads, and is the same if not given.")]
Dtype = Annotated[Text, Option(help="One or more of fp16,bf16,fp32.")]
Causal = Annotated[bool, Option("--causal/--no-causal", help="Whether a query sees only the past.")]
Splits = Annotated[
    str, Option(help="Splits of the keys, for kernels that split them: auto, numbers up to 128, or auto,1..128.")
]
Device = Annotated[str, Option(help="auto, cuda or cpu.")]
PresetName = Annotated[
    Text, Option("--preset", help="Heads, head dim, conv and seq of mta-300m, mta-550m, mta-830m or mta-1b.")
]
Baseline = Annotated[Text, Option(help="What speedups refer to; eager if it is measured.")]
Timer = Annotated[
    str, Option(help="auto, events (CUDA events), graph (CUDA graph replay), cpu or nvbench (NVIDIA's, a check).")
]
Cache = Annotated[str, Option(help="cold flushes the GPU's L2 cache before each sample, warm does not.")]
Rounds = Annotated[int | None, Option(help="At most so many rounds of samples a cell.")]
TimeLimit = Annotated[float | None, Option(help="Seconds after which no new round of a cell starts.")]
Isolate = Annotated[bool, Option("--isolate", help="Measure each cell in a fresh process; a crash costs one cell.")]
Gpus = Annotated[
    Text, Option(help="Spread the sweep over GPUs of this machine: all, or numbers such as 0,2. Needs [cluster].")
]
Workers = Annotated[int | None, Option(help="With --device cpu: so many processes, each on its share of the cores.")]
Scheduler = Annotated[
    Text, Option(help="Spread the sweep over a Dask cluster that is there: tls://HOST:PORT; docs/cluster.md.")
]
On = Annotated[Text, Option(help="With --gpus or --scheduler: only GPUs whose name has this in it, such as H200.")]
TlsCa = Annotated[
    File, Option(help="With --scheduler: the PEM file of the authority; Dask's configuration if not given.")
]
TlsCert = Annotated[File, Option(help="With --scheduler: the PEM file of this side's certificate.")]
TlsKey = Annotated[File, Option(help="With --scheduler: the PEM file of the certificate's key.")]
Ranks = Annotated[
    int | None, Option(help="Share each sequence over so many GPUs of this machine, and compare with one of them.")
]
CellTimeout = Annotated[
    float | None, Option(help="With --isolate: seconds after which a cell's process is stopped; 600 if not given.")
]
Seed = Annotated[
    int | None, Option(help="What inputs and checked rows are drawn from; another one each time if not given.")
]
Out = Annotated[File, Option(help="The CSV file to write; mtabench-results/PASS-TIME.csv if not given.")]
Resume = Annotated[bool, Option("--resume", help="Measure only the cells that --out does not have yet.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan and stop; no file is touched.")]
Plot = Annotated[bool, Option("--plot/--no-plot", help="Draw charts next to the CSV file at the end.")]
CsvFiles = Annotated[list[Path], Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[File, Option(help="The folder for the charts; NAME-charts beside NAME.csv if not given.")]
KINDS_OF_CHARTS = sorted(
    path.stem.replace("_", "-") for path in (Path(__file__).parent / "charts/kinds").glob("[!_]*.py")
)
ChartKinds = Annotated[
    Text, Option(help=f"One or more of {', '.join(KINDS_OF_CHARTS)}; all that the results can give if not given.")
]
Themes = Annotated[str, Option(help="light, dark or both: light,dark. A dark chart is called NAME-dark.")]
Formats = Annotated[str, Option(help="png, svg or both: png,svg.")]
Fuzz = Annotated[float | None, Option(help="Run random cases for so many seconds instead.", metavar="SECONDS")]
CaseNumber = Annotated[
    int | None, Option("--case", help="With --fuzz 0 and --seed: run this case alone, and show what it is.")
]
Jobs = Annotated[int, Option(help="With --fuzz: so many processes share the cases and the device.")]
FuzzOut = Annotated[File, Option("--out", help="With --fuzz: the CSV file that gets the totals.")]
FuzzOp = Annotated[Text, Option("--op", help="With --fuzz: only cases of conv-attention, or of mta.")]
Passes = Annotated[str, Option("--pass", help="One or more of fwd,bwd,decode.")]
TunedOut = Annotated[
    File, Option(help="The JSON file to add to; the one in your cache that kernels read if not given.")
]
PassName = Annotated[str, Argument(help="fwd, bwd or decode.", metavar="PASS")]
ProfiledPass = Annotated[Text, Argument(help="fwd, bwd or decode.", metavar="[PASS]")]
Tools = Annotated[
    Text, Option(help="Profilers, one or more of trace,proton,ncu; those that can be had here if not given.")
]
ProfileOut = Annotated[File, Option(help="The folder to write; mtabench-results/profile-PASS-TIME if not given.")]
NcuReport = Annotated[File, Option(help="Instead of measuring, read a saved `ncu --import REPORT --csv --page raw`.")]
DeviceName = Annotated[Text, Option(help="The GPU that is meant, such as h200; this machine's if not given.")]
ResultsCsv = Annotated[
    list[Path] | None, Option("--results", help="A results file: its times stand beside the predicted ones.")
]
CeilingsIn = Annotated[
    File, Option(help="Ceilings measured on that GPU; mtabench-results/ceilings.json if it is there.")
]
ProfileIn = Annotated[
    list[Path] | None,
    Option("--profile", help="A folder of `mtabench profile`: bytes that Nsight Compute counted stand beside."),
]
RooflineOut = Annotated[File, Option(help="A CSV file to write besides.")]
RunCsv = Annotated[Path, Argument(help="A results file of mtabench.", metavar="RUN.csv")]
ReportOut = Annotated[File, Option(help="The HTML page; NAME-report.html beside NAME.csv if not given.")]
ReportMarkdown = Annotated[
    File, Option("--markdown", help="The same as Markdown; NAME-report.md beside NAME.csv if not given.")
]
ReportOverwrite = Annotated[bool, Option("--overwrite", help="Replace files that are there and are no report.")]
ResultsFolder = Annotated[Path, Argument(help="A folder of results files; those below it count.", metavar="RESULTS")]
SiteOut = Annotated[Path, Option("--out", "-o", help="The folder to write: a new one, or an earlier dashboard.")]
RepoUrl = Annotated[Text, Option(help="The repository, for links to commits, such as https://github.com/me/it.")]
Title = Annotated[Text, Option(help="What the page is called.")]
Days = Annotated[int, Option(help="Changes of so many days before the last run are news.")]
BaseCsv = Annotated[Path, Argument(help="Results of the code before.", metavar="BASE.csv")]
HeadCsv = Annotated[Path, Argument(help="Results of the code after, on the same device.", metavar="HEAD.csv")]
Threshold = Annotated[str, Option(help="The smallest change that counts, such as 1% or 5%.")]
FailOn = Annotated[str, Option(help="What fails: any of broken, slower, gone, unclear, new and faster.")]
CompareFormat = Annotated[str, Option("--format", help="What to print: table or markdown.")]
MarkdownOut = Annotated[File, Option("--markdown", help="Write the comparison as Markdown.")]
JunitOut = Annotated[File, Option("--junit", help="Write the comparison as JUnit XML.")]
GithubOut = Annotated[
    File, Option("--github-action-benchmark", help="Write HEAD's times as customSmallerIsBetter JSON.")
]
BencherOut = Annotated[File, Option("--bencher", help="Write HEAD's times in Bencher's JSON (BMF).")]
CsvFile = Annotated[Path, Argument(help="A results file of mtabench.", metavar="CSV")]
Where = Annotated[
    list[str] | None, Option(help="Only rows such as impl=triton,eager,seq=1k..4k,status!=ok; * stands for any text.")
]
Sort = Annotated[Text, Option(help="Columns to sort by, such as seq,-speedup; - puts the largest first.")]
ExportOut = Annotated[File, Option(help="The file to write: .md, .tex, .parquet or .csv (for spreadsheets).")]
ExportFormat = Annotated[Text, Option("--format", help="What to print without --out: markdown or latex.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace --out if it is there.")]
NewCsv = Annotated[Path, Option("--out", help="The results file to write; samples go beside it.")]
Latest = Annotated[bool, Option("--latest", help="Of a cell that several files have, take the row that started last.")]
RerunUnclear = Annotated[
    bool, Option("--rerun-unclear", help="Measure unclear cells again in pairs of both revisions, at most twice.")
]
SweepArguments = Annotated[
    list[str], Argument(help="fwd, bwd or decode, and after it any options of that sweep.", metavar="PASS")
]
BaseRevision = Annotated[str, Option("--base", help="The code before: a branch, a tag or a commit.")]
HeadRevision = Annotated[Text, Option("--head", help="The code after; the working tree as it is if not given.")]
Pairs = Annotated[int, Option(help="Pairs of processes, one of each side, that take turns.")]
FolderOut = Annotated[
    File, Option("--out", help="The new folder for the results; mtabench-results/ab-TIME if not given.")
]
NoiseOut = Annotated[File, Option("--out", help="The CSV file to write; mtabench-results/noise-TIME.csv if not given.")]
NoiseResume = Annotated[bool, Option("--resume", help="Keep the processes that ended, and measure the others.")]
Targets = Annotated[
    Text, Option("--target", help="Compute capabilities, such as sm_90,sm_100, or all; needs none of these GPUs.")
]
KernelNames = Annotated[Text, Option("--kernel", help="Only kernels whose names hold one of these: fwd,decode.")]
IfCausal = Annotated[bool | None, Option("--causal/--no-causal", help="Whether a query sees only the past.")]
AllShapes = Annotated[
    bool, Option("--all-shapes", help="Every shape that takes a path of its own through the kernels.")
]
Sass = Annotated[
    bool | None, Option("--sass/--no-sass", help="Disassemble, for the instruction mix; not with --baseline.")
]
StaticBaseline = Annotated[
    File, Option("--baseline", help="Compare with a file of --json; exit with 1 if a kernel got worse.")
]
Accept = Annotated[bool, Option("--accept", help="With --baseline: write what is compiled now into that file.")]
JsonOut = Annotated[File, Option("--json", help="Write the kernels as JSON; also makes a baseline.")]
CsvOut = Annotated[File, Option("--csv", help="Write the kernels as CSV.")]
MemoryPass = Annotated[str, Option("--pass", help="fwd, bwd or decode.")]
MemorySize = Annotated[Text, Option(help="Memory to fit into, such as 80GB or 24GiB; the device's if not given.")]
Trace = Annotated[
    bool, Option("--measure", help="Call each cell on this machine's GPU and trace its peak, beside the model's.")
]
CellsCsv = Annotated[File, Option("--csv", help="Write a row a cell as CSV.")]
CellsJson = Annotated[File, Option("--json", help="Write a row a cell as JSON.")]
OverwriteFiles = Annotated[bool, Option("--overwrite", help="Replace the files of --csv and --json.")]
Measure = Annotated[
    bool, Option("--measure", help="Measure memory bandwidth and matmul rate as well, and keep them for sweeps.")
]
CeilingsOut = Annotated[File, Option(help="Where ceilings are kept; mtabench-results/ceilings.json if not given.")]
