"""The command line: parses, calls, prints. What a command needs is imported inside it, so that --help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mtabench import options as o
from mtabench.cluster.options import ClusterOptions
from mtabench.ending import run_and_exit
from mtabench.errors import UsageError
from mtabench.help import App
from mtabench.problem.case import KERNEL_PASSES, MODEL
from mtabench.sweeps.plan import Options, check_axes, usual_axes

app = App(context_settings={"help_option_names": ["-h", "--help"]})
results_app = App(help="Make results files of other ones.", add_completion=False)
app.add_typer(results_app, name="results", rich_help_panel="Look")
ci_app = App(help="Gate pull requests and publish a dashboard by GitHub Actions.", add_completion=False)
app.add_typer(ci_app, name="ci", rich_help_panel="Compare")


def _print_version(asked: bool) -> None:
    if asked:
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
    context: typer.Context,
    seq: o.Seq = None, head_dim: o.HeadDim = None, conv: o.Conv = None, impl: o.Impl = None, op: o.Op = None,
    mix: o.Mix = None, post_conv: o.PostConv = None, norm: o.Norm = None, gate: o.Gate = None, layer: o.Layer = None,
    batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None, kv_heads: o.KvHeads = None,
    dtype: o.Dtype = None, causal: o.Causal = True, device: o.Device = "auto", preset: o.PresetName = None,
    cells: o.Cells = None, baseline: o.Baseline = None, timer: o.Timer = "auto", cache: o.Cache = "cold",
    rounds: o.Rounds = None, time_limit: o.TimeLimit = None, target: o.Target = None, isolate: o.Isolate = False,
    cell_timeout: o.CellTimeout = None, seed: o.Seed = None,
    gpus: o.Gpus = None, workers: o.Workers = None, scheduler: o.Scheduler = None, on: o.On = None,
    tls_ca: o.TlsCa = None, tls_cert: o.TlsCert = None, tls_key: o.TlsKey = None, ranks: o.Ranks = None,
    out: o.Out = None, resume: o.Resume = False, dry_run: o.DryRun = False, plot: o.Plot = False,
    quiet: o.Quiet = False,
) -> None:  # fmt: skip
    from mtabench.commands.sweep import run

    options = Options(
        context.info_name or "", seq=seq, head_dim=head_dim, conv=conv, impl=impl, op=op, mix=mix, post_conv=post_conv,
        norm=norm, gate=gate, layer=layer, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, dtype=dtype,
        causal=causal, device=device, preset=preset, cells=cells, baseline=baseline, timer=timer, cache=cache,
        rounds=rounds, time_limit=time_limit, target=target, isolate=isolate, cell_timeout=cell_timeout, seed=seed,
    )  # fmt: skip
    asked = ClusterOptions(gpus, workers, scheduler, on, tls_ca, tls_cert, tls_key)
    raise typer.Exit(run(options, asked, ranks, out, resume, dry_run, plot, quiet))


@app.command(epilog=usual_axes("decode"), rich_help_panel="Measure")
def decode(
    seq: o.Seq = None, head_dim: o.HeadDim = None, conv: o.Conv = None, impl: o.Impl = None, op: o.Op = None,
    mix: o.Mix = None, post_conv: o.PostConv = None, norm: o.Norm = None, gate: o.Gate = None, layer: o.Layer = None,
    batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None, kv_heads: o.KvHeads = None,
    dtype: o.Dtype = None, splits: o.Splits = "auto", page_size: o.PageSize = "none", device: o.Device = "auto",
    preset: o.PresetName = None, cells: o.Cells = None, baseline: o.Baseline = None, timer: o.Timer = "auto",
    cache: o.Cache = "cold", rounds: o.Rounds = None, time_limit: o.TimeLimit = None, target: o.Target = None,
    isolate: o.Isolate = False, cell_timeout: o.CellTimeout = None, seed: o.Seed = None, gpus: o.Gpus = None,
    workers: o.Workers = None, scheduler: o.Scheduler = None, on: o.On = None, tls_ca: o.TlsCa = None,
    tls_cert: o.TlsCert = None, tls_key: o.TlsKey = None, out: o.Out = None, resume: o.Resume = False,
    dry_run: o.DryRun = False, plot: o.Plot = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Time one decode step. Each sequence has one new query and a KV cache of --seq tokens."""
    from mtabench.commands.sweep import run

    options = Options(
        "decode", seq=seq, head_dim=head_dim, conv=conv, impl=impl, op=op, mix=mix, post_conv=post_conv, norm=norm,
        gate=gate, layer=layer, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, dtype=dtype, splits=splits,
        page_size=page_size, device=device, preset=preset, cells=cells, baseline=baseline, timer=timer, cache=cache,
        rounds=rounds, time_limit=time_limit, target=target, isolate=isolate, cell_timeout=cell_timeout, seed=seed,
    )  # fmt: skip
    asked = ClusterOptions(gpus, workers, scheduler, on, tls_ca, tls_cert, tls_key)
    raise typer.Exit(run(options, asked, None, out, resume, dry_run, plot, quiet))


@app.command(rich_help_panel="Measure")
def model(
    mode: o.Mode = None, preset: o.ModelPreset = None, layers: o.Layers = None, heads: o.ModelHeads = None,
    dim: o.Dim = None, attention: o.Attention = None, conv: o.OneConv = None, impl: o.ModelImpl = None,
    seq: o.Seq = None, batch: o.Batch = None, dtype: o.Dtype = None, device: o.Device = "auto",
    cells: o.Cells = None, baseline: o.Baseline = None, timer: o.Timer = "auto", cache: o.Cache = "cold",
    rounds: o.Rounds = None, time_limit: o.TimeLimit = None, target: o.Target = None, isolate: o.Isolate = False,
    cell_timeout: o.CellTimeout = None, seed: o.Seed = None,
    out: o.Out = None, resume: o.Resume = False, dry_run: o.DryRun = False, plot: o.Plot = False,
    quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Time a whole transformer: a training step, a prompt, or a generated token. Compares with plain attention."""
    from mtabench.commands.sweep import run

    options = Options(
        MODEL, mode=mode, preset=preset, layers=layers, heads=heads, dim=dim, attention=attention, conv=conv, impl=impl,
        seq=seq, batch=batch, dtype=dtype, device=device, cells=cells, baseline=baseline, timer=timer, cache=cache,
        rounds=rounds, time_limit=time_limit, target=target, isolate=isolate, cell_timeout=cell_timeout, seed=seed,
    )  # fmt: skip
    raise typer.Exit(run(options, ClusterOptions(), None, out, resume, dry_run, plot, quiet))


@app.command(rich_help_panel="Measure")
def verify(
    impl: o.Impl = None, device: o.Device = "auto", seed: o.Seed = None, dtype: o.Dtype = None,
    op: o.CheckedOp = None, conv: o.Conv = None, mix: o.Mix = None, post_conv: o.PostConv = None, norm: o.Norm = None,
    gate: o.Gate = None, seq: o.Seq = None, head_dim: o.HeadDim = None, kv_heads: o.CheckedKvHeads = None,
    causal: o.IfCausal = None, json: o.PrintJson = False,
) -> None:  # fmt: skip
    """Check results, time nothing. Errors against float64, causality, and what else any correct kernel obeys."""
    options = Options(
        "verify", impl=impl, device=device, seed=seed, dtype=dtype, op=op, conv=conv, mix=mix, post_conv=post_conv,
        norm=norm, gate=gate, seq=seq, head_dim=head_dim, kv_heads=kv_heads,
    )  # fmt: skip
    check_axes(options)  # here and below: torch and matplotlib take seconds to import, and a slip is told before
    from mtabench.commands.verify import run

    raise typer.Exit(run(options, causal, json))


@app.command("list", rich_help_panel="Measure")
def list_(device: o.Device = "auto", anew: o.Anew = False, json: o.PrintJson = False) -> None:
    """Show what can be measured. Each implementation is ready on this machine, or the reason why not is given."""
    from mtabench.commands.list import run

    raise typer.Exit(run(device, anew, json))


@app.command(rich_help_panel="Measure")
def env(
    measure: o.Measure = False, device: o.Device = "auto", out: o.CeilingsOut = None, anew: o.Anew = False,
    json: o.PrintJson = False,
) -> None:  # fmt: skip
    """Show device and versions, and what the device can do at most if that was measured."""
    from mtabench.commands.env import run

    raise typer.Exit(run(device, measure, out, anew, json))


@app.command(rich_help_panel="Measure")
def tune(
    passes: o.Passes = "fwd,bwd,decode", seq: o.Seq = None, head_dim: o.HeadDim = None, conv: o.Taps = None,
    batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None, kv_heads: o.KvHeads = None,
    dtype: o.Dtype = None, causal: o.Causal = True, preset: o.PresetName = None, out: o.TunedOut = None,
) -> None:  # fmt: skip
    """Choose Triton's tile sizes and the backend of "auto" by timing. Calls look the choice up; none tunes."""
    options = Options(
        "", seq=seq, head_dim=head_dim, conv=conv, batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads,
        dtype=dtype, causal=causal, preset=preset,
    )  # fmt: skip
    check_axes(options)
    from mtabench.commands.tune import run

    raise typer.Exit(run(passes, options, out))


@app.command(rich_help_panel="Understand")
def profile(
    pass_: o.ProfiledPass = None, seq: o.Seq = None, head_dim: o.HeadDim = None, conv: o.Conv = None,
    impl: o.Impl = None, batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None,
    kv_heads: o.KvHeads = None, op: o.Op = None, mix: o.Mix = None, post_conv: o.PostConv = None,
    norm: o.Norm = None, gate: o.Gate = None, layer: o.Layer = None, dtype: o.Dtype = None, causal: o.Causal = True,
    splits: o.Splits = "auto", page_size: o.PageSize = "none", device: o.Device = "auto", preset: o.PresetName = None,
    tools: o.Tools = None, out: o.ProfileOut = None, ncu_report: o.NcuReport = None,
) -> None:  # fmt: skip
    """Say why kernels are as fast as they are: traces, times of kernels, hardware counters, and what bounds each."""
    from mtabench.commands.profile import run

    options = None if pass_ is None else Options(
        pass_, seq=seq, head_dim=head_dim, conv=conv, impl=impl, batch=batch, tokens=tokens, heads=heads,
        kv_heads=kv_heads, op=op, mix=mix, post_conv=post_conv, norm=norm, gate=gate, layer=layer, dtype=dtype,
        causal=causal, splits=splits, page_size=page_size, device=device, preset=preset,
    )  # fmt: skip
    raise typer.Exit(run(options, tools, out, ncu_report))


@app.command(rich_help_panel="Understand")
def explain(
    pass_: o.PassName, seq: o.Seq = None, head_dim: o.HeadDim = None, conv: o.Conv = None, impl: o.Impl = None,
    batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None, kv_heads: o.KvHeads = None,
    op: o.Op = None, mix: o.Mix = None, post_conv: o.PostConv = None, norm: o.Norm = None, gate: o.Gate = None,
    layer: o.Layer = None, dtype: o.Dtype = None, causal: o.Causal = True, splits: o.Splits = "auto",
    page_size: o.PageSize = "none", preset: o.PresetName = None, device_name: o.DeviceName = None,
    results: o.ResultsCsv = None, ceilings: o.CeilingsIn = None,
) -> None:  # fmt: skip
    """Predict the time of cells and say what it is made of. Needs no GPU if one is named; measures nothing."""
    from mtabench.commands.explain import run

    options = Options(
        pass_, seq=seq, head_dim=head_dim, conv=conv, impl=impl, batch=batch, tokens=tokens, heads=heads,
        kv_heads=kv_heads, op=op, mix=mix, post_conv=post_conv, norm=norm, gate=gate, layer=layer, dtype=dtype,
        causal=causal, splits=splits, page_size=page_size, preset=preset,
    )  # fmt: skip
    raise typer.Exit(run(options, device_name, results or [], ceilings))


@app.command(rich_help_panel="Understand")
def memory(
    pass_: o.MemoryPass = "fwd", seq: o.Seq = "1k..128k", head_dim: o.HeadDim = None, conv: o.Conv = None,
    impl: o.Impl = None, op: o.Op = None, batch: o.Batch = None, tokens: o.Tokens = None, heads: o.Heads = None,
    kv_heads: o.KvHeads = None, mix: o.Mix = None, post_conv: o.PostConv = None, norm: o.Norm = None,
    gate: o.Gate = None, layer: o.Layer = None, dtype: o.Dtype = None, causal: o.Causal = True,
    splits: o.Splits = "auto", page_size: o.PageSize = "none", preset: o.PresetName = None,
    device_name: o.DeviceName = None, memory: o.MemorySize = None, measure: o.Trace = False,
    csv: o.CellsCsv = None, json_file: o.CellsJson = None, overwrite: o.OverwriteOutputs = False,
) -> None:  # fmt: skip
    """Say what implementations store and move: score matrix against tile, traffic, and where memory ends."""
    options = Options(
        pass_, seq=seq, head_dim=head_dim, conv=conv, impl=impl, batch=batch, tokens=tokens, heads=heads,
        kv_heads=kv_heads, op=op, mix=mix, post_conv=post_conv, norm=norm, gate=gate, layer=layer, dtype=dtype,
        causal=causal, splits=splits, page_size=page_size, preset=preset,
    )  # fmt: skip
    check_axes(options)
    from mtabench.commands.memory import run

    raise typer.Exit(run(options, device_name, memory, measure, csv, json_file, overwrite))


@app.command("inspect", rich_help_panel="Understand")
def inspect_(
    target: o.Targets = None, kernel: o.KernelNames = None, head_dim: o.HeadDim = None, conv: o.Taps = None,
    dtype: o.Dtype = None, seq: o.Seq = None, causal: o.IfCausal = None, all_shapes: o.AllShapes = False,
    sass: o.Sass = None, baseline: o.StaticBaseline = None, accept: o.Accept = False,
    json_file: o.JsonOut = None, csv: o.CsvOut = None, overwrite: o.OverwriteOutputs = False,
) -> None:  # fmt: skip
    """Compile the kernels for GPUs that are not there. Shows registers, spills, occupancy and what limits it, SASS."""
    from mtabench.commands.inspect import run
    from mtabench.static.shapes import ShapeFilter

    asked = ShapeFilter(head_dim, conv, dtype, seq, causal)
    outputs = {"json-file": json_file, "csv": csv}
    raise typer.Exit(run(target, kernel, asked, all_shapes, sass, baseline, accept, outputs, overwrite))


@app.command(rich_help_panel="Understand")
def roofline(
    csv: o.CsvFiles, profile: o.ProfileIn = None, out: o.RooflineOut = None, overwrite: o.Overwrite = False,
) -> None:  # fmt: skip
    """Place results below the roofline: work, bytes, the least time that they take, and what is left to win."""
    _check_files(csv)
    from mtabench.commands.roofline import run

    raise typer.Exit(run(csv, profile or [], out, overwrite))


@app.command(rich_help_panel="Look")
def plot(
    csv: o.CsvFiles, kind: o.ChartKinds = None, theme: o.Themes = "light", formats: o.Formats = "png,svg",
    out: o.PlotOut = None,
) -> None:  # fmt: skip
    """Draw charts from results files. Each says in its title what the results show."""
    _check_files(csv)
    from mtabench.commands.plot import run

    raise typer.Exit(run(csv, kind, theme, formats, out))


@app.command(rich_help_panel="Look")
def report(
    csv: o.RunCsv, out: o.ReportOut = None, markdown: o.ReportMarkdown = None, overwrite: o.ReportOverwrite = False,
) -> None:  # fmt: skip
    """Write one run as a page to explore and as Markdown. The page is one file and asks for nothing outside it."""
    _check_files([csv])
    from mtabench.commands.report import run

    raise typer.Exit(run(csv, out, markdown, overwrite))


@app.command(rich_help_panel="Look")
def dashboard(
    results: o.ResultsFolder, out: o.SiteOut, repo_url: o.RepoUrl = None, title: o.Title = None,
    threshold: o.Threshold = "2%", days: o.Days = 30,
) -> None:  # fmt: skip
    """Write the history of every cell as a web site. It says what got slower, when and by which commit."""
    from mtabench.commands.dashboard import run

    raise typer.Exit(run(results, out, repo_url, title, threshold, days))


def _check_files(paths: list[Path]) -> None:
    """Raise UsageError for a results file that is not there."""
    from mtabench.results.csv_reading import check_file

    for path in paths:
        check_file(path)


def _is_typed(source: Any) -> bool:
    """Whether a parameter's value comes from the command line, and is no default."""
    return source is not None and source.name == "COMMANDLINE"


@app.command(rich_help_panel="Compare")
def compare(
    context: typer.Context, base: o.BaseCsv, head: o.HeadCsv, threshold: o.Threshold = "2%",
    fail_on: o.FailOn = "broken,slower,gone",
    format_: o.CompareFormat = "table", markdown: o.MarkdownOut = None, junit: o.JunitOut = None,
    github_action_benchmark: o.GithubOut = None, bencher: o.BencherOut = None, rerun_unclear: o.RerunUnclear = False,
    across_devices: o.AcrossDevices = False, json: o.PrintJson = False, overwrite: o.OverwriteOutputs = False,
) -> None:  # fmt: skip
    """Compare two runs of the same cells. Exits with 1 if one got slower, broke or is gone, to gate CI on it."""
    from mtabench.commands.compare import run, run_across
    from mtabench.comparing.reporting import comparison_options

    outputs = {
        "markdown": markdown, "junit": junit, "github_action_benchmark": github_action_benchmark, "bencher": bencher,
    }  # fmt: skip
    shown = "json" if json else format_
    asked = comparison_options(threshold, fail_on, shown, outputs, overwrite)
    if across_devices:
        sources = {name: context.get_parameter_source(name) for name in ("threshold", "fail_on", "rerun_unclear")}
        raise typer.Exit(run_across(base, head, asked, [name for name, one in sources.items() if _is_typed(one)]))
    raise typer.Exit(run(base, head, asked, rerun_unclear))


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel="Compare")
def ab(
    sweep: o.SweepArguments, base: o.BaseRevision, head: o.HeadRevision = None, pairs: o.Pairs = 5,
    out: o.FolderOut = None, threshold: o.Threshold = "2%", fail_on: o.FailOn = "broken,slower,gone",
    format_: o.CompareFormat = "table", markdown: o.MarkdownOut = None, junit: o.JunitOut = None,
    github_action_benchmark: o.GithubOut = None, bencher: o.BencherOut = None, rerun_unclear: o.RerunUnclear = False,
    overwrite: o.OverwriteOutputs = False,
) -> None:  # fmt: skip
    """Measure two revisions and compare them. Both run here, in fresh processes that take turns; exits as compare."""
    from mtabench.commands.ab import run
    from mtabench.comparing.reporting import comparison_options

    outputs = {
        "markdown": markdown, "junit": junit, "github_action_benchmark": github_action_benchmark, "bencher": bencher,
    }  # fmt: skip
    words, asked = _sweep_words(sweep), comparison_options(threshold, fail_on, format_, outputs, overwrite)
    raise typer.Exit(run(words, base, head, pairs, out, rerun_unclear, asked))


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel="Compare")
def noise(
    sweep: o.SweepArguments, pairs: o.Pairs = 5, threshold: o.Threshold = "2%", out: o.NoiseOut = None,
    resume: o.NoiseResume = False,
) -> None:  # fmt: skip
    """Measure this machine's own noise. Says how often the same code fails, and the smallest change that is seen."""
    from mtabench.commands.noise import run

    raise typer.Exit(run(_sweep_words(sweep), pairs, threshold, out, resume))


@app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel="Compare")
def history(
    commits: o.Commits, sweep: o.SweepArguments, out: o.HistoryOut, most: o.MostCommits = None,
) -> None:  # fmt: skip
    """Measure past commits, so that a dashboard begins with a past. Each runs in a worktree, in a fresh process."""
    from mtabench.commands.history import run

    raise typer.Exit(run(_sweep_words(sweep), commits, most, out))


@app.command(rich_help_panel="Look")
def show(csv: o.CsvFile, where: o.Where = None, sort: o.Sort = None, json: o.PrintJson = False) -> None:
    """Print a results file as a table that fits the terminal, with pictures of its rounds."""
    from mtabench.commands.show import run

    raise typer.Exit(run(csv, where or [], sort, json))


@app.command(rich_help_panel="Look")
def export(
    csv: o.CsvFile, out: o.ExportOut = None, format_: o.ExportFormat = None, where: o.Where = None, sort: o.Sort = None,
    overwrite: o.Overwrite = False,
) -> None:  # fmt: skip
    """Turn a results file into Markdown, LaTeX, Parquet, CSV for spreadsheets, JSON Lines or what others read."""
    from mtabench.commands.export import run

    raise typer.Exit(run(csv, out, format_, where or [], sort, overwrite))


@results_app.command()
def merge(csv: o.CsvFiles, out: o.NewCsv, latest: o.Latest = False, overwrite: o.Overwrite = False) -> None:
    """Put the rows of several results files and their samples into one."""
    from mtabench.commands.results import merge

    raise typer.Exit(merge(csv, out, latest, overwrite))


@results_app.command()
def select(csv: o.CsvFile, out: o.NewCsv, where: o.Where = None, overwrite: o.Overwrite = False) -> None:
    """Put rows of a results file and their samples into another: those of --where, or all."""
    from mtabench.commands.results import select_rows

    raise typer.Exit(select_rows(csv, where or [], out, overwrite))


@ci_app.command(context_settings={"ignore_unknown_options": True})
def init(
    sweep: o.SweepArguments, action: o.ActionName = None, runner: o.Runner = "self-hosted,linux,gpu",
    overwrite: o.OverwriteWorkflows = False,
) -> None:  # fmt: skip
    """Write two workflows into a project: a gate on pull requests, and a dashboard of its branch."""
    from mtabench.commands.ci import run

    raise typer.Exit(run(_sweep_words(sweep), action, runner, overwrite))


def _sweep_words(words: list[str]) -> Any:
    """PASS and the options of a sweep, checked by the command that they are for."""
    from mtabench.comparing.sweep_words import SweepWords

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
    """The same in `mtabench.__main__`, for whoever has imported this module already."""
    run_and_exit(command_line)
