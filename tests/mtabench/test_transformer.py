"""The suite's transformer: its layers, generation with and without a cache, weights that are shared."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mta_kernels.multi_token_attention.module import PRESETS as MODULE_PRESETS
from mtabench.problem.axes import PRESETS
from mtabench.problem.case import Case
from mtabench.problem.inputs import use_full_float32
from mtabench.problem.layers import (
    embedding_parameters,
    layer_cases,
    layer_operation,
    matrix_parameters,
    parse_attention,
    ragged_lengths,
)
from mtabench.problem.operations import make_operation
from mtabench.problem.work import tokens, useful_flops
from mtabench.transformer.cache import Cache, Generator, prefill, step
from mtabench.transformer.model import Config, Transformer
from mtabench.transformer.problem import Training
from mtabench.transformer.shared import Shared, shared_of

ROOT = Path(__file__).parents[2]
HEADS, HEAD_DIM, WORDS = 2, 16, 50
MODELS = {
    "plain": (None, "", None, None),
    "conv/4": ((3, 5), "", None, 4),
    "conv": ((3, 4), "", None, 1),
    "mta/4": ((3, 5), "heads", (2, 3), 4),
    "more taps after": ((2, 3), "heads", (4, 3), 1),
    "one query tap": ((1, 3), "heads", (1, 3), 1),
    "mix": (None, "heads", None, None),
}


def operation_of(name):
    conv, mix, post, every = MODELS[name]
    return make_operation(conv, mix, post, heads=HEADS, head_dim=HEAD_DIM), every


def make_model(name, length=300):
    """A model of four layers in float64, whose convolutions and mixings are random."""
    torch.manual_seed(3)
    model = Transformer(Config(4, HEADS, HEAD_DIM, *operation_of(name), "reference", WORDS), length).double()
    with torch.no_grad():
        for mixer in model.mixers():
            mixer += 0.3 * torch.randn_like(mixer)
    return model.requires_grad_(False)


def case_of(name="conv/4", mode="train", **changes):
    operation, every = operation_of(name)
    case = Case(
        pass_=mode, impl="auto", operation=operation, dtype="fp32", batch=2, heads=HEADS, kv_heads=HEADS, seq=24,
        head_dim=HEAD_DIM, splits=None, device="cpu", layers=4, conv_every=every,
    )  # fmt: skip
    return replace(case, **changes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [150, 37])
def test_prompts_in_chunks_and_tokens_after_them_are_those_of_the_whole_model(name, chunk):
    model, lengths = make_model(name), torch.tensor([150, 131, 2])
    cache = Cache(model, 3, 155, torch.float64)
    cache.pages.fill_(float("nan"))  # what was never written is never read
    drawn = torch.randint(WORDS, (3, 155))
    logits = prefill(model, cache, drawn[:, :150], lengths, chunk)
    for after in range(4):
        for sequence, length in enumerate(lengths + after):
            text = torch.cat([drawn[sequence, : lengths[sequence]], drawn[sequence, 151 : 151 + after]])
            torch.testing.assert_close(logits[sequence], model(text[None, :length])[0, -1], rtol=1e-9, atol=1e-9)
        logits = step(model, cache, drawn[:, 151 + after])


def test_a_cache_takes_other_prompts_and_a_generator_the_likeliest_tokens():
    model = make_model("mta/4")
    cache, lengths = Cache(model, 2, 64, torch.float64), torch.tensor([40, 17])
    prefill(model, cache, torch.randint(WORDS, (2, 60)), torch.tensor([60, 60]))
    prompts = torch.randint(WORDS, (2, 40))
    generator = Generator(model, cache, prefill(model, cache, prompts, lengths, 16))
    assert_generates(model, generator, prompts, lengths, 6, rtol=1e-9, atol=1e-9)


def assert_generates(model, generator, prompts, lengths, count, **tolerance):
    """Its tokens and the logits after them equal the whole model `model`'s, which has no cache."""
    found = torch.stack([generator.next() for _ in range(count)], 1)
    after = step(generator._model, generator.cache, generator.tokens)
    for sequence, length in enumerate(lengths):
        text = torch.cat([prompts[sequence, :length], found[sequence], generator.tokens[sequence, None]])
        logits = model(text[None])[0, length - 1 :]
        torch.testing.assert_close(logits[:-1].gather(1, text[length:, None])[:, 0], logits[:-1].amax(1), **tolerance)
        torch.testing.assert_close(after[sequence], logits[-1], **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("name", ["plain", "conv/4", "conv", "mta/4"])
def test_a_graph_generates_ragged_batches(name, batch):
    use_full_float32()
    truth, model = (make_model(name).float().to("cuda") for _ in range(2))
    for mta in model.attentions():
        if mta is not None:
            mta.backend = "auto"
    lengths = torch.tensor(ragged_lengths(batch, 140))  # of 64, some grow into another page
    prompts = torch.randint(WORDS, (batch, 140), device="cuda")
    cache = Cache(model, batch, 160, torch.float32)
    cache.pages.fill_(float("nan"))
    for _ in range(2):  # the cache is taken again, by another graph
        generator = Generator(model, cache, prefill(model, cache, prompts, lengths.to("cuda"), 64))
        assert generator._graph is not None
        assert_generates(truth, generator, prompts, lengths, 12, rtol=1e-3, atol=1e-3)
        prompts = prompts.flip(0)


def test_a_token_beyond_the_cache_is_refused():
    model = make_model("plain")
    cache = Cache(model, 2, 20, torch.float64)
    prompts = torch.zeros(2, 18, dtype=torch.long)
    generator = Generator(model, cache, prefill(model, cache, prompts, torch.tensor([18, 5])))
    generator.next()
    generator.next()
    with pytest.raises(ValueError, match="the cache is full: it has room for 20 tokens; make it larger"):
        generator.next()


def test_which_layers_convolve():
    operation, _ = operation_of("mta/4")
    assert [layer for layer in range(8) if layer_operation(operation, layer, 4).pre_conv] == [2, 6]
    assert all(layer_operation(operation, layer, 1) == operation for layer in range(3))
    assert layer_operation(operation, 0, 4).pre_mix is not None
    assert list(layer_cases(case_of("conv/4", layers=12)).values()) == [9, 3]
    assert [mta is not None for mta in make_model("conv/4").attentions()] == [False, False, True, False]
    assert parse_attention("Conv") == ("conv", 1)
    assert parse_attention("mta/4") == ("mta", 4)
    assert parse_attention("mix") == ("mix", None)


def test_presets_are_those_of_the_module():
    assert {name: (one.heads, one.head_dim, one.layers) for name, one in PRESETS.items()} == MODULE_PRESETS


@pytest.mark.parametrize("name", ["plain", "conv/4", "mta/4"])
def test_parameters_are_counted(name):
    case = case_of(name)
    model = Shared(case, 1).model(case, "auto")
    parts = [part for layer in model.layers for part in (layer.attention, layer.network)]
    matrices = [one for part in parts for one in (part.project_in, part.project_out)]
    assert sum(one.weight.numel() for one in matrices) == matrix_parameters(case)
    assert model.tokens.weight.numel() == embedding_parameters(case)


def test_work_of_a_model():
    train, prompt = case_of("plain"), case_of("plain", "prefill")
    token = case_of("plain", "generate", seq=4096)
    assert (tokens(train), tokens(prompt), tokens(token)) == (48, 48, 2)
    products = 2 * (matrix_parameters(train) + embedding_parameters(train)) * 48
    assert 3 * products < useful_flops(train) < 3.1 * products
    assert useful_flops(case_of("conv/4")) > useful_flops(train)
    assert useful_flops(token) > 2 * 4 * 2 * 3072 * HEADS * HEAD_DIM * 2
    assert ragged_lengths(1, 4096) == [4096]
    assert ragged_lengths(4, 4096) == [4096, 3584, 3072, 2560]


def test_models_of_a_shape_share_weights_and_begin_alike():
    plain, conv = case_of("plain"), case_of("conv/4")
    shared = shared_of(plain, 5)
    assert shared_of(conv, 5) is shared
    assert shared_of(conv, 6) is not shared
    first, second = Training(shared.model(plain, "auto"), shared), Training(shared.model(conv, "reference"), shared)
    assert first.model.tokens.weight is second.model.tokens.weight
    assert len(second.model.mixers()) == 1
    loss = second.loss_after(3)
    assert loss < second.loss_after(0)
    first.loss_after(2)
    assert second.loss_after(3) == pytest.approx(loss, rel=1e-5)


@pytest.mark.usefixtures("without_interpreter")
def test_the_example_of_the_page_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)
    names = {}
    exec(code, names)
    assert names["tokens"].shape == (2, 8)
