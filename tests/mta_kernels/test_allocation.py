"""Memory for kernels is not filled under deterministic algorithms, and all of it comes from one module."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mta_kernels
from mta_kernels.allocation import empty, empty_like, new_empty

PACKAGE = Path(mta_kernels.__file__).parent
FACTORIES = {"empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
OTHERS = {  # functions outside of fakes that may call a factory: no kernel fills what it returns
    "conv_attention/arguments.py like_cast",
    "multi_token_attention/choice.py _cuda_kernels",  # of the meta device
    "multi_token_attention/module.py __init__",
    "plan.py plan",  # of the meta device
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def filled(allocate: Callable[[], torch.Tensor]) -> list[list[int]]:
    """Shapes of the tensors that are filled; what memory holds that nobody fills depends on what ran before."""
    with torch.profiler.profile(record_shapes=True) as profile:
        allocate()
    return [event.input_shapes[0] for event in profile.events() if event.name == "aten::fill_"]


def test_nothing_is_filled(deterministic: None) -> None:
    like = torch.zeros(5)
    assert filled(lambda: torch.empty(5)) == [[5]]
    for allocate in (lambda: empty(5), lambda: empty_like(like), lambda: new_empty(like, 5)):
        assert {*map(tuple, filled(allocate))} <= {(0,)}


@pytest.mark.parametrize("shape", [(), (0,), (2, 3, 4), (3, 0, 2)])
def test_tensors_are_as_pytorch_makes_them(deterministic: None, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).half()
    permuted = torch.ones(2, 3, 4).permute(2, 0, 1)
    options = {"dtype": torch.int32}
    for got, want in (
        (empty(*shape, 2, **options), torch.empty(*shape, 2, **options)),
        (empty(shape, device="cpu"), torch.empty(shape, device="cpu")),
        (empty_like(x), torch.empty_like(x)),
        (empty_like(permuted), torch.empty_like(permuted)),
        (new_empty(x, shape), x.new_empty(shape)),
        (new_empty(x, *shape, 2, **options), x.new_empty(*shape, 2, **options)),
    ):
        assert (got.shape, got.stride(), got.dtype, got.device) == (want.shape, want.stride(), want.dtype, want.device)
        assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes()
        assert torch.equal(got.fill_(3), want.fill_(3))


def test_compilers_trace_it(deterministic: None) -> None:
    compiled = torch.compile(
        lambda x: empty_like(x).copy_(x) + new_empty(x, 3).fill_(2), backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]


def test_no_other_module_allocates() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "allocation.py"
        for name in allocating_functions(ast.parse(path.read_text()))
    }
    assert found <= OTHERS


def allocating_functions(tree: ast.AST, inside: str = "") -> Iterator[str]:
    """The functions in which a factory of PyTorch gets memory, without fakes, whose tensors have none."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            fakes = any("register_fake" in ast.unparse(decorator) for decorator in node.decorator_list)
            if not fakes and not node.name.lstrip("_").startswith("like_"):  # as `operator_gradients.define` takes them
                yield from allocating_functions(node, node.name)
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_factory = node.func.attr in FACTORIES or ast.unparse(node.func) == "torch.empty"
            if is_factory and not any(ast.unparse(option) == "device='meta'" for option in node.keywords):
                yield inside
        yield from allocating_functions(node, inside)
