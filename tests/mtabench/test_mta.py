"""The whole multi-token attention in the suite: as typed, as cells, as inputs, checked, counted, kept and shown."""

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import written_runs
from command_line import refused
from own_cases import check_timed
from typer.main import get_command

from mtabench import registry
from mtabench.checking import verify
from mtabench.checking.judge import Judge
from mtabench.checking.oracle import Check, Oracle
from mtabench.checking.verify import EVERY_STEP, FINISHED, CheckFilter, run_checks
from mtabench.cli import app
from mtabench.errors import UsageError
from mtabench.problem.case import Case
from mtabench.problem.inputs import FINISHERS, make_inputs
from mtabench.problem.operations import gate_of, make_operation
from mtabench.problem.work import executed_flops, useful_flops
from mtabench.registry import implementation_of
from mtabench.report.data import COMMAND
from mtabench.results.result_view import make_view
from mtabench.results.results_file import cell_of, key_of, key_of_row, read_file
from mtabench.results.runs import read_run
from mtabench.sweeps.plan import Options, make_plan


def case(mix="heads", conv=(3, 2), post=None, norm="", gate="", *, pass_="fwd", heads=4, causal=True, **changes):
    head_dim = changes.get("head_dim", 16)
    operation = make_operation(conv, mix, post, norm, gate, heads=heads, head_dim=head_dim, causal=causal)
    return replace(Case(pass_, "eager", operation, "fp32", 1, heads, 2, 33, 16, None, "cpu"), **changes)


def plan(pass_="fwd", **options):
    return make_plan(Options(pass_, **({"device": "cpu", "seq": "32", "head_dim": "16"} | options)), "cpu")


def steps(cases):
    return list(dict.fromkeys((one.impl, one.steps) for one in cases))


class TestPlan:
    def test_steps_multiply_and_plain_attention_comes_once(self):
        cells = plan(op="mta", mix="heads,2", conv="none,3x2", post_conv="none,2", impl="eager,sdpa-flash").cases
        assert len(cells) == 2 * 2 * 2 + 1
        assert {one.op for one in cells[:-1]} == {"mta"}
        assert (cells[-1].impl, cells[-1].op) == ("sdpa-flash", "attention")
        assert cells[1].steps == "mix heads, post conv 2x2"

    def test_defaults(self):
        cells = plan(op="mta").cases
        assert steps(cells) == [
            ("eager", "mix heads, conv 6x11"), ("compile", "mix heads, conv 6x11"), ("sdpa-flash", "")
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("layer", "expected"),
        [
            ("mix", "mix heads, norm rms, gate one"),
            ("full", "mix heads, conv 6x11, post conv 6x11, norm rms, gate one"),
            (None, "conv 6x11"),
        ],
    )
    def test_layers_of_a_preset(self, layer, expected):
        (cell,) = plan(preset="mta-550m", layer=layer, impl="eager", seq=None, head_dim=None).cases
        assert (cell.heads, cell.head_dim, cell.seq, cell.steps) == (10, 128, 2048, expected)

    def test_a_norm_alone_is_no_plain_attention(self):
        cells = plan(op="mta", mix="none", conv="none", norm="rms", impl="eager,sdpa-flash").cases
        assert [(one.op, one.steps) for one in cells] == [("mta", "norm rms"), ("attention", "")]

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"op": "mta", "mix": "3", "heads": "16"}, "--mix 3 cannot be had with 16 heads.*one of 1, 2, 4, 8, 16"),
            ({"op": "mta", "mix": "half"}, "--mix cannot read 'half'; expected heads, none, a number"),
            ({"op": "mta", "mix": "heads+x"}, "cannot read 'heads\\+x'"),
            ({"op": "mta", "mix": "0"}, "cannot read '0'"),
            ({"mix": "heads"}, "--mix heads is for the whole multi-token attention; give --op mta, or leave it out"),
            ({"op": "attention", "post_conv": "3"}, "--post-conv 3 is .* in the place of --op attention"),
            ({"conv": "none"}, "--conv none leaves plain attention"),
            ({"op": "mta", "mix": "none", "conv": "none"}, "plain attention is left; name a step"),
            ({"op": "mta", "norm": "layer"}, "--norm cannot read 'layer'; expected rms, none, or depth and"),
            ({"op": "mta", "norm": "depth"}, "--norm cannot read 'depth'"),
            ({"op": "mta", "norm": "depth02"}, "--norm cannot read 'depth02'"),
            ({"op": "mta", "gate": "2"}, "--gate cannot read '2'; expected one, a number a row, full"),
            ({"norm": "rms"}, "--norm rms is for the whole multi-token attention; give --op mta, or leave it out"),
            ({"op": "conv-attention", "gate": "one"}, "--gate one is .* in the place of --op conv-attention"),
            ({"op": "mta", "post_conv": "6y11"}, "--post-conv cannot read '6y11'"),
            ({"op": "mta", "impl": "hopper"}, "--op mta excludes hopper, which computes conv-attention"),
            ({"layer": "mix"}, "name it as well, such as --preset mta-1b"),
            ({"layer": "all", "preset": "mta-1b"}, "there is no layer 'all'; expected mix"),
            ({"layer": "mix", "preset": "mta-1b", "op": "attention"}, "--layer mix is for"),
        ],
    )
    def test_what_cannot_be_is_one_sentence(self, options, sentence):
        with pytest.raises(UsageError, match=sentence):
            plan(**options)


CELLS = [
    case(), case(mix="2"), case(mix="none+heads", conv=None), case(mix="heads+2", post=(6, 11)), case("", None, (2, 3)),
    case(mix="1", conv=(1, 1), causal=False), case("", (3, 2)), case("", None, impl="sdpa-flash"),
    case("", (3, 2), None, "depth3"), case("heads+2", (3, 2), (6, 11), "rms", "full"), case(gate="one", pass_="decode"),
    case(post=(2, 2), pass_="decode"),
]  # fmt: skip

DECODED = [
    case(pass_="decode", page_size=16), case("", (3, 2), pass_="decode", impl="triton", splits="auto"),
    case("", (3, 2), pass_="decode", impl="cuda", page_size=256, splits=4, device="cuda"),
]  # fmt: skip


@pytest.mark.parametrize("cell", [*CELLS, *DECODED], ids=lambda one: f"{one.pass_} {one.op} {one.steps}")
class TestRoundTrip:
    def test_columns(self, cell):
        assert Case.of_row(cell.columns, cell.device) == cell

    def test_the_command_that_measures_it_again(self, cell):
        words = shlex.split(cell.repro())[1:]
        typed = get_command(app).commands[words[0]].make_context(words[0], words[1:]).params
        known = {name: typed[name] for name in Options.__dataclass_fields__ if name in typed}
        assert make_plan(Options(words[0], **known), cell.device).cases == (cell,)
        assert COMMAND.fullmatch(cell.repro())


RESULTS = Path(__file__).parents[2] / "results/nvidia-h200"


@pytest.mark.parametrize(
    "name", ["mta-550m", "mta-550m-all", "mta-all-bwd", "mta-all-fwd", "mta-decode", "mta-mix-bwd", "mta-mix-fwd"]
)
def test_commands_of_committed_results_measure_the_same_cells(name):
    command = get_command(app).commands
    for row in read_file(RESULTS / f"{name}.csv").rows():
        words = shlex.split(row["repro"])[1:]
        if row["status"] != "ok" or words[0] == "model":
            continue
        typed = command[words[0]].make_context(words[0], words[1:]).params
        known = {name: typed[name] for name in Options.__dataclass_fields__ if name in typed}
        (cell,) = make_plan(Options(words[0], **known), "cuda").cases
        assert cell_of(key_of(cell)) == cell_of(key_of_row(row))
        assert (cell.norm, cell.gate) == (("rms", "one") if cell.op == "mta" else ("", ""))


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path):
        cells = {one: written_runs.rounds(1.0 + number) for number, one in enumerate(CELLS[:-1])}
        return written_runs.write_run(tmp_path / "run.csv", cells)

    def test_cells_and_their_samples_are_found(self, path):
        run = read_run(path)
        assert len(run.cells) == len(CELLS) - 1
        assert all(cell.rounds for cell in run.cells.values())
        names = [cell.name for cell in run.cells.values()]
        assert len(set(names)) == len(names)
        assert "fwd eager fp32 batch 1 heads 4 (KV 2) seq 33 head dim 16 mix heads+2 conv 3x2 post conv 6x11" in names

    def test_a_file_without_the_new_columns_is_read_as_before(self, path):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        old = table[table["op"] != "mta"].drop(columns=["mix", "post_conv_q", "post_conv_k", "norm", "gate"])
        old.to_csv(path, index=False)
        assert [row["mix"] for row in read_file(path).rows()] == ["", ""]
        assert len(read_run(path).cells) == 2

    def test_a_table_tells_them_apart(self, path):
        view = make_view(read_file(path).rows())
        texts = {column.name: column.texts for column in view.columns}
        assert list(texts)[1:6] == ["mix", "conv", "post conv", "norm", "gate"]
        assert texts["mix"][3:5] == ("heads+2", "")
        assert texts["norm"][8:11] == ("depth3", "rms", "")
        assert not any("mix" in words or "conv" in words for words in view.setting)


class TestInputs:
    def test_shapes(self):
        x = make_inputs(case("heads+2", (3, 2), (6, 11)))
        assert {name: tuple(mixer.shape) for name, mixer in x.mixers.items()} == {
            "weight": (4, 3, 2), "pre_mix": (4, 4), "post_conv": (4, 6, 11), "post_mix": (2, 2, 2)
        }  # fmt: skip

    def test_norm_and_gate_come_last_and_change_nothing_else(self):
        cell = case(norm="rms", gate="full")
        before, x = make_inputs(case()), make_inputs(cell)
        assert {name: tuple(x.mixers[name].shape) for name in FINISHERS} == {
            "norm_weight": (16,), "gate_weight": (16, 16), "gate_bias": (16,)
        }  # fmt: skip
        assert make_inputs(case(gate="one")).gate_weight.shape == (1, 16)
        assert all(torch.equal(mixer, x.mixers[name]) for name, mixer in before.mixers.items())
        assert torch.equal(before.q, x.q)

    def test_a_decode_step_has_the_queries_and_the_state_that_it_needs(self):
        x = make_inputs(case(conv=(16, 1), post=(6, 2), pass_="decode"))
        assert x.q.shape[2] == 21
        assert x.state.lengths.tolist() == [32]
        assert make_inputs(case(pass_="decode")).state is None
        before = x.state.logits.clone()
        x.k.neg_()
        x.refresh()
        assert not torch.equal(x.state.logits, before)


def judged(cell, build=None):
    inputs = make_inputs(cell, 3)
    closure = (build or implementation_of(cell).build)(cell, inputs)
    return Judge(cell, inputs, 3).first_of(closure, cell)


BOTH = {"post": (2, 3)}


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "decode"])
@pytest.mark.parametrize(
    ("mix", "more"),
    [
        ("heads", BOTH), ("2", BOTH), ("none+heads", BOTH), ("heads+1", BOTH),
        ("", {"norm": "rms"}), ("2", {"gate": "one"}), ("2", {"norm": "depth2", "gate": "full"}),
    ],
)  # fmt: skip
def test_right_results_pass_the_oracle_and_the_probes_and_are_right_when_timed(pass_, mix, more):
    cell = case(mix, pass_=pass_, batch=2, **more)
    inputs = make_inputs(cell, 3)
    judge, closure = Judge(cell, inputs, 3), implementation_of(cell).build(cell, inputs)
    check = judge.first_of(closure, cell)
    assert check.ok, check.reason
    check_timed(judge, closure, cell, inputs)


# Of 256 numbers, a gate of one would make six times as much of what the probe's mixers mix in.
LARGE = pytest.mark.parametrize(
    ("pass_", "norm", "gate", "dtype"),
    [
        ("fwd", "", "one", "fp32"), ("fwd", "rms", "one", "bf16"), ("fwd", "depth2", "full", "fp16"),
        ("bwd", "", "one", "bf16"), ("bwd", "rms", "full", "fp32"),
        ("decode", "", "one", "fp16"), ("decode", "rms", "one", "fp32"), ("decode", "rms", "full", "bf16"),
    ],
)  # fmt: skip


def probed(monkeypatch, build, pass_, norm, gate, dtype):
    """What the probes alone say of long taps, ten heads and a long output."""
    monkeypatch.setattr(Oracle, "check", lambda self, result, sign=1: Check(True, 0.0, 1.0))
    sizes = {"heads": 10, "kv_heads": 10, "seq": 48, "head_dim": 256}
    return judged(case(conv=(16, 31), post=(16, 31), norm=norm, gate=gate, pass_=pass_, dtype=dtype, **sizes), build)


def without_the_first_key(cell, inputs):
    """Half of the rows leave it out, the late ones, and so does a decode step."""
    build, half = implementation_of(cell).build, cell.seq // 2

    def call():
        fewer = replace(inputs, k=inputs.k[:, :, 1:], v=inputs.v[:, :, 1:])
        if cell.pass_ == "decode":
            return build(cell, replace(fewer, lengths=inputs.lengths - 1).with_state())()
        late = build(cell, replace(fewer, q=inputs.q[:, :, 1:]))()
        return torch.cat([build(cell, inputs)()[:, :, :half], late[:, :, half - 1 :]], 2)

    return call


@LARGE
def test_a_first_key_that_does_not_count_is_found_whatever_follows(monkeypatch, pass_, norm, gate, dtype):
    assert probed(monkeypatch, None, pass_, norm, gate, dtype).ok
    check = probed(monkeypatch, without_the_first_key, pass_, norm, gate, dtype)
    assert not check.ok
    assert "the first key does not count" in check.reason


def otherwise(**changes):
    """Eager with another operation or other mixers than the cell's."""

    def build(cell, inputs):
        changed = {name: change(getattr(inputs, name)) for name, change in changes.items()}
        return implementation_of(cell).build(cell, replace(inputs, **changed))

    return build


@pytest.mark.parametrize(
    ("build", "pass_"),
    [
        (otherwise(pre_mix=lambda x: x.T), "fwd"),
        (otherwise(post_mix=lambda x: x.T), "fwd"),
        (otherwise(post_mix=lambda x: x.T), "decode"),
        (otherwise(post_conv=lambda x: x.flip(1)), "fwd"),
        (otherwise(state=lambda x: replace(x, logits=x.logits * 0.9)), "decode"),
        (otherwise(norm_weight=torch.ones_like), "fwd"),
        (otherwise(norm_weight=torch.ones_like), "decode"),
        (otherwise(gate_weight=torch.t), "fwd"),
        (otherwise(gate_bias=lambda x: None), "decode"),
    ],
)
def test_wrong_mixers_are_found(build, pass_):
    assert not judged(case(post=(2, 3), norm="depth2", gate="full", pass_=pass_), build).ok


@pytest.mark.parametrize(("number", "gate"), [*((number, "full") for number in range(3, 10)), (8, "one"), (9, "one")])
def test_a_wrong_gradient_of_a_mixer_is_found(number, gate):
    cell = case(post=(2, 3), norm="rms", gate=gate, pass_="bwd")
    inputs = make_inputs(cell, 3)
    judge = Judge(cell, inputs, 3)
    closure = implementation_of(cell).build(cell, inputs)

    def call(probe):
        gradients = list(torch.autograd.grad(closure(), list(inputs.differentiable.values()), inputs.dout))
        gradients[number] = gradients[number] * 1.01
        return gradients

    check = judge.first(call)
    assert not check.ok
    assert check.reason.startswith(list(judge._oracle.row_tolerances)[number])


class TestVerify:
    def test_every_combination_of_steps_is_checked(self):
        made = {shape.operation("mta") for shape in EVERY_STEP}
        present = {(bool(o.pre_conv), bool(o.pre_mix), bool(o.post_conv), bool(o.post_mix)) for o in made}
        assert len(made) == len(EVERY_STEP) == len(present) == 2**4 - 2

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr(verify, "MTA_SHAPES", {"cpu": (EVERY_STEP[0], EVERY_STEP[-1])})
        monkeypatch.setattr(verify, "MTA_LONG_SHAPES", dict.fromkeys(("cpu", "interpreter"), ()))
        monkeypatch.setattr(verify, "SHAPES", {"cpu": ()})
        monkeypatch.setattr(verify, "LONG_SHAPES", dict.fromkeys(("cpu", "interpreter"), ()))
        monkeypatch.setattr(verify, "DTYPES_CHECKED", {"cpu": ("fp32",)})
        eager = registry.every("eager")[1]
        monkeypatch.setattr(registry, "IMPLEMENTATIONS", (eager,))

    def test_norm_and_gate_pass(self, monkeypatch):
        monkeypatch.setattr(verify, "MTA_SHAPES", {"cpu": FINISHED})
        rows = list(run_checks(["eager"], "cpu"))
        assert [row for row in rows if not row.ok] == []
        assert any("norm depth3, gate full" in row.shape and row.check == "strided bwd" for row in rows)

    def test_steps_that_are_asked_for_take_the_place_of_others(self):
        steps = CheckFilter("mta", convs=[None], mixes=["heads+2"], norms=["rms"], gates=["none", "full"])
        rows = list(run_checks(["eager"], "cpu", asked=steps))
        assert [row for row in rows if not row.ok] == []
        of_fwd = [row.shape.removeprefix("fp32 1 x 4/2 x 29 x 16 ") for row in rows if row.check == "error fwd"]
        assert of_fwd == [
            "mix heads+2, post conv 3x5, norm rms", "mix heads+2, post conv 3x5, norm rms, gate full"
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("impl", "words", "steps"),
    [
        ("eager", "--op mta --mix heads,none+2", CheckFilter("mta", mixes=["heads", "none+2"])),
        ("eager", "--op mta --conv none,3x2 --post-conv 2", CheckFilter("mta", [None, (3, 2)], post_convs=[(2, 2)])),
        ("eager", "--op mta --norm depth2 --gate full", CheckFilter("mta", norms=["depth2"], gates=["full"])),
        ("eager", "--conv 3x2", CheckFilter(convs=[(3, 2)])),
        ("sdpa-flash", "--op attention", CheckFilter("attention")),
    ],
)
def test_verify_checks_the_steps_that_are_typed(mtabench, monkeypatch, impl, words, steps):
    found = []
    monkeypatch.setattr("mtabench.commands.verify.run_checks", lambda *given: found.append(given[-1]) or iter(()))
    mtabench("verify", "--impl", impl, "--device", "cpu", *words.split())
    assert found == [steps]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--op mta --gate two", "--gate cannot read 'two'"),
        ("--op mixed", "--op 'mixed' is not known; expected one of conv-attention, attention, mta"),
        ("--op attention --conv 3", "--conv 3 is no step of --op attention"),
        ("--op mta --impl hopper", "--op mta excludes hopper, which computes conv-attention; drop one of them"),
    ],
)
def test_verify_refuses_steps_in_a_sentence(mtabench, words, sentence):
    refused(mtabench("verify", "--device", "cpu", *words.split()), sentence)


class TestWork:
    # Three tokens, four heads of 2: 6 causal pairs of 9 a head.
    CELL = replace(case("heads+2", (2, 3), (1, 2)), seq=3, head_dim=2)

    def test_useful(self):
        extra = 6 + 2 + 4 + 2
        assert useful_flops(self.CELL) == 2 * 4 * 6 * (2 * 2 + extra)
        assert useful_flops(replace(self.CELL, pass_="bwd")) == 2 * 4 * 6 * (5 * 2 + 3 * extra)
        assert useful_flops(replace(self.CELL, pass_="decode")) == 2 * 4 * 3 * (2 * 2 + extra)

    @pytest.mark.parametrize(("gate", "macs"), [("one", 2), ("full", 2 * 2)])
    def test_a_gate_is_a_product_a_row(self, gate, macs):
        operation = replace(self.CELL.operation, gate=gate_of(gate))
        for pass_, rows in (("fwd", 3), ("bwd", 3 * 3), ("decode", 1)):
            cell = replace(self.CELL, pass_=pass_)
            for count in (useful_flops, partial(executed_flops, work="dense"), partial(executed_flops, work="staged")):
                assert count(replace(cell, operation=operation)) - count(cell) == 2 * rows * 4 * macs

    def test_dense(self):
        extra = 6 + 2 + 4 + 2
        assert executed_flops(self.CELL, "dense") == 2 * 4 * 9 * (2 * 2 + extra)
        assert executed_flops(replace(self.CELL, pass_="bwd"), "dense") == 2 * 4 * 9 * (4 * 2 + 2 * extra)
        step = 2 * 2 + 2 * 6 + 2 + 6 + 2  # scores and convolution of two rows; of one row all that follows
        assert executed_flops(replace(self.CELL, pass_="decode"), "dense") == 2 * 4 * 3 * step

    def test_staged_computes_whole_blocks_and_the_rows_beside_a_chunk(self):
        cell = replace(case(conv=None), seq=256)
        assert executed_flops(cell, "staged") == 2 * 4 * 128 * (128 + 256) * (2 * 16 + 8)
        convolved = replace(case(conv=(5, 1)), seq=256)
        assert executed_flops(convolved, "staged") == 2 * (4 * 128 * 384 * 260 // 256) * (2 * 16 + 8 + 5)
