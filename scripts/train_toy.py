"""Train a small transformer on the toy task of Multi-Token Attention, with conv attention and with plain attention.

A sequence holds blocks of letters and a query of two letters; one block alone has both, in any order. The answer is
that block, or its first or last letter. Plain attention scores one query token against one key token; conv attention
adds up the scores of both letters of the query over the letters of a block.

From the paper (arXiv 2504.00927) and its code: 26 letters, 52 blocks of 5 different ones, queries of 2, a mark between
blocks and another before the query, 4 layers of width 256 with 2 heads, convolutions of 2 x 9 taps in all layers that
start as the identity, Adam with beta2 0.98, a loss on the answer alone, wrong answers counted over 3 seeds.
Ours: learned positions (the paper: rotary ones), fresh sequences in every step (a million, in 100000 steps of 64) and
so no dropout, fewer and larger steps, a higher learning rate that falls to zero and is ten times higher for the
convolutions' weights, embeddings not tied, no gated network, and without a GPU a smaller task and model.
"""

from __future__ import annotations

import csv
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from mta_kernels.conv_attention import ConvAttention
from mtabench.charts.style import LIGHT, STYLES, applied
from mtabench.environment import describe, resolve_device
from mtabench.errors import MtabenchError, UsageError
from mtabench.sweeps.axes import parse_names

LETTERS, BLOCK, QUERY = 26, 5, 2
MARK, QUERY_MARK, VOCABULARY = LETTERS, LETTERS + 1, LETTERS + 2
ANSWERS = {"all": slice(0, BLOCK), "first": slice(0, 1), "last": slice(BLOCK - 1, BLOCK)}
ATTENTIONS = {"conv": STYLES["triton"], "plain": STYLES["sdpa-flash"]}
TAPS = (QUERY, 2 * BLOCK - 1)
HELD_OUT, HELD_OUT_SEED = 2048, 2**40
EVALUATIONS = 25
WARM_UP = 0.05  # of all steps
CONV_RATE = 10  # learning rate of the convolution's weights over that of the others
PLACE = ("device", "torch", "triton", "git_sha", "git_dirty")

# What learns in minutes.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"blocks": 52, "width": 256, "heads": 2, "layers": 4, "batch": 256, "steps": 2500, "learning_rate": 1e-3},
    "cpu": {"blocks": 10, "width": 128, "heads": 2, "layers": 3, "batch": 64, "steps": 1000, "learning_rate": 2e-3},
}


@dataclass(frozen=True)
class Setting:
    """One run: a model, its task and how it is trained."""

    attention: str
    seed: int
    variant: str
    blocks: int
    width: int
    heads: int
    layers: int
    batch: int
    steps: int
    learning_rate: float

    @property
    def answer(self) -> int:
        """Letters of the answer."""
        return len(range(BLOCK)[ANSWERS[self.variant]])

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.blocks * (BLOCK + 1) + QUERY + self.answer


MEASURED = ("parameters", "step", "tokens", "train_loss", "error_rate", "seconds")
COLUMNS = (*(field.name for field in fields(Setting)), *MEASURED, *PLACE, "command")


def draw_blocks(count: int, generator: torch.Generator) -> Tensor:
    """`[count, BLOCK]`: different letters in random order."""
    return torch.rand(count, LETTERS, generator=generator, device=generator.device).topk(BLOCK).indices


def draw_sequences(count: int, blocks: int, variant: str, generator: torch.Generator) -> Tensor:
    """`[count, tokens]`: blocks with a mark after each, a query that one block alone answers, and that answer."""
    row = torch.arange(count, device=generator.device)
    letters = draw_blocks(count * blocks, generator).view(count, blocks, BLOCK)
    place = torch.randint(blocks, (count,), generator=generator, device=generator.device)
    target = letters[row, place]
    order = torch.rand(count, BLOCK, generator=generator, device=generator.device).topk(QUERY).indices
    query = target.gather(1, order)
    while True:
        has_query = (letters[..., None] == query[:, None, None]).any(2).all(2)  # [count, blocks]
        has_query[row, place] = False
        rivals = int(has_query.sum())
        if not rivals:
            break
        letters[has_query] = draw_blocks(rivals, generator)
    marks = torch.full((count, blocks, 1), MARK, device=generator.device)
    marks[:, -1] = QUERY_MARK
    return torch.cat([torch.cat([letters, marks], 2).flatten(1), query, target[:, ANSWERS[variant]]], 1)


class Attention(nn.Module):
    """Causal attention, with a convolution of the scores or without."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.heads = setting.heads
        self.project_in = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.project_out = nn.Linear(setting.width, setting.width, bias=False)
        self.conv = ConvAttention(setting.heads, *TAPS) if setting.attention == "conv" else None

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.conv(q, k, v) if self.conv else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project_out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a network of two layers, each added to what it reads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.norm_attention, self.norm_network = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(setting)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.network(self.norm_network(x))


class Transformer(nn.Module):
    """Tokens `[B, N]` to logits `[B, answer, VOCABULARY]` of the tokens after the last positions.

    The same seed gives the rivals the same weights, the convolution's aside.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.answer = setting.answer
        self.tokens = nn.Embedding(VOCABULARY, setting.width)
        self.positions = nn.Parameter(torch.randn(setting.length, setting.width))
        self.layers = nn.Sequential(*[Layer(setting) for _ in range(setting.layers)])
        self.norm = nn.RMSNorm(setting.width)
        self.head = nn.Linear(setting.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        x = self.layers(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        return self.head(self.norm(x[:, -self.answer :]))


def train(setting: Setting, device: str) -> Iterator[dict[str, Any]]:
    """Train one model and yield step, tokens, loss and error rate at each evaluation.

    An answer is wrong if any of its letters is: a letter is predicted after the right ones before it, which finds
    the same answers right as letting the model write them.
    """
    torch.manual_seed(setting.seed)
    model = Transformer(setting).to(device)
    taps = [weight for name, weight in model.named_parameters() if "conv" in name]
    others = [weight for name, weight in model.named_parameters() if "conv" not in name]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": taps, "lr": CONV_RATE * setting.learning_rate}]
    optimizer = torch.optim.Adam(groups, lr=setting.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, setting.steps))
    generator = torch.Generator(device).manual_seed(setting.seed)
    held_out = draw_sequences(
        HELD_OUT, setting.blocks, setting.variant, torch.Generator(device).manual_seed(HELD_OUT_SEED)
    )
    autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    started, done = time.perf_counter(), 0
    for stop in evaluation_steps(setting.steps):
        total_loss = torch.zeros((), device=device)
        drawn = draw_sequences((stop - done) * setting.batch, setting.blocks, setting.variant, generator)
        for batch in drawn.split(setting.batch):
            with autocast:
                logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, -setting.answer :].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total_loss += loss.detach()
        wrong = 0
        with torch.no_grad(), autocast:
            for batch in held_out.split(setting.batch):
                wrong += int((model(batch[:, :-1]).argmax(-1) != batch[:, -setting.answer :]).any(1).sum())
        mean_loss, done = float(total_loss) / (stop - done), stop
        yield {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "step": done, "tokens": done * setting.batch * setting.length, "train_loss": mean_loss,
            "error_rate": wrong / HELD_OUT, "seconds": time.perf_counter() - started,
        }  # fmt: skip


def learning_rate_factor(step: int, steps: int) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    return min(1.0, (step + 1) / (WARM_UP * steps)) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def evaluation_steps(steps: int) -> list[int]:
    """EVALUATIONS steps, evenly spaced, or as many as there are; the last one is `steps`."""
    count = min(EVALUATIONS, steps)
    return [steps * (i + 1) // count for i in range(count)]


def finding(finals: pd.Series) -> str:
    """One sentence: the mean error rate of each attention."""
    shares = [f"{x * 100:.2g} %" if x < 0.1 else f"{x * 100:.0f} %" for x in finals]
    first, *others = finals.index
    words = [f"{first.capitalize()} attention errs on {shares[0]} of sequences"]
    return ", ".join(words + [f"{name} attention on {share}" for name, share in zip(others, shares[1:], strict=True)])


def draw_chart(csv_path: Path) -> list[Path]:
    """Draw error against steps from the results file, as PNG and SVG beside it; returns their paths."""
    rows = pd.read_csv(csv_path)
    last = rows.drop_duplicates(["attention", "seed"], keep="last")
    finals = last.groupby("attention", sort=False)["error_rate"].mean()
    run = rows.iloc[-1]
    texts: dict[str, Any] = {"x": 0.012, "ha": "left"}
    with applied(LIGHT):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.subplots()
        for name in finals.index:
            errors = rows[rows["attention"] == name].pivot(index="step", columns="seed", values="error_rate") * 100
            look = {"color": ATTENTIONS[name].colour, "linestyle": ATTENTIONS[name].dashes}
            axes.plot(errors.index, errors, linewidth=0.7, alpha=0.6, **look)
            axes.plot(errors.index, errors.mean(axis=1), linewidth=2.4, label=f"{name} attention", **look)
        axes.set(xlabel="training step", ylabel="wrong answers (% of held-out sequences)", ylim=(-2, 102))
        axes.grid(axis="y", color=LIGHT.grid, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, handlelength=3.2)
        figure.suptitle(finding(finals), fontsize=12, fontweight="bold", **texts)
        caption = (
            f"Toy task of arXiv 2504.00927, answer: {run['variant']}; {run['blocks']} blocks of {BLOCK} letters; "
            f"{run['layers']} layers, width {run['width']}, {run['heads']} heads; batches of {run['batch']} sequences\n"
            f"thin: one of {rows['seed'].nunique()} seeds, bold: their mean; {HELD_OUT} held-out sequences; "
            f"{run['device']}, PyTorch {run['torch']}"
        )
        figure.supxlabel(caption, fontsize=7, color=LIGHT.quiet, linespacing=1.5, **texts)
        paths = [csv_path.with_suffix(suffix) for suffix in (".png", ".svg")]
        for path, metadata in zip(paths, ({"Software": None}, {"Date": None}), strict=True):
            figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    return paths


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
    attention: Annotated[str, typer.Option(help="Models to train, of conv,plain.")] = "conv,plain",
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
