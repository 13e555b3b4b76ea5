"""The command line: parses, calls, prints. What a command needs is imported inside it, so that --help is quick."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mtabench import options as o
from mtabench.errors import UsageError
from mtabench.exit_handling import run_and_exit
from mtabench.help import App
from mtabench.options import ClusterOptions, Options
from mtabench.problem.case import KERNEL_PASSES, MODEL
from mtabench.sweeps.plan import check_axes, usual_axes

app = App(context_settings={"help_option_names": ["-h", "--help"]})
results_app = App(help="Make results files of other ones.", add_completion=False)
app.add_typer(results_app, name="results", rich_help_panel="Look")
ci_app = App(help="Gate pull requests and publish a dashboard by GitHub Actions.", add_completion=False)
app.add_typer(ci_app, name="ci", rich_help_panel="Compare")

OF_ANOTHER = {"ignore_unknown_options": True}  # unknown options belong to the sweep that is to run


def _print_version(wanted: bool) -> None:
    if wanted:
        from mtabench import __version__

        print(f"mtabench {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
]


@app.callback()
def mtabench(version: Version = False) -> None:
    """Measure attention kernels so that the numbers can be trusted. Begin with: mtabench fwd --dry-run"""


@app.command(
    "bwd",
    help="Time the backward pass alone. All gradients are computed: of q, k, v and all that is trained.",
    epilog=usual_axes("bwd"),
    rich_help_panel="Measure",
)
@app.command("fwd", help="Time the forward pass.", epilog=usual_axes("fwd"), rich_help_panel="Measure")
def forward_or_backward(
    options: Annotated[Options, o.Fields(*o.AXES, "causal", "device", "preset", *o.MEASURING)],
    cluster: Annotated[ClusterOptions, o.Fields()],
    output: Annotated[o.SweepOutput, o.Fields()],
) -> int:
    from mtabench.commands.sweep import run

    return run(options, cluster, output)


@app.command(epilog=usual_axes("decode"), rich_help_panel="Measure")
def decode(
    options: Annotated[Options, o.Fields(*o.AXES, *o.DECODE, "device", "preset", *o.MEASURING)],
    cluster: Annotated[ClusterOptions, o.Fields()],
    output: Annotated[o.SweepOutput, o.Fields()],
) -> int:
    """Time one decode step. Each sequence has one new query and a KV cache of --seq tokens."""
    from mtabench.commands.sweep import run

    return run(options, cluster, output)


@app.command(MODEL, rich_help_panel="Measure")
def model(
    options: Annotated[Options, o.Fields(*o.MODEL_AXES, *o.MEASURING, **o.OF_MODEL)],
    output: Annotated[o.SweepOutput, o.Fields()],
) -> int:
    """Time a whole transformer: a training step, a prompt, or a generated token. Compares with plain attention."""
    from mtabench.commands.sweep import run

    return run(options, ClusterOptions(), output)


@app.command(rich_help_panel="Measure")
def verify(
    options: Annotated[Options, o.Fields(*o.CHECKED, **o.OF_VERIFY)],
    causal: o.IfCausal = None,
    json: o.PrintJson = False,
) -> int:
    """Check results, time nothing. Errors against float64, causality, and what else any correct kernel obeys."""
    check_axes(options)  # here and below: torch and matplotlib take seconds to import, a typing error needs none
    from mtabench.commands.verify import run

    return run(options, causal, json)


@app.command("list", rich_help_panel="Measure")
def list_(device: o.Device = "auto", json: o.PrintJson = False) -> int:
    """Show what can be measured. Each implementation is ready on this machine, or the reason why not is given."""
    from mtabench.commands.list import run

    return run(device, json)


@app.command(rich_help_panel="Measure")
def env(
    measure: o.Measure = False, device: o.Device = "auto", out: o.CeilingsOut = None, json: o.PrintJson = False,
) -> int:  # fmt: skip
    """Show device and versions, and what the device can do at most if that was measured."""
    from mtabench.commands.env import run

    return run(device, measure, out, json)


@app.command(rich_help_panel="Understand")
def profile(
    options: Annotated[Options, o.Fields(*o.AXES, "causal", *o.DECODE, "device", "preset")],
    pass_: o.ProfiledPass = None,
    tools: o.Tools = None,
    out: o.ProfileOut = None,
    ncu_report: o.NcuReport = None,
) -> int:
    """Say why kernels are as fast as they are: traces, times of kernels, hardware counters, and what bounds each."""
    from mtabench.commands.profile import run

    return run(replace(options, pass_=pass_) if pass_ else None, tools, out, ncu_report)


@app.command(rich_help_panel="Understand")
def explain(
    options: Annotated[Options, o.Fields(*o.AXES, "causal", *o.DECODE, "preset")],
    pass_: o.PassName,
    device_name: o.DeviceName = None,
) -> int:
    """Predict the time of cells and say what it is made of. Needs no GPU if one is named; measures nothing."""
    from mtabench.commands.explain import run

    return run(replace(options, pass_=pass_), device_name)


@app.command(rich_help_panel="Understand")
def memory(
    options: Annotated[Options, o.Fields(*o.AXES, "causal", *o.DECODE, "preset", seq=o.shape(o.SEQ, usual="1k..128k"))],
    pass_: o.MemoryPass = "fwd",
    device_name: o.DeviceName = None,
    memory: o.MemorySize = None,
) -> int:
    """Say what implementations store and move: score matrix against tile, traffic, and where memory ends."""
    options = replace(options, pass_=pass_)
    check_axes(options)
    from mtabench.commands.memory import run

    return run(options, device_name, memory)


@app.command("inspect", rich_help_panel="Understand")
def inspect_(
    options: Annotated[Options, o.Fields("head_dim", "conv", "dtype", "seq", conv=o.TAPS)],
    target: o.Targets = None, kernel: o.KernelNames = None, causal: o.IfCausal = None, all_shapes: o.AllShapes = False,
    baseline: o.StaticBaseline = None, accept: o.Accept = False,
    json_file: o.JsonOut = None, overwrite: o.OverwriteOutputs = False,
) -> int:  # fmt: skip
    """Compile the kernels for GPUs that are not there. Shows registers, spills, occupancy and what limits it."""
    from mtabench.commands.inspect import run

    shapes = {name: getattr(options, name) for name in ("head_dim", "conv", "dtype", "seq")} | {"causal": causal}
    return run(target, kernel, shapes, all_shapes, baseline, accept, json_file, overwrite)


@app.command(rich_help_panel="Understand")
def roofline(csv: o.CsvFiles, profile: o.ProfileIn = None) -> int:
    """Place results below the roofline: work, bytes, the least time that they take, and what is left to win."""
    _check_files(csv)
    from mtabench.commands.roofline import run

    return run(csv, profile or [])


@app.command(rich_help_panel="Look")
def plot(
    csv: o.CsvFiles, kind: o.ChartKinds = None, theme: o.Themes = "light", formats: o.Formats = "png,svg",
    out: o.PlotOut = None,
) -> int:  # fmt: skip
    """Draw charts from results files. Each says in its title what the results show."""
    _check_files(csv)
    from mtabench.commands.plot import run

    return run(csv, kind, theme, formats, out)


@app.command(rich_help_panel="Look")
def report(csv: o.RunCsv, out: o.ReportOut = None, overwrite: o.ReportOverwrite = False) -> int:
    """Write one run as a page to explore. It is one file and asks for nothing outside it."""
    _check_files([csv])
    from mtabench.commands.report import run

    return run(csv, out, overwrite)


@app.command(rich_help_panel="Look")
def dashboard(
    results: o.ResultsFolder, out: o.SiteOut, repo_url: o.RepoUrl = None, title: o.Title = None,
    threshold: o.Threshold = "2%", days: o.Days = 30,
) -> int:  # fmt: skip
    """Write the history of every cell as a web site. It says what got slower, when and by which commit."""
    from mtabench.commands.dashboard import run

    return run(results, out, repo_url, title, threshold, days)


def _check_files(paths: list[Path]) -> None:
    """Raise UsageError for a results file that is not there."""
    from mtabench.results.csv_reading import check_file

    for path in paths:
        check_file(path)


@app.command(rich_help_panel="Compare")
def compare(
    context: typer.Context,
    base: o.BaseCsv,
    head: o.HeadCsv,
    typed: Annotated[o.Comparing, o.Fields("threshold", "fail_on", "format_", "markdown", "junit", "overwrite")],
    across_devices: o.AcrossDevices = False,
    json: o.PrintJson = False,
) -> int:
    """Compare two runs of the same cells. Exits with 1 if one got slower, broke or is gone, to gate CI on it."""
    for name in ("threshold", "fail_on", "junit") if across_devices else ():
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for verdicts, and --across-devices gives none; leave one of them out")
    from mtabench.commands.compare import run
    from mtabench.comparing.reporting import comparison_options

    return run(base, head, comparison_options(replace(typed, format_="json") if json else typed), across_devices)


@app.command(context_settings=OF_ANOTHER, rich_help_panel="Compare")
def ab(
    *,
    sweep: o.SweepArguments,
    base: o.BaseRevision,
    head: o.HeadRevision = None,
    pairs: o.Pairs = 5,
    out: o.FolderOut = None,
    typed: Annotated[o.Comparing, o.Fields()],
) -> int:
    """Measure two revisions and compare them. Both run here, in fresh processes that take turns; exits as compare."""
    from mtabench.commands.ab import run
    from mtabench.comparing.reporting import comparison_options

    return run(_sweep_words(sweep), base, head, pairs, out, typed.rerun_unclear, comparison_options(typed))


@app.command(context_settings=OF_ANOTHER, rich_help_panel="Compare")
def history(
    commits: o.Commits, sweep: o.SweepArguments, out: o.HistoryOut, most: o.MostCommits = None,
) -> int:  # fmt: skip
    """Measure past commits, so that a dashboard begins with a past. Each runs in a worktree, in a fresh process."""
    from mtabench.commands.history import run

    return run(_sweep_words(sweep), commits, most, out)


@app.command(rich_help_panel="Look")
def show(
    csv: o.CsvFile, where: o.Where = None, sort: o.Sort = None, markdown: o.PrintMarkdown = False,
    json: o.PrintJson = False,
) -> int:  # fmt: skip
    """Print a results file as a table that fits the terminal."""
    from mtabench.commands.show import run

    return run(csv, where or [], sort, markdown, json)


@results_app.command()
def merge(csv: o.CsvFiles, out: o.NewCsv, latest: o.Latest = False, overwrite: o.Overwrite = False) -> int:
    """Put the rows of several results files and their samples into one."""
    from mtabench.commands.results import merge

    return merge(csv, out, latest, overwrite)


@results_app.command()
def select(csv: o.CsvFile, out: o.NewCsv, where: o.Where = None, overwrite: o.Overwrite = False) -> int:
    """Put rows of a results file and their samples into another: those of --where, or all."""
    from mtabench.commands.results import select_rows

    return select_rows(csv, where or [], out, overwrite)


@ci_app.command(context_settings=OF_ANOTHER)
def init(
    sweep: o.SweepArguments, action: o.ActionName = None, runner: o.Runner = "self-hosted,linux,gpu",
    overwrite: o.OverwriteWorkflows = False,
) -> int:  # fmt: skip
    """Write two workflows into a project: a gate on pull requests, and a dashboard of its branch."""
    from mtabench.commands.ci import run

    return run(_sweep_words(sweep), action, runner, overwrite)


def _sweep_words(words: list[str]) -> Any:
    """PASS and the options of a sweep, checked by the command that they are for."""
    from mtabench.comparing.pairs import SweepWords

    pass_, options = words[0], words[1:]
    if pass_ not in (*KERNEL_PASSES, MODEL):
        raise UsageError(
            f"{pass_!r} is no pass; expected fwd, bwd, decode or model, and after it the options of that sweep"
        )
    command = typer.main.get_command(app).commands[pass_]  # type: ignore[attr-defined]
    typed = command.make_context(pass_, options).params
    if typed["cells"]:  # processes start in other folders, and of an option given twice the last counts
        words = [*words, "--cells", str(typed["cells"].resolve())]
    return SweepWords(tuple(words), typed)


def command_line() -> Any:
    """Run what was typed; the exit code. Raises what the command raises."""
    return app(sys.argv[1:] or ["--help"], prog_name="mtabench", standalone_mode=False)


def main() -> None:
    """The same in `mtabench.__main__`, for callers that have imported this module already."""
    run_and_exit(command_line)
