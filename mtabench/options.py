"""The options of the command line: what each is called, takes and says of itself."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from typer import Argument, BadParameter, Option

from mtabench import registry
from mtabench.errors import UsageError
from mtabench.problem.axes import PRESETS
from mtabench.problem.case import DTYPES, KERNEL_PASSES, MODES
from mtabench.problem.operations import GATES, NONE, OPS

TIMERS = ("auto", "events", "graph", "cpu")
CACHES = ("cold", "warm")
SEQ = "Sequence lengths: 512,1k,4k; 1k..16k doubles; 1k..4k:+1k adds; 1k..64k:x4 multiplies."

# Groups of options in --help, in the order shown.
PANELS = (
    "Shapes and kernels", "Output", "All steps of multi-token attention", "How to measure",
    "Several GPUs or processes",
)  # fmt: skip
Output = partial(Option, rich_help_panel="Output")
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


def _field(panel: str | None, text: str, *names: str, usual: Any = None, **settings: Any) -> Any:
    """A field of a dataclass that is an option: its help, its names if they are not the field's, and its default."""
    return field(default=usual, metadata={"option": Option(*names, help=text, rich_help_panel=panel, **settings)})


shape, output, steps, how, crew = (partial(_field, name) for name in PANELS)
other = partial(_field, None)


class Fields:
    """Which fields of a dataclass a command takes as options, in this order; by default all but `pass_`.

    `changed` are the fields that are other options for this command.
    """

    def __init__(self, *names: str, **changed: Any) -> None:
        self.names = names
        self.changed = changed

    def parameters(self, kind: Any) -> list[Parameter]:
        """The options of a dataclass as parameters of the command."""
        hints, declared = get_type_hints(kind, include_extras=True), kind.__dataclass_fields__ | self.changed
        found = []
        for name in self.names or [name for name in hints if name != "pass_"]:
            option, usual = declared[name].metadata.get("option"), declared[name].default
            hint = Annotated[hints[name], option] if option else hints[name]
            found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=usual, annotation=hint))
        return found


Text = str | None
File = Path | None
LIST = object()  # marks an option of a list: given several times, all count
Names = Annotated[str, LIST]
Texts = Annotated[str | None, LIST]
Device = Annotated[str, Option(**_one_of(("auto", "cuda", "cpu")), help="auto, cuda or cpu.")]
Threshold = Annotated[str, Option(help="The smallest change that counts, such as 1% or 5%.")]
OverwriteOutputs = Annotated[bool, Output("--overwrite", help="Replace files of these options that are there.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The axes of a sweep as typed; None where nothing was typed. Of a sweep of models `pass_` is "model".

    `cells` is a results file whose cells are in the place of all axes.
    """

    pass_: str
    seq: Texts = shape(SEQ)
    head_dim: Texts = shape("Head dims, 16 to 256, such as 64,128.")
    conv: Texts = shape("Query taps x key taps, such as 6x11,3x3; 7 means 7x7. With --op mta also none.")
    impl: Texts = shape(
        "Implementations, such as eager,triton or ladder (see `mtabench list`), or ./FILE.py:FUNCTION of yours.",
        **_some_of(lambda: (*registry.names(), *registry.GROUPS)),
    )
    op: Text = shape(
        "Only implementations of conv-attention, or of attention; or mta, with --mix, --norm and more.", **_one_of(OPS)
    )
    mix: Texts = steps(
        "With --op mta, the heads mixed before and after the softmax: heads (all), 4 (groups), none.",
        **_some_of(lambda: ("heads", NONE)),
    )
    post_conv: Texts = steps("With --op mta, taps after the softmax, such as 6x11; none if not given.")
    norm: Texts = steps(
        "With --op mta, the norm of each head's output: rms, depth2 (as layer 2 rescales it); none if not given.",
        **_some_of(lambda: ("rms", "depth2", NONE)),
    )
    gate: Texts = steps(
        "With --op mta, the gate of each head's output: one (a number a row), full; none if not given.",
        **_some_of(lambda: GATES),
    )
    layer: Text = steps(
        "With --preset, the steps of a layer of that model: mix (heads alone) or full (all).",
        **_one_of(("mix", "full")),
    )
    batch: Texts = shape("Batch sizes.")
    tokens: Text = shape("Tokens in a batch, such as 16k: batch = tokens / seq.")
    heads: Texts = shape("Numbers of query heads.")
    kv_heads: Text = shape("Number of KV heads; divides --heads, and is the same if not given.")
    dtype: Texts = shape("One or more of fp16,bf16,fp32.", **_some_of(lambda: DTYPES))
    causal: bool = shape("Whether a query sees only the past.", "--causal/--no-causal", usual=True)
    device: Device = "auto"
    splits: Names = shape(
        "Splits of the keys, for kernels that split them: auto, numbers up to 128, or auto,1..128.", usual="auto"
    )
    page_size: Names = shape(
        "Caches in pages of 16, 32, 64, 128 or 256 keys, or none: contiguous. A list.", "--page-size", usual=NONE
    )
    preset: Texts = shape(
        "Heads, head dim, conv and seq of mta-300m, mta-550m, mta-830m or mta-1b.", "--preset", **_one_of(PRESETS)
    )
    baseline: Text = how("What speedups refer to; eager if it is measured, of plain attention the best library.")
    timer: str = how(
        "auto, events (CUDA events), graph (CUDA graph replay) or cpu.",
        **_one_of(TIMERS),
        usual="auto",
    )
    cache: str = how(
        "cold flushes a GPU's L2 cache before each sample, warm does not; a CPU's stay warm.",
        **_one_of(CACHES),
        usual="cold",
    )
    rounds: int | None = how("At most so many rounds of samples a cell; 200 if not given.", **WHOLE)
    time_limit: float | None = how(
        "No round of a cell but the first five starts after these; 10 if not given.", **SECONDS
    )
    target: Text = how(
        "A cell is done when half the 95 % interval of its median is at most this; 0.5% on a GPU and 3% on a CPU if "
        "not given.",
        metavar="PERCENT",
    )
    isolate: bool = how("Measure each cell in a fresh process; a crash costs one cell.", "--isolate", usual=False)
    cell_timeout: float | None = how(
        "With --isolate: a cell's process is stopped after these; 600 if not given.", **SECONDS
    )
    seed: int | None = how("What inputs and checked rows are drawn from; another one each time if not given.", **WHOLE)
    mode: Texts = shape("One or more of train,prefill,generate; train if not given.", **_some_of(lambda: MODES))
    attention: Texts = shape(
        "In all layers conv; in every fourth conv/4; mta/4 as the paper's models; mix for heads alone.",
        **_some_of(lambda: ("conv", "conv/4", "mta/4", "mix")),
    )
    layers: Text = shape("Number of layers, with --heads and --dim in the place of --preset.")
    dim: Text = shape("Width of the model: heads times head dim.")
    cells: File = shape(
        "The cells of this results file, in the place of all axes; those of --impl if given.", "--cells"
    )


STEPS = ("mix", "post_conv", "norm", "gate")
SHAPE = ("batch", "tokens", "heads", "kv_heads")
AXES = ("seq", "head_dim", "conv", "impl", "op", *STEPS, "layer", *SHAPE, "dtype")
DECODE = ("splits", "page_size")
MODEL_AXES = (
    "mode", "preset", "layers", "heads", "dim", "attention", "conv", "impl", "seq", "batch", "dtype", "device",
)  # fmt: skip
CHECKED = ("impl", "device", "seed", "dtype", "op", "conv", *STEPS, "seq", "head_dim", "kv_heads")
MEASURING = (
    "cells", "baseline", "timer", "cache", "rounds", "time_limit", "target", "isolate", "cell_timeout", "seed",
)  # fmt: skip

# Options that are others for a command.
OF_MODEL = {
    "preset": shape(f"One or more of {','.join(PRESETS)}.", "--preset", **_some_of(lambda: PRESETS)),
    "heads": shape("Number of heads.", "--heads"),
    "conv": shape("Query taps x key taps of the convolutions; 6x11 if not given.", "--conv"),
    "impl": shape(f"One or more of {','.join(registry.model_names())}.", "--impl", **_some_of(registry.model_names)),
}
OF_VERIFY = {
    "op": shape("Only what computes conv-attention, attention or mta.", "--op", **_one_of(OPS)),
    "kv_heads": shape("KV heads, such as 2,8; each serves as many query heads as it did.", "--kv-heads"),
}
TAPS = shape("Query taps x key taps, such as 6x11,3x3; 7 means 7x7.", "--conv")


@dataclass(frozen=True, slots=True)
class SweepOutput:
    """What a sweep writes and prints."""

    out: File = output("The CSV file to write; mtabench-results/PASS-TIME.csv if not given.", *OUT)
    resume: bool = output("Measure only the cells that --out does not have yet.", "--resume", usual=False)
    dry_run: bool = output("Print the plan and stop; no file is touched.", "--dry-run", usual=False)
    plot: bool = output(
        "Draw charts next to the CSV file at the end, in some seconds.", "--plot/--no-plot", usual=False
    )
    quiet: bool = output("Print only where the results are, and errors.", "--quiet", "-q", usual=False)


@dataclass(frozen=True, slots=True)
class Comparing:
    """How two runs are compared, and what is written of it, as typed."""

    threshold: Threshold = "2%"
    fail_on: str = other(
        "What fails: any of broken, slower, gone, unclear, new and faster.", usual="broken,slower,gone"
    )
    format_: str = output("What to print: table, markdown or json.", "--format", usual="table")
    markdown: File = output("Write the comparison as Markdown.", "--markdown")
    junit: File = output("Write the comparison as JUnit XML.", "--junit")
    rerun_unclear: bool = other(
        "Measure unclear cells again in pairs of both revisions, at most twice.", "--rerun-unclear", usual=False
    )
    overwrite: OverwriteOutputs = False


CsvFiles = Annotated[list[Path], Argument(help="Results files of mtabench.", metavar="CSV...")]
PlotOut = Annotated[File, Output(*OUT, help="The folder for the charts; NAME-charts beside NAME.csv if not given.")]
KINDS_OF_CHARTS = sorted(
    path.stem.replace("_", "-") for path in (Path(__file__).parent / "charts/kinds").glob("[!_]*.py")
)
ChartKinds = Annotated[
    Texts,
    Option(
        **_some_of(lambda: KINDS_OF_CHARTS),
        help=f"One or more of {', '.join(KINDS_OF_CHARTS)}; all that the results can give if not given.",
    ),
]
Themes = Annotated[Names, Option(help="light, dark or both: light,dark. A dark chart is called NAME-dark.")]
Formats = Annotated[Names, Option(help="png, svg or both: png,svg.")]
PassName = Annotated[str, Argument(**_one_of(KERNEL_PASSES), help="fwd, bwd or decode.", metavar="PASS")]
ProfiledPass = Annotated[Text, Argument(**_one_of(KERNEL_PASSES), help="fwd, bwd or decode.", metavar="[PASS]")]
Tools = Annotated[Texts, Option(help="Profilers, one or more of trace,ncu; those that can be had here if not given.")]
ProfileOut = Annotated[File, Output(*OUT, help="The folder to write; mtabench-results/profile-PASS-TIME if not given.")]
NcuReport = Annotated[File, Option(help="Instead of measuring, read a saved `ncu --import REPORT --csv --page raw`.")]
DeviceName = Annotated[Text, Option(help="The GPU that is meant, such as h200; this machine's if not given.")]
ProfileIn = Annotated[
    list[Path] | None,
    Option(
        "--profile",
        metavar="<path>",
        help="A folder of `mtabench profile`: bytes that Nsight Compute counted stand beside.",
    ),
]
RunCsv = Annotated[Path, Argument(help="A results file of mtabench.", metavar="RUN.csv")]
ReportOut = Annotated[File, Output(*OUT, help="The HTML page; NAME-report.html beside NAME.csv if not given.")]
ReportOverwrite = Annotated[bool, Output("--overwrite", help="Replace a file that is there and is no report.")]
ResultsFolder = Annotated[Path, Argument(help="A folder of results files; those below it count.", metavar="RESULTS")]
SiteOut = Annotated[Path, Output(*OUT, help="The folder to write: a new one, or an earlier dashboard.")]
RepoUrl = Annotated[Text, Option(help="The repository, for links to commits, such as https://github.com/me/it.")]
Title = Annotated[Text, Option(help="What the page is called.")]
Days = Annotated[int, Option(**WHOLE, help="Changes of so many days before the last run are news.")]
BaseCsv = Annotated[Path, Argument(help="Results of the code before.", metavar="BASE.csv")]
HeadCsv = Annotated[Path, Argument(help="Results of the code after, on the same device.", metavar="HEAD.csv")]
CsvFile = Annotated[Path, Argument(help="A results file of mtabench.", metavar="CSV")]
Where = Annotated[
    list[str] | None,
    Option(metavar="<str>", help="Only rows such as impl=triton,eager,seq=1k..4k,status!=ok; * stands for any text."),
]
Sort = Annotated[Text, Option(help="Columns to sort by, such as seq,-speedup; - puts the largest first.")]
PrintMarkdown = Annotated[bool, Output("--markdown", help="Print a table in GitHub's Markdown instead.")]
Overwrite = Annotated[bool, Output("--overwrite", help="Replace --out if it is there.")]
NewCsv = Annotated[Path, Output(*OUT, help="The results file to write; samples go beside it.")]
Latest = Annotated[bool, Option("--latest", help="Of a cell that several files have, take the row that started last.")]
AcrossDevices = Annotated[
    bool, Output("--across-devices", help="Show the changes of times from one device to another, without a verdict.")
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
Targets = Annotated[
    Text, Option("--target", help="Compute capabilities, such as sm_90,sm_100, or all; needs none of these GPUs.")
]
KernelNames = Annotated[Texts, Option("--kernel", help="Only kernels whose names hold one of these: fwd,decode.")]
IfCausal = Annotated[
    bool | None, Option("--causal/--no-causal", rich_help_panel=PANELS[0], help="Whether a query sees only the past.")
]
AllShapes = Annotated[
    bool, Option("--all-shapes", help="Every shape that takes a path of its own through the kernels.")
]
StaticBaseline = Annotated[
    File, Option("--baseline", help="Compare with a file of --json-file; exit with 1 if a kernel got worse.")
]
Accept = Annotated[bool, Option("--accept", help="With --baseline: write what is compiled now into that file.")]
JsonOut = Annotated[File, Output("--json-file", help="Write the kernels as JSON; also makes a baseline.")]
MemoryPass = Annotated[Names, Option("--pass", **_one_of(KERNEL_PASSES), help="fwd, bwd or decode.")]
MemorySize = Annotated[Text, Option(help="Memory to fit into, such as 80GB or 24GiB; the device's if not given.")]
Measure = Annotated[
    bool, Option("--measure", help="Measure memory bandwidth and matmul rate as well, and keep them for sweeps.")
]
CeilingsOut = Annotated[
    File, Output(*OUT, help="Where ceilings are kept; mtabench-results/ceilings.json if not given.")
]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """--gpus, --workers and --scheduler as typed; None where nothing was typed."""

    gpus: Text = crew("Spread the sweep over GPUs of this machine: all, or numbers such as 0,2.")
    workers: int | None = crew("With --device cpu: so many processes, each on its share of the cores.", **WHOLE)
    scheduler: Text = crew(
        "Spread the sweep over the Dask cluster at tls://HOST:PORT. Needs [cluster]; docs/cluster.md."
    )

    @property
    def anything(self) -> bool:
        """Whether other processes than this one are to measure."""
        return self != ClusterOptions()

    def device(self, options: Options) -> str | None:
        """ "cuda" or "cpu", whatever this machine has; None if this process measures, on what it finds.

        Raises UsageError for options that exclude or need each other, and without Dask.
        """
        given = [name for name, value in asdict(self).items() if value is not None]
        if not given:
            return None
        if len(given) > 1:
            raise UsageError(
                f"--{given[0]} and --{given[1]} exclude each other: --gpus and --workers start workers on this "
                "machine, --scheduler uses those of a cluster that is there"
            )
        if options.isolate:
            raise UsageError(
                "--isolate starts a process a cell, and a worker measures all cells of a shape in one; drop --isolate "
                f"or --{given[0]}"
            )
        if self.gpus is not None and options.device == "cpu":
            raise UsageError(
                f"--gpus {self.gpus} measures on GPUs and --device cpu on the CPU; for processes that share the CPU "
                "give --workers 2 --device cpu"
            )
        if self.workers is not None and options.device != "cpu":
            raise UsageError(
                f"--workers {self.workers} shares the cores of this CPU and needs --device cpu; GPUs are for --gpus all"
            )
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; it must be 1 or more")
        if self.scheduler is not None and find_spec("distributed") is None:
            raise UsageError(
                "--scheduler needs the package distributed, which is not installed; pip install 'mtabench[cluster]'"
            )
        return "cpu" if options.device == "cpu" else "cuda"


NAMES = tuple(field.name for field in fields(ClusterOptions))
