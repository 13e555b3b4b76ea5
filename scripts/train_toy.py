"""Train a small transformer on the toy task of Multi-Token Attention, with conv attention and with plain attention.

A sequence holds blocks of letters and a query of two letters; one block alone has both, in any order. The answer is
that block, or its first or last letter. Plain attention scores one query token against one key token; conv attention
adds up the scores of both letters of the query over the letters of a block.

From the paper (arXiv 2504.00927) and its code (facebookresearch/RAM, projects/mta): 26 letters, 52 blocks of 5
different ones, queries of 2, a mark between blocks and another before the query; batches of 64; 4 layers of width 256
with 2 heads, rotary positions, gated networks of width 768, embeddings tied to the output, weights drawn with a
standard deviation of one over the root of their inputs; convolutions of 2 x 9 taps in all layers that start as the
identity; Adam with beta2 0.98, a loss on the answer alone, wrong answers counted over 3 seeds.
Ours: fresh sequences in every step (there a million, seen 6.4 times) and so no dropout; 18000 steps (there
100000); a learning rate that rises to 5e-4 and falls to zero (there 1e-4, constant), three times higher for the
convolutions' weights; no tokens for begin and end; without a GPU a smaller task and model.

Its code's README gives the errors of its three seeds, with the whole block as the answer, in %:

    conv attention    H100:  0.0   0.0  0.2    H200:  0.1   0.0   0.1
    plain attention   H100: 77.7  75.3  1.9    H200: 83.9  83.1  37.6

So plain attention can come near, with luck and many steps; here both get the same number, and the same sequences.
"""

from __future__ import annotations

import csv
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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

from mta_kernels import torch_compile
from mta_kernels.conv_attention import ConvAttention
from mtabench.charts.style import LIGHT, applied, own_styles
from mtabench.environment import describe, resolve_device
from mtabench.errors import MtabenchError, UsageError
from mtabench.problem.axes import parse_names

LETTERS, BLOCK, QUERY = 26, 5, 2
MARK, QUERY_MARK, VOCABULARY = LETTERS, LETTERS + 1, LETTERS + 2
ANSWERS = {"all": slice(0, BLOCK), "first": slice(0, 1), "last": slice(BLOCK - 1, BLOCK)}
ATTENTIONS = {"conv": own_styles()["triton"], "plain": own_styles()["sdpa-flash"]}
TAPS = (QUERY, 2 * BLOCK - 1)
THETA = 1e5  # rotary positions: the slowest pair turns by about 1 / THETA a token
HELD_OUT, HELD_OUT_SEED = 16384, 2**40
WATCHED = 2048  # of the held-out sequences, at each evaluation before the last
EVALUATIONS = 25
DRAWN = 100  # batches at a time
WARM_UP = 0.05  # of all steps
CONV_RATE = 3  # learning rate of the convolution's weights over that of the others
PLACE = ("device", "torch", "triton", "git_sha", "git_dirty")

# What learns in minutes.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"blocks": 52, "width": 256, "heads": 2, "layers": 4, "batch": 64, "steps": 18000, "learning_rate": 5e-4},
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


def draw_batches(setting: Setting, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of fresh sequences, without end."""
    while True:
        drawn = draw_sequences(DRAWN * setting.batch, setting.blocks, setting.variant, generator)
        yield from drawn.split(setting.batch)


def turns_of_pairs(length: int, dim: int) -> Tensor:
    """`[2, length, dim / 2]`: cosine and sine of the angle by which each pair of a head turns at each position."""
    half = dim // 2
    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: the pairs `(i, i + D / 2)` of `x [..., N, D]`, each turned by the angle of its position."""
    a, b = x.chunk(2, -1)
    cos, sin = turns
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Causal attention, with a convolution of the scores or without."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.heads = setting.heads
        self.project_in = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.project_out = nn.Linear(setting.width, setting.width, bias=False)
        self.conv = ConvAttention(setting.heads, *TAPS) if setting.attention == "conv" else None

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """`[B, N, width]` to the same."""
        qkv = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2], turns)
        v = qkv[2]
        y = self.conv(q, k, v) if self.conv else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project_out(y.transpose(1, 2).flatten(2))


class Network(nn.Module):
    """A gated network (SwiGLU)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, 6 * width, bias=False)
        self.project_out = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        gate, values = self.project_in(x).chunk(2, -1)
        return self.project_out(F.silu(gate) * values)


class Layer(nn.Module):
    """Attention and a network, each added to what it reads."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.RMSNorm(setting.width), nn.RMSNorm(setting.width)
        self.attention, self.network = Attention(setting), Network(setting.width)

    def forward(self, x: Tensor, turns: Tensor, wanted: int) -> Tensor:
        """`[B, N, width]` to `[B, wanted, width]`, of the last positions."""
        x = (x + self.attention(self.norm_attention(x), turns))[:, -wanted:]
        return x + self.network(self.norm_network(x))


class Transformer(nn.Module):
    """Tokens `[B, N]` to logits `[B, answer, VOCABULARY]` of the tokens after the last positions.

    The same seed gives the rivals the same weights, the convolution's aside.
    """

    turns: Tensor

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.answer = setting.answer
        self.tokens = nn.Embedding(VOCABULARY, setting.width)
        turns = turns_of_pairs(setting.length, setting.width // setting.heads)
        self.register_buffer("turns", turns, persistent=False)
        self.layers = nn.ModuleList([Layer(setting) for _ in range(setting.layers)])
        self.norm = nn.RMSNorm(setting.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                deviation = module.weight.shape[1] ** -0.5
                nn.init.trunc_normal_(module.weight, std=deviation, a=-3 * deviation, b=3 * deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        x, count = self.tokens(tokens), tokens.shape[1]
        for index, layer in enumerate(self.layers, 1):
            x = layer(x, self.turns[:, :count], self.answer if index == len(self.layers) else count)
        return F.linear(self.norm(x), self.tokens.weight)


class Trainer:
    """A model, its optimizer and the step that trains it.

    On a GPU the model is compiled and the step becomes one CUDA graph, as its many small kernels take longer to launch
    than to run. What a step reads and writes thus stays in place: the batch, the learning rates, the summed loss.
    """

    def __init__(self, setting: Setting, device: str) -> None:
        torch.manual_seed(setting.seed)
        self.setting, self.device = setting, device
        self.model = Transformer(setting).to(device)
        self.trained = torch.compile(self.model, fullgraph=True) if device == "cuda" else self.model
        taps = [weight for name, weight in self.model.named_parameters() if "conv" in name]
        others = [weight for name, weight in self.model.named_parameters() if "conv" not in name]
        groups: list[dict[str, Any]] = [{"params": others, "factor": 1}, {"params": taps, "factor": CONV_RATE}]
        for group in groups:
            group["lr"] = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.98), fused=True, capturable=device == "cuda")
        self.batch = torch.zeros(setting.batch, setting.length, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.advance = self.train_on_batch

    def step(self, batch: Tensor, learning_rate: float) -> None:
        """Train on `batch [B, length]` and add its loss to `loss`."""
        self.batch.copy_(batch)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(learning_rate * group["factor"])
        self.advance()

    def train_on_batch(self) -> None:
        """A step without its inputs: work of the device alone, which a graph can hold."""
        logits = self.logits(self.trained, self.batch)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, -self.setting.answer :].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss += loss.detach()

    def logits(self, model: Callable[[Tensor], Tensor], sequences: Tensor) -> Tensor:
        """`[B, answer, VOCABULARY]`, in bfloat16 on a GPU."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return model(sequences[:, :-1])

    def capture(self) -> None:
        """Make the step one CUDA graph, after some at learning rate zero that compile and allocate what it needs."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(self.batch, 0.0)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.train_on_batch()
        self.advance = graph.replay
        self.forget()

    def forget(self) -> None:
        """Clear what the steps so far left in the optimizer and in the loss."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss.zero_()

    @torch.no_grad()
    def error_rate(self, sequences: Tensor) -> float:
        """The share of `sequences [B, length]` with a wrong letter in the answer.

        Each letter is predicted after the right ones before it, which finds the same answers right as letting the model
        write them.
        """
        answer = self.setting.answer
        parts = sequences.split(256)
        wrong = [(self.logits(self.model, part).argmax(-1) != part[:, -answer:]).any(1) for part in parts]
        return float(torch.cat(wrong).float().mean())


def train(setting: Setting, device: str) -> Iterator[dict[str, Any]]:
    """Train one model and yield step, tokens, loss and error rate at each evaluation."""
    started, done = time.perf_counter(), 0
    trainer = Trainer(setting, device)
    if device == "cuda":
        trainer.capture()
    held_out = draw_sequences(
        HELD_OUT, setting.blocks, setting.variant, torch.Generator(device).manual_seed(HELD_OUT_SEED)
    )
    batches = draw_batches(setting, torch.Generator(device).manual_seed(setting.seed))
    for stop in evaluation_steps(setting.steps):
        trainer.loss.zero_()
        for step in range(done, stop):
            trainer.step(next(batches), setting.learning_rate * learning_rate_factor(step, setting.steps))
        mean_loss, done = float(trainer.loss) / (stop - done), stop
        error_rate = trainer.error_rate(held_out if done == setting.steps else held_out[:WATCHED])
        yield {
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "step": done, "tokens": done * setting.batch * setting.length, "train_loss": mean_loss,
            "error_rate": error_rate, "seconds": time.perf_counter() - started,
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
            f"thin: one of {rows['seed'].nunique()} seeds, bold: their mean; {WATCHED} held-out sequences, "
            f"{HELD_OUT} after the last step; {run['device']}, PyTorch {run['torch']}"
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
    if device == "cuda" and (lack := torch_compile.missing(device)):
        raise UsageError(lack)
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
