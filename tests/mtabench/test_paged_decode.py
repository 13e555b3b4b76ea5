"""Caches in pages in the suite: as typed, as cells, as inputs, checked, counted, kept and shown."""

from dataclasses import replace

import pandas as pd
import planted_sweeps
import pytest
import torch
import written_runs
from command_line import make_runner, printed
from own_cases import check_timed

from mta_kernels.conv_attention import conv_attention_decode_reference
from mta_kernels.conv_attention.reference import gather_pages
from mta_kernels.operation import Operation
from mtabench import registry
from mtabench.charts.data import read_cells
from mtabench.charts.panels import problems
from mtabench.checking import verify
from mtabench.checking.judge import Judge
from mtabench.checking.verify import CheckedShape, CheckFilter, run_checks
from mtabench.errors import UsageError
from mtabench.problem.axes import parse_page_sizes
from mtabench.problem.case import Case
from mtabench.problem.inputs import INTEGERS, make_inputs
from mtabench.problem.operations import make_operation
from mtabench.registry import implementation_of
from mtabench.results.cell_names import told_apart
from mtabench.results.result_view import make_view
from mtabench.results.results_file import read_file, read_results
from mtabench.results.row_filter import parse_where, select
from mtabench.results.runs import read_run
from mtabench.sweeps.plan import Options, make_plan

CONTIGUOUS = Case("decode", "eager", Operation.of((3, 2), 16), "fp32", 2, 4, 2, 40, 16, None, "cpu")
PAGED = replace(CONTIGUOUS, page_size=16)


def plan(pass_="decode", device="cpu", **options):
    return make_plan(Options(pass_, **({"seq": "64", "head_dim": "16"} | options)), device)


class TestAxis:
    def test_a_list(self):
        assert parse_page_sizes("none,16, 128") == [None, 16, 128]
        assert parse_page_sizes("16..256,NONE,16") == [16, 32, 64, 128, 256, None]

    @pytest.mark.parametrize("text", ["7", "17", "512", "16..100", "abc", "", "16,", "auto", "-16"])
    def test_what_no_page_can_have_is_one_sentence(self, text):
        with pytest.raises(UsageError, match=r"^--page-size .*; expected none, which is .* 16, 32, 64, 128, 256$"):
            parse_page_sizes(text)

    @pytest.mark.parametrize("pass_", ["fwd", "bwd"])
    def test_only_decode_has_a_cache(self, pass_):
        with pytest.raises(UsageError, match=f"--page-size 16 is of a cache, and {pass_} reads none"):
            plan(pass_, page_size="16")
        assert [case.page_size for case in plan(pass_, page_size="none", impl="eager").cases] == [None]

    def test_pages_are_cells_of_what_reads_pages_alone(self):
        found = plan(page_size="none,16,128", impl="eager,compile,sdpa-math")
        assert [(case.impl, case.page_size) for case in found.cases] == [
            ("eager", None), ("eager", 16), ("eager", 128), ("compile", None), ("sdpa-math", None),
        ]  # fmt: skip
        assert found.axes["page size"] == "none, 16, 128"
        assert "page size" not in plan(impl="eager").axes
        without = plan(page_size="16", impl="compile,sdpa-math")
        assert [case.page_size for case in without.cases] == [None, None]

    def test_a_speedup_is_over_the_baseline_in_the_same_pages(self):
        found = plan(page_size="none,16", impl="eager,compile")
        compared = {
            (case.impl, case.page_size): [base.page_size for base in found.cases if found.is_baseline(base)
            and case.is_compared_with(base)] for case in found.cases
        }  # fmt: skip
        assert compared == {("eager", None): [None], ("eager", 16): [16], ("compile", None): [None]}
        assert found.notes == ()
        without = plan(page_size="none,16", impl="eager,compile", baseline="compile")
        assert without.notes == ("no speedups of caches in pages, which compile does not read",)
        only_pages = plan(page_size="16", impl="eager,compile")
        assert not any(only_pages.cases[1].is_compared_with(base) for base in only_pages.cases[:1])


class TestInputs:
    def test_pages_have_the_values_of_the_cache(self):
        inputs = make_inputs(CONTIGUOUS, seed=3)
        paged = inputs.given_to(PAGED)
        assert paged.k.shape == paged.v.shape == (1 + 2 * 3, 2, 16, 16)
        for cache, pages in ((inputs.k, paged.k), (inputs.v, paged.v)):
            gathered = gather_pages(pages, paged.block_table)
            assert torch.equal(gathered[:, :, :40], cache)
            assert gathered[:, :, 40:].isnan().all()
        assert inputs.given_to(CONTIGUOUS) is inputs
        assert inputs.given_to(PAGED) is paged.given_to(PAGED) is paged

    def test_pages_are_scattered_and_the_first_is_nobodys(self):
        case = replace(PAGED, seq=16 * 64)
        table, again, other = (make_inputs(case, seed).given_to(case).block_table for seed in (1, 1, 2))
        assert sorted(table.flatten().tolist()) == list(range(1, 129))
        assert torch.equal(table, again)
        assert not torch.equal(table, other)
        assert (table.diff() == 1).float().mean() < 0.1
        short = replace(PAGED, batch=1, seq=16)
        paged = make_inputs(short).given_to(short)
        assert paged.block_table.tolist() == [[1]]
        assert paged.k[0].isnan().all()

    def test_pages_and_their_copies_follow_the_cache(self):
        inputs = make_inputs(PAGED)
        paged = inputs.given_to(PAGED)
        (copy,) = paged.copies(1)
        assert copy.k.data_ptr() != paged.k.data_ptr()
        places = paged.k.data_ptr(), paged.v.data_ptr(), paged.block_table.data_ptr()
        first = paged.v.clone()
        sign = torch.iinfo(INTEGERS[inputs.v.element_size()]).min
        inputs.flip(values=sign)
        assert torch.equal(paged.v[1:].nan_to_num(), -first[1:].nan_to_num())
        assert torch.equal(copy.v[1:].nan_to_num(), -first[1:].nan_to_num())
        inputs.flip(values=sign)
        inputs.k[1, :, 39] = 7
        paged.v.zero_()
        paged.block_table.zero_()
        inputs.refresh()
        assert torch.equal(gather_pages(paged.k, paged.block_table)[:, :, :40], inputs.k)
        assert torch.equal(paged.v.nan_to_num(), first.nan_to_num())
        assert places == (paged.k.data_ptr(), paged.v.data_ptr(), paged.block_table.data_ptr())


def by_reference(x, **changes):
    x = replace(x, **changes)
    return conv_attention_decode_reference(x.q, x.k, x.v, x.weight, lengths=x.lengths, block_table=x.block_table)


def table_ignored(case, paged):
    rows = torch.arange(paged.block_table.numel(), dtype=torch.int32).view_as(paged.block_table)
    return lambda: by_reference(paged, block_table=rows)


def plant_table_ignored(monkeypatch):
    """An implementation called `planted`, which is right but for the pages, that it takes in order."""
    eager = registry.find("eager")

    def build(case, inputs):
        return table_ignored(case, inputs.given_to(case)) if case.page_size else eager.build(case, inputs)

    planted = replace(eager, name="planted", build=build)
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", (*registry.IMPLEMENTATIONS, planted))


def table_of_the_first_sequence(case, paged):
    return lambda: by_reference(paged, block_table=paged.block_table[:1].expand_as(paged.block_table))


def rows_beyond_the_length(case, paged):
    return lambda: by_reference(paged, lengths=torch.full_like(paged.lengths, case.capacity))


def gathered_once(case, paged):
    k, v = (gather_pages(cache, paged.block_table) for cache in (paged.k, paged.v))
    return lambda: conv_attention_decode_reference(paged.q, k, v, paged.weight, lengths=paged.lengths)


def writes_a_page(case, paged):
    def call():
        out = by_reference(paged)
        paged.k[0, 0, 0, 0] = 0
        return out

    return call


def moves_pages(case, paged):
    def call():
        out = by_reference(paged)
        paged.block_table.copy_(paged.block_table.flip(1))
        return out

    return call


class TestChecks:
    @pytest.mark.parametrize("seq", [1, 3])
    def test_first_tokens(self, seq):
        for post_conv in ((2, 3), (1, 3)):
            operation = make_operation(None, "heads", post_conv, heads=4, head_dim=16)
            case = replace(PAGED, seq=seq, operation=operation)
            inputs = make_inputs(case, 7)
            assert Judge(case, inputs, 7).first_of(implementation_of(case).build(case, inputs), case).ok

    @pytest.mark.parametrize("size", [16, 128])
    @pytest.mark.parametrize("operation", ["conv", "mta"])
    def test_right_results_are_right_and_when_timed(self, operation, size):
        case = replace(PAGED, page_size=size)
        if operation == "mta":
            case = replace(case, operation=make_operation((3, 2), "heads", (2, 3), heads=4, head_dim=16))
        inputs = make_inputs(case, 7)
        judge = Judge(case, inputs, 7)
        closure = implementation_of(case).build(case, inputs)
        assert judge.first_of(closure, case).ok
        check_timed(judge, closure, case, inputs)

    @pytest.mark.parametrize(
        ("fault", "says"),
        [
            (table_ignored, "NaN"),
            (table_of_the_first_sequence, "off by"),
            (rows_beyond_the_length, "NaN"),
            (gathered_once, "same"),
            (writes_a_page, "it changes its inputs: k in pages of 16"),
            (moves_pages, "it changes its inputs: block_table in pages of 16"),
        ],
    )
    def test_faults_are_found(self, fault, says):
        inputs = make_inputs(PAGED, 1)
        judge = Judge(PAGED, inputs, 1)
        check = judge.first_of(fault(PAGED, inputs.given_to(PAGED)), PAGED)
        assert not check.ok
        assert says in check.reason
        assert judge.first_of(implementation_of(PAGED).build(PAGED, inputs), PAGED).ok  # all is as it was

    @pytest.mark.parametrize("impl", ["eager", "planted"])
    def test_verify_checks_pages(self, monkeypatch, impl):
        monkeypatch.setattr(verify, "SHAPES", {"cpu": (CheckedShape(1, 2, 1, 33, 16, 3, 2),)})
        monkeypatch.setattr(verify, "LONG_SHAPES", {"cpu": ()})
        plant_table_ignored(monkeypatch)
        rows = run_checks([impl], "cpu", dtypes=["fp32"], asked=CheckFilter(op="conv-attention"))
        assert [(row.check, row.ok) for row in rows if row.check == "decode in pages" or not row.ok] == [
            ("decode in pages", impl == "eager")
        ]


class TestSweep:
    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        planted_sweeps.without_warm_up(monkeypatch)

    def test_pages_are_measured_beside_the_contiguous_cache(self, tmp_path):
        path = tmp_path / "out.csv"
        options = {"pass_": "decode", "seq": "40", "page_size": "none,16,128"}
        planted_sweeps.run(path, "eager,sdpa-math", **options)
        rows = read_file(path).rows()
        assert [(row["impl"], row["page_size"], row["status"]) for row in rows] == [
            ("eager", "", "ok"), ("eager", "16", "ok"), ("eager", "128", "ok"), ("sdpa-math", "", "ok"),
        ]  # fmt: skip
        assert [row["speedup"] for row in rows] == ["1", "1", "1", ""]
        assert len({row["rel_error"] for row in rows[:3]}) == 1
        _, again = planted_sweeps.run(path, "eager", resume=True, **(options | {"page_size": "none,16,64"}))
        assert [row["page_size"] for row in again.rows] == ["64"]


SIZES = (None, 128, 16)
CELLS = [*(replace(CONTIGUOUS, page_size=size, seq=seq) for seq in (40, 80) for size in SIZES)]
CELLS += [replace(CONTIGUOUS, impl="sdpa-math", operation=Operation(None, 0.25), seq=seq) for seq in (40, 80)]


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path):
        return written_runs.write_run(tmp_path / "run.csv", {one: written_runs.rounds(1.0) for one in CELLS})

    @pytest.fixture
    def old(self, tmp_path):
        """A file of before there were pages."""
        cells = {one: written_runs.rounds(1.0) for one in CELLS if one.page_size is None}
        path = written_runs.write_run(tmp_path / "old.csv", cells, run_id="old", started="2026-01-01T00:00:00Z")
        pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns="page_size").to_csv(path, index=False)
        return path

    def test_cells_and_their_samples_are_found(self, path):
        run = read_run(path)
        assert all(cell.rounds for cell in run.cells.values())
        names = [cell.name for cell in run.cells.values()]
        assert names[1] == "decode eager fp32 batch 2 heads 4 (KV 2) seq 40 head dim 16 conv 3x2 page size 128"
        assert len(set(names)) == len(CELLS)

    def test_old_and_new_files_in_every_command(self, old, path, tmp_path, monkeypatch, capsys):
        mtabench = make_runner(monkeypatch, capsys, tmp_path)
        out = printed(mtabench("compare", "old.csv", "run.csv"))
        assert "4 new" in out
        printed(mtabench("results", "merge", "old.csv", "run.csv", "--latest", "--out", "all.csv"))
        sizes = [row["page_size"] for row in read_file(tmp_path / "all.csv").rows()]
        assert sorted(sizes) == [""] * 4 + ["128"] * 2 + ["16"] * 2
        for words in (("show", "all.csv"), ("report", "all.csv"), ("dashboard", ".", "--out", "site")):
            printed(mtabench(*words))
        assert "page size 16" in "".join(page.read_text() for page in (tmp_path / "site").glob("*.*"))

    def test_a_table_tells_them_apart(self, path):
        view = make_view(read_file(path).rows())
        texts = {column.name: column.texts for column in view.columns}
        assert texts["page size"] == ("none", "128", "16", "none", "128", "16", "none", "none")
        cells = read_results(path).to_dict("records")
        view = told_apart(cells)
        assert next(column.texts for column in view.columns if column.name == "page size") == [*texts["page size"]]
        assert [name.partition("page size ")[2] for name in view.names] == [*texts["page size"]]
        alike = select(read_file(path).rows(), parse_where(["page-size=128,op=conv-attention"]), path)
        assert "page size 128" in make_view(alike).setting

    def test_charts_have_a_panel_a_size_with_plain_attention_in_each(self, path):
        found = {title: set(cells["impl"]) for title, cells in problems(read_cells([path]))}
        title = "head dim 16, convolution 3x2"
        assert list(found) == [f"{title}, page size {size}" for size in ("none", "16", "128")]
        assert set(map(frozenset, found.values())) == {frozenset({"eager", "sdpa-math"})}
