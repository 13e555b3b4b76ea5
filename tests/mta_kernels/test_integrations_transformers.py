"""`attn_implementation="mta"` on tiny models of random weights, in float64 on a CPU."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[transformers]'"
)
from mta_kernels.integrations.transformers import add_multi_token_attention  # noqa: E402
from mta_kernels.integrations.transformers.layers import with_older_queries  # noqa: E402
from mta_kernels.integrations.transformers.options import KEYS  # noqa: E402

CONV = {"pre_conv": [3, 5]}
SOME = CONV | {"layers": [1]}
MIXED = {"pre_conv": [3, 5], "pre_mix": True, "post_mix": 2, "norm": True, "gate": True}
WHOLE = {"pre_conv": [3, 5], "pre_mix": True, "post_conv": [2, 3], "post_mix": 2, "norm": True, "gate": True}
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def config(mta: dict[str, Any] | None = None, kind: str = "Llama", **options: Any) -> Any:
    given = {} if mta is None else {"mta": copy.deepcopy(mta)}
    return getattr(transformers, f"{kind}Config")(**SIZES | options, **given)


def model_of(mta: dict[str, Any], kind: str = "Llama", *, moved: bool = True, **options: Any) -> Any:
    """A model whose mixers are away from the identity, if `moved`."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config(mta, kind, **options), attn_implementation="mta")
    if moved:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".mta." in name:
                    parameter += 0.3 * torch.randn_like(parameter)
    return model.double().eval()


def text(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCABULARY, (1, length), generator=generator) for length in lengths]


def padded(rows: list[Tensor], side: str = "left") -> dict[str, Tensor]:
    """What a tokenizer makes of them."""
    longest = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(longest - row.shape[1], None) if side == "left" else slice(row.shape[1])
        ids[i, at], mask[i, at] = row[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def positions(mask: Tensor) -> Tensor:
    """As generation gives them to a padded batch."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize(("mta", "layers", "taps"), [(SOME, [1], (3, 5)), ({}, [0, 1], (6, 11))])
def test_chosen_layers_have_parameters_by_default_all_the_convolution_of_the_paper(mta, layers, taps):
    found = {name: tuple(x.shape) for name, x in model_of(mta).named_parameters() if ".mta." in name}
    assert found == {f"model.layers.{i}.self_attn.mta.mta_kernel": (4, 1, *taps) for i in layers}


@pytest.mark.parametrize(
    ("mta", "kind"), [(CONV, "Mistral"), (SOME, "Qwen3"), (MIXED, "Llama"), (WHOLE, "Llama")], ids=str
)
def test_generation_with_a_cache_is_that_without_and_padding_does_not_leak(mta, kind):
    model = model_of(mta, kind, head_dim=8, sliding_window=None)
    prompts = text(3, 9, 7)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    together = model.generate(**padded(prompts), **options)
    for i, prompt in enumerate(prompts):
        alone = model.generate(prompt, **options)
        written = prompt
        for step in range(4):
            logits = model(written, use_cache=False).logits[0, -1]
            torch.testing.assert_close(alone.logits[step][0].double(), logits, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(together.logits[step][i].double(), logits, rtol=1e-6, atol=1e-6)
            written = torch.cat([written, logits.argmax()[None, None]], 1)
        assert torch.equal(alone.sequences, written)
        assert torch.equal(together.sequences[i, -4:], written[0, -4:])


WAYS = {
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "static": {"cache_implementation": "static"},
    "static beams": {"cache_implementation": "static", "num_beams": 3, "num_return_sequences": 3},
    "chunks of a prompt": {"prefill_chunk_size": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mta", "kind"), [(SOME, "Qwen3"), (WHOLE, "Mistral")], ids=["some", "whole"])
def test_other_caches_and_drafts_write_the_same(way, mta, kind):
    """Mistral's layers have a sliding window, which hides no key here. Drafts are dropped from the caches."""
    model = model_of(mta, kind, head_dim=8, sliding_window=40)
    options = {"max_new_tokens": 5, "do_sample": False}
    beams = {name: value for name, value in WAYS[way].items() if name.startswith("num")}
    is_drafted = way in ("prompt lookup", "assistant")
    batch = {"input_ids": text(9)[0].repeat(1, 2)} if is_drafted else padded(text(3, 9, 7))
    more = {"assistant_model": model_of(CONV, kind, head_dim=8, sliding_window=40)} if way == "assistant" else {}
    got = model.generate(**batch, **options, **WAYS[way], **more)
    assert torch.equal(got, model.generate(**batch, **options, **beams, use_cache=False))


@pytest.mark.parametrize("mta", [CONV, SOME, WHOLE], ids=["conv", "some", "whole"])
@pytest.mark.parametrize("chunks", [(5, 1, 6), (2, 10), (1, 1, 10), (11, 1)])
def test_a_padded_prompt_in_chunks_is_the_whole(mta, chunks):
    model = model_of(mta)
    batch = padded(text(12, 8, 2))
    mask, where = batch["attention_mask"], positions(batch["attention_mask"])
    whole = model(**batch, position_ids=where, use_cache=False).logits
    cache, parts, done = transformers.DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for chunk in chunks:
            at = slice(done, done := done + chunk)
            parts.append(model(
                batch["input_ids"][:, at], attention_mask=mask[:, :done], position_ids=where[:, at],
                use_cache=True, **{CACHE: cache},
            ).logits)  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])


@pytest.mark.parametrize("mta", [CONV, SOME], ids=["conv", "some"])
def test_packed_documents_are_apart(mta):
    model = model_of(mta)
    documents = text(5, 1, 6, 12)
    rows = torch.stack([torch.cat([x[0] for x in documents[:3]]), documents[3][0]])
    where = torch.stack([torch.cat([torch.arange(n) for n in (5, 1, 6)]), torch.arange(12)])
    got = model(rows, position_ids=where, use_cache=False).logits
    expected = torch.cat([model(x).logits[0] for x in documents])
    torch.testing.assert_close(got.flatten(0, 1), expected)


@pytest.mark.parametrize("mta", [CONV, WHOLE], ids=["conv", "whole"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_trains(mta, checkpointing):
    model = model_of(mta, moved=False).train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    batch = padded(text(12, 8))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**batch, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        gradients = {name: x.grad for name, x in model.named_parameters() if ".mta." in name}
        assert all(x is not None and x.abs().max() > 0 for x in gradients.values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.parametrize("has_mask", [True, False])
def test_it_compiles_to_one_graph(has_mask):
    model = model_of(SOME)
    batch = padded(text(12, 8))
    mask = batch.pop("attention_mask")
    given = {"attention_mask": mask} if has_mask else {}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got, expected = (call(**batch, **given, use_cache=False).logits[mask.bool()] for call in (compiled, model))
    torch.testing.assert_close(got, expected)
    if has_mask:
        mask[0, 5] = 0
        with pytest.raises(RuntimeError, match="padding between tokens"):
            compiled(**batch, attention_mask=mask, use_cache=False)


@pytest.mark.usefixtures("without_interpreter")
def test_a_step_with_a_static_cache_compiles_to_one_graph():
    model = model_of(WHOLE, num_hidden_layers=1)
    batch = padded(text(8, 5))
    mask, where = batch["attention_mask"], positions(batch["attention_mask"])
    whole = model(**batch, position_ids=where, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for start, stop, call in ((0, 6, model), (6, 7, compiled), (7, 8, compiled)):
            given = model.prepare_inputs_for_generation(
                batch["input_ids"][:, :stop], next_sequence_length=stop - start, attention_mask=mask[:, :stop],
                position_ids=where[:, :stop], **{CACHE: cache},
            )  # fmt: skip
            is_token = mask[:, start:stop].bool()
            torch.testing.assert_close(call(**given).logits[is_token], whole[:, start:stop][is_token])


def test_mixers_of_a_model_in_bfloat16_are_loaded_in_float32(tmp_path):
    model = model_of(SOME | {"pre_mix": True})
    (prompt,) = text(9)
    model.save_pretrained(tmp_path)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mta", dtype=torch.bfloat16)
    assert {x.dtype for name, x in half.named_parameters() if ".mta." in name} == {torch.float32}
    assert half(prompt).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mta", [{}, SOME, WHOLE | {"norm": False, "gate": False}], ids=["default", "some", "whole"])
def test_a_plain_checkpoint_is_loaded_as_the_identity(mta, side, tmp_path):
    torch.manual_seed(1)
    before = transformers.LlamaForCausalLM(config()).double().eval()
    before.save_pretrained(tmp_path)
    given = transformers.AutoConfig.from_pretrained(tmp_path)
    given.mta = mta
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=given, attn_implementation="mta")
    assert any(".mta." in name for name, _ in model.named_parameters())
    batch = padded(text(12, 7), side)
    is_token, where = batch["attention_mask"].bool(), positions(batch["attention_mask"])
    got, expected = (x(**batch, position_ids=where).logits[is_token] for x in (model.double(), before))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layers", [[0], range(1)])
def test_each_layer_keeps_its_own_options(layers, tmp_path):
    """As the paper's models have them: mixings everywhere, convolutions in some, and a depth that is the layer's."""
    model = transformers.LlamaForCausalLM(config()).double().eval()
    (prompt,) = text(9)
    add_multi_token_attention(model, layers=layers, **CONV, pre_mix=True, norm=True, depth="layer")
    add_multi_token_attention(model, layers=[1], pre_conv=None, post_mix=2, norm=True, depth="layer")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mta." in name:
                parameter += 0.3 * torch.randn_like(parameter)
    first, second = (layer.self_attn.mta for layer in model.model.layers)
    assert (first.depth, second.depth) == (0, 1)
    assert (first.wpsm is None, second.mta_kernel is None) == (False, True)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mta").double()
    torch.testing.assert_close(again(prompt).logits, model(prompt).logits)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pre_con": (3, 5)}, "there is no option 'pre_con'; expected some of layers, pre_conv, "),
        ({"post_mix": 3}, "post_mix"),
        ({"pre_conv": (3, 0)}, "pre_conv"),
        ({"layers": [0, 1]}, "layer 0 has multi-token attention already"),
    ],
)
def test_a_refused_option_leaves_the_model_as_it_was(options, error):
    model = transformers.LlamaForCausalLM(config())
    add_multi_token_attention(model, layers=[0], pre_conv=(2, 3))
    before, names = copy.deepcopy(model.config.mta), list(model.state_dict())
    with pytest.raises(ValueError, match=error):
        add_multi_token_attention(model, **{"layers": [1]} | options)
    assert (model.config.mta, list(model.state_dict())) == (before, names)
    other = transformers.LlamaForCausalLM(config())
    with pytest.raises(ValueError, match="post_mix"):
        add_multi_token_attention(other, post_mix=3)
    assert getattr(other.config, "mta", None) is None
    assert other.config._attn_implementation != "mta"


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
OTHERS = {
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "GPTNeoX": {"intermediate_size": 48}, "GPT2": {}, "BioGpt": {},
    "Llama": {"intermediate_size": 48},
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_start_as_they_were_and_generate(kind):
    """Also OPT, which scales its queries itself, and GPT-NeoX, whose head dim has another name."""
    torch.manual_seed(3)
    given = getattr(transformers, f"{kind}Config")(**SMALL, **OTHERS[kind], eos_token_id=None, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(given, attn_implementation="eager").double().eval()
    (prompt,) = text(9)
    before = model(prompt, use_cache=False).logits
    add_multi_token_attention(model, **CONV)
    torch.testing.assert_close(model(prompt, use_cache=False).logits, before)
    for name, parameter in model.named_parameters():
        if ".mta." in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    assert not torch.allclose(model(prompt, use_cache=False).logits, before)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, **options, use_cache=False))


@pytest.mark.parametrize("kind", ["Bloom", "GPTNeoXJapanese", "RoFormer", "BigBird", "Falcon", "GPTNeo"])
def test_a_model_that_attends_by_itself_is_refused_before_it_loses_its_mask(kind):
    sizes = {**SMALL, "intermediate_size": 48, "is_decoder": True}
    if kind == "GPTNeo":
        sizes = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    make = getattr(transformers, f"{kind}Config")
    with pytest.raises(ValueError, match=f"{kind}.* computes attention by itself") as refused:
        transformers.AutoModelForCausalLM.from_config(make(**sizes), attn_implementation="mta")
    assert "\n" not in str(refused.value)
    model = transformers.AutoModelForCausalLM.from_config(make(**sizes))
    with pytest.raises(ValueError, match="computes attention by itself"):
        add_multi_token_attention(model)


def test_a_model_without_one_head_dim_is_refused_in_one_sentence():
    sizes = SMALL | {"intermediate_size": 48, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
    sizes |= {"topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    given = transformers.DeepseekV3Config(**sizes, v_head_dim=8, first_k_dense_replace=2)
    model = transformers.AutoModelForCausalLM.from_config(given, attn_implementation="mta")
    with pytest.raises(ValueError, match="DeepseekV3Attention is no layer that attn_implementation='mta' knows"):
        model(text(6)[0])


def test_an_offloaded_layer_is_refused_in_one_sentence(tmp_path):
    pytest.importorskip("accelerate")
    model_of(CONV).save_pretrained(tmp_path)
    places = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="mta",
        device_map=places | {"model.layers.1": "disk"},
        offload_folder=tmp_path / "x",
    )
    with pytest.raises(ValueError, match="layer 1 is offloaded"):
        model.generate(text(6)[0], max_new_tokens=2)


def mixers_after_step(*, sharded: bool) -> dict[str, Tensor]:
    """Of a model in bfloat16."""
    torch.manual_seed(5)
    given = config(CONV | {"pre_mix": True})
    model = transformers.AutoModelForCausalLM.from_config(given, attn_implementation="mta", dtype=torch.bfloat16)
    if sharded:
        mesh = init_device_mesh("cpu", (1,))
        for part in (x for layer in model.model.layers for x in (layer.self_attn.mta, layer)):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    tokens = torch.randint(2, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found = {name: x.detach() for name, x in model.named_parameters() if ".mta." in name}
    return {name: x.full_tensor() for name, x in found.items()} if sharded else found


def test_fsdp2_shards_float32_mixers_of_a_bfloat16_model():
    """By one rank; `test_torchtitan_attention` has two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = mixers_after_step(sharded=True)
    finally:
        dist.destroy_process_group()
    expected = mixers_after_step(sharded=False)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    mixing = expected["model.layers.1.self_attn.mta.wpsm.weight"]
    assert mixing.dtype == torch.float32
    assert (mixing - torch.eye(4)).abs().max() > 0.1


def test_trained_mixers_that_are_left_out_are_named(tmp_path):
    model_of(CONV).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="config.mta is set, and attn_implementation is 'sdpa'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_peft_trains_and_saves_what_modules_to_save_names(tmp_path):
    peft = pytest.importorskip("peft")
    model = model_of(WHOLE).float()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["mta"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    trained = {name for name, x in adapted.named_parameters() if x.requires_grad and ".mta." in name}
    assert len(trained) == sum(".mta." in name for name, _ in model.named_parameters())
    (prompt,) = text(9)
    optimizer = torch.optim.AdamW((x for x in adapted.parameters() if x.requires_grad), lr=1e-2)
    adapted(prompt, labels=prompt).loss.backward()
    optimizer.step()
    adapted.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    torch.testing.assert_close(again(prompt).logits, adapted(prompt).logits)
    assert not torch.allclose(again(prompt).logits, model(prompt).logits)


def filled_by_another(model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(text(5)[0], **{CACHE: cache})
    model.set_attn_implementation("mta")
    return model(text(1)[0], **{CACHE: cache})


def offloaded(model: Any) -> Tensor:
    cache = transformers.DynamicCache(config=model.config)
    cache.offloading = True  # as DynamicCache(offloading=True) on a GPU
    return with_older_queries(cache, 0, torch.zeros(1, 4, 1, 8), 2)


def without_parameters(model: Any) -> Any:
    other = transformers.LlamaForCausalLM(config())
    other.set_attn_implementation("mta")
    return other(text(6)[0])


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1]])
REFUSED = {
    "a cache without places for queries": (
        lambda model: model(text(5)[0], **{CACHE: transformers.DynamicCache()}), "keeps no queries"
    ),
    "an offloaded cache": (lambda model: offloaded(model), "in an offloaded cache"),
    "a cache of pages": (lambda model: with_older_queries(object(), 0, torch.zeros(1, 4, 1, 8), 2), "in a object"),
    "a quantized cache": (
        lambda model: model.generate(text(5)[0], cache_implementation="quantized", max_new_tokens=3), "QuantizedCache"
    ),
    "a mask that is longer than the tokens": (
        lambda model: model(text(6)[0], attention_mask=torch.ones(1, 9), use_cache=False), "6 tokens and no cache"
    ),
    "a mask of four dimensions": (
        lambda model: model(text(6)[0], attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool)), "tokenizer's"
    ),
    "padding between tokens": (lambda model: model(text(6)[0], attention_mask=HOLES), "between tokens"),
    "probabilities": (lambda model: model(text(6)[0], output_attentions=True), "output_attentions"),
    "a cache that another attention filled": (filled_by_another, "5 keys and no queries of layer 0"),
    "dropout in training": (
        lambda model: model_of(CONV, attention_dropout=0.1).train()(text(6)[0]), r"attention_dropout=0\.1"
    ),
    "a model without the parameters": (without_parameters, "add_multi_token_attention"),
    "an option that there is not": (
        lambda model: model_of({"pre_con": [3, 5]}), "config.mta has 'pre_con'; expected some of layers, pre_conv, "
    ),
    "a layer that there is not": (
        lambda model: model_of({"layers": [1, 2]}), r"config.mta has the layers \[1, 2\]; expected some of 0 to 1"
    ),
    "a layer in two groups": (
        lambda model: model_of([{"layers": [1]}, {"pre_mix": True}]), "config.mta has layer 1 in two groups; expected"
    ),
    "packing with a cache": (
        lambda model: model(text(6)[0], cu_seq_lens_q=torch.tensor([0, 3, 6]), use_cache=True), "cu_seq_lens_q"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(what):
    call, message = REFUSED[what]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message) as refused:
        call(model_of(CONV))
    assert "\n" not in str(refused.value)


def test_the_page_names_every_key_of_the_config():
    page = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    table = page.partition("| key of `config.mta` |")[2].partition("\n\n")[0]
    assert [key for key in KEYS if f"`{key}`" not in table] == []


@pytest.mark.parametrize("mta", [CONV, SOME, WHOLE], ids=["conv", "some", "whole"])
def test_a_sliding_window_is_refused_where_it_hides_a_key(mta):
    """And where it hides none it changes nothing, in generation too."""
    model, wide = (model_of(mta, "Mistral", sliding_window=window) for window in (10, None))
    for prompts in (text(6), text(6, 3)):
        options = padded(prompts) | {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(**options), wide.generate(**options))
    cache = transformers.DynamicCache(config=model.config)
    first = model(text(6)[0], use_cache=True, **{CACHE: cache}).logits
    torch.testing.assert_close(first, wide(text(6)[0]).logits)
    with pytest.raises(ValueError, match=r"sliding window|sliding cache"):
        model(text(11)[0], use_cache=False)
    with pytest.raises(ValueError, match=r"sliding window|sliding cache|not causal alone"):
        model.generate(text(6)[0], max_new_tokens=8, eos_token_id=None)


def test_a_model_without_such_layers_is_refused():
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1))
    with pytest.raises(ValueError, match="BertModel has no causal attention layer"):
        add_multi_token_attention(bert)
    with pytest.raises(ValueError, match=r"layers is \[2\]; expected some of 0 to 1"):
        add_multi_token_attention(transformers.LlamaForCausalLM(config()), layers=[2])
