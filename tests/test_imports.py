"""Import arrows: kernels know nothing of the suite, pure modules nothing of torch, the cli stays light."""

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest
from command_line import run_python

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "kernels"
OF_KERNELS = ("mta_kernels", "mta_ladder")  # packages; the product knows nothing of the ladder
# Packages and modules of the suite that load torch or kernels; all others know nothing of them.
HEAVY = (
    "checking cluster.facts cluster.team commands.ab commands.ci commands.env commands.explain commands.history "
    "commands.memory commands.profile commands.roofline commands.verify comparing.pairs environment implementations "
    "measuring.ceilings measuring.failures measuring.poison measuring.samplers measuring.timing prediction.plans "
    "problem.inputs profiling.one_call profiling.tables profiling.trace static.compiling static.machine_code "
    "static.plans sweeps.settings sweeps.sweep transformer"
)
LIGHT_KERNELS = {
    "mta_kernels",
    "mta_kernels.operation",
    "mta_kernels.planned",
    "mta_kernels.score_chunks",
}  # of the kernels, what every module may know
# Of the kernels, what the suite may know: what people call, and plans with what compiles them.
PUBLIC = {
    "mta_kernels",
    "mta_kernels.code_cache",  # the folder of whatever is kept, with what writes there
    "mta_kernels.conv_attention",
    "mta_kernels.multi_token_attention",
    "mta_kernels.nvrtc.compiler",
    "mta_kernels.operation",
    "mta_kernels.plan",
    "mta_kernels.planned",
    "mta_kernels.score_chunks",
    "mta_kernels.torch_compile",
    "mta_ladder",
    "mta_ladder.cuda_conv",
}
# From the lowest: a module imports its own package, and packages and files of the lines above it here.
LAYERS = (
    "errors escaping json_output palette processes prose",
    "console exit_handling git pages problem",
    "environment implementations tables",
    "measuring registry static",
    "checking options prediction",
    "help results transformer",
    "charts dashboard profiling sweeps",
    "cluster comparing report",
    "commands",
    "cli",
)


parsed = functools.cache(ast.parse)  # many tests read the same sources


def imports(source, module, *, inside_functions):
    """Names of the modules that a source imports, those for type checkers left out."""
    names = set()
    todo = list(parsed(source).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names if source_of(f"{base}.{alias.name}")}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += ast.iter_child_nodes(node)
    return frozenset(names)


@functools.cache
def imports_of(module, *, inside_functions=True):
    """As `imports`, of a module's own source."""
    return imports(text_of(module), module, inside_functions=inside_functions)


@functools.cache
def text_of(module):
    return source_of(module).read_text()


@functools.cache
def source_of(module):
    """The file of one of this project's modules, or None."""
    for root in (ROOT, KERNELS):
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if module.startswith(("mtabench", *OF_KERNELS)) and path.is_file():
                return path
    return None


def loaded_with(module):
    """Every module that importing this one loads, as far as this project's own sources say."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        parents = {name.rpartition(".")[0]} - {""}
        found = imports_of(name, inside_functions=False) if source_of(name) else frozenset()
        todo += (found | parents) - seen
        seen |= found | parents
    return seen


def packages(names):
    return {name.partition(".")[0] for name in names}


def modules_under(folder, root=ROOT):
    paths = sorted(folder.rglob("*.py"))
    assert paths
    return [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]


def broken_by(modules, rule):
    """The modules that break a rule, with what `rule(module)` finds."""
    return {module: found for module in modules if (found := rule(module))}


def test_kernels_import_nothing_of_the_suite():
    def others(module):
        ladder = {"mta_ladder"} if module.startswith("mta_ladder") else set()
        integrated = module.removeprefix("mta_kernels.integrations.").partition(".")[0]  # is for that library alone
        allowed = {"torch", "triton", "numpy", "cuda", "mta_kernels", integrated} | ladder
        return packages(imports_of(module)) - sys.stdlib_module_names - allowed

    assert broken_by(modules_under(KERNELS, KERNELS), others) == {}


def test_kernels_know_no_library_that_they_are_integrated_in():
    def integrations(module):
        own = module.startswith("mta_kernels.integrations.")
        return not own and {x for x in imports_of(module) if x.startswith("mta_kernels.integrations")}

    assert broken_by(modules_under(KERNELS / "mta_kernels", KERNELS), integrations) == {}


def beyond_the_wall(source):
    """What a source names of the kernels' insides: in an import, or in a text that is a module's name."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name not in PUBLIC}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                is_module = source_of(name) is not None
                if (name if is_module else node.module) not in PUBLIC or not (is_module or is_exported(name)):
                    found.add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in PUBLIC:
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"mta_(kernels|ladder)(\.\w+)*", name)}


def is_exported(name):
    """Whether a module lists a name in `__all__`, or without one has it without an underscore in front."""
    module, _, name = name.rpartition(".")
    listed = [node.value for node in parsed(text_of(module)).body if isinstance(node, ast.Assign)
              and ast.unparse(node.targets[0]) == "__all__"]  # fmt: skip
    return name in ast.literal_eval(listed[0]) if listed else not re.match("_(?!_)", name)


def test_the_suite_knows_of_the_kernels_what_is_public():
    assert broken_by(modules_under(ROOT / "mtabench"), lambda module: beyond_the_wall(text_of(module))) == {}


def test_what_lies_beyond_the_wall_is_found():
    source = """
from typing import TYPE_CHECKING
from mta_kernels import gpu_limits, plan, __version__
if TYPE_CHECKING:
    from mta_kernels.conv_attention.triton.forward import value_block
def later():
    import mta_kernels.nvrtc.driver
    from mta_kernels.conv_attention import BACKENDS, api, choose
    from mta_kernels.operation import Operation, _told
    importlib.import_module("mta_kernels.allocation")
"""
    assert beyond_the_wall(source) == {
        "mta_kernels.gpu_limits", "mta_kernels.conv_attention.triton.forward.value_block", "mta_kernels.nvrtc.driver",
        "mta_kernels.conv_attention.api", "mta_kernels.conv_attention.choose", "mta_kernels.operation._told",
        "mta_kernels.allocation",
    }  # fmt: skip


def heavy(names):
    return packages(names - LIGHT_KERNELS) & {"torch", "triton", *OF_KERNELS}


def test_other_modules_know_nothing_of_torch():
    known = tuple(f"mtabench.{name}." for name in HEAVY.split())
    pure = [name for name in modules_under(ROOT / "mtabench") if not f"{name}.".startswith(known)]
    assert broken_by(pure, lambda module: heavy(imports_of(module) | loaded_with(module))) == {}


def test_implementations_load_neither_torch_nor_kernels():
    """`mtabench.registry` imports them all, which `loaded_with` does not see."""
    modules = [name.removesuffix(".__init__") for name in modules_under(ROOT / "mtabench" / "implementations")]
    assert broken_by(modules, lambda module: heavy(loaded_with(module))) == {}


def test_cli_loads_only_light_modules():
    loaded = loaded_with("mtabench.cli")
    assert not heavy(loaded) | packages(loaded) & {"numpy", "scipy", "pandas", "matplotlib"}


def upward(module, found):
    """Imports of a module that go up in LAYERS, or to another part of its own layer."""
    of = {part: number for number, parts in enumerate(LAYERS) for part in parts.split()}
    own = module.split(".")[1]
    others = {name.split(".")[1] for name in found if name.startswith("mtabench.")} - {own}
    return {other for other in others if of[other] >= of[own]}


def test_arrows_between_packages_point_down():
    modules = set(modules_under(ROOT / "mtabench")) - {"mtabench.__init__", "mtabench.__main__"}
    assert broken_by(modules, lambda module: upward(module, set(filter(source_of, imports_of(module))))) == {}


def test_an_arrow_that_is_turned_round_is_found():
    assert upward("mtabench.problem.work", {"mtabench.problem.case", "mtabench.sweeps.plan"}) == {"sweeps"}
    assert upward("mtabench.charts.style", {"mtabench.report.data"}) == {"report"}


# What asks a backend, and may know none by its folder: `backends` lists them.
ASKING = ("api", "choice", "operators", "replay")
BACKEND_FOLDERS = ("triton", "hopper", "cuda_decode")


def backends_known(found):
    """Folders of backends from which a module of conv attention imports."""
    parts = {name.removeprefix("mta_kernels.conv_attention.").partition(".")[0] for name in found}
    return parts & set(BACKEND_FOLDERS)


def test_a_backend_is_known_by_its_object_alone():
    asking = ["mta_kernels.backend", *(f"mta_kernels.conv_attention.{name}" for name in ASKING)]
    assert broken_by(asking, lambda module: backends_known(imports_of(module))) == {}


def test_what_every_module_may_know_knows_nothing_of_torch():
    def others(module):
        return packages(imports_of(module) - LIGHT_KERNELS) - sys.stdlib_module_names

    assert broken_by(LIGHT_KERNELS, others) == {}


@pytest.mark.parametrize(("package", "root"), [("mtabench", ROOT), *((x, KERNELS) for x in OF_KERNELS)])
def test_no_file_imports_itself_by_way_of_others(package, root):
    arrows = {}
    for module in modules_under(root / package, root):
        arrows[module] = {x for x in imports_of(module) if x.startswith(f"{package}.") and source_of(x)}
    graphlib.TopologicalSorter(arrows).prepare()  # raises CycleError, which has the files


def test_a_class_has_a_name_of_its_own():
    trees = [parsed(text_of(module)) for module in modules_under(ROOT / "mtabench")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


def test_the_table_of_implementations_is_read_when_it_is_needed():
    """A copy bound at import keeps what a test planted, and fails whichever test comes next."""

    def copies(module):
        imported = [node for node in ast.walk(parsed(text_of(module))) if isinstance(node, ast.ImportFrom)]
        return {"IMPLEMENTATIONS"} & {alias.name for node in imported for alias in node.names}

    assert broken_by(modules_under(ROOT / "mtabench"), copies) == {}


def test_the_reading_of_imports_sees_what_it_should():
    source = """
from typing import TYPE_CHECKING
import torch.nn
from . import errors
try:
    import numpy
except ImportError:
    pass
if TYPE_CHECKING:
    import pandas
def later():
    from mtabench.sweeps import sweep
"""
    top = {"typing", "torch.nn", "mtabench", "mtabench.errors", "numpy"}
    assert imports(source, "mtabench.example", inside_functions=False) == top
    assert imports(source, "mtabench.example", inside_functions=True) >= top | {"mtabench"}


def test_the_kernels_start_without_the_compiler():
    """`torch._dynamo` takes two seconds of every process that imports it; the counter of FLOPs imports Triton."""
    slow = "{'torch._dynamo', 'torch.utils.flop_counter'}"
    program = f"import sys, mta_kernels.conv_attention; print(not {slow}.isdisjoint(sys.modules))"
    done = run_python("-c", program)
    assert done.stdout == "False\n", done.stderr
