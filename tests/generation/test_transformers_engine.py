"""The embedded engine around adapters, value heads, encoder-decoders, mixed precision; its choice of a route."""

import copy
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from tests.generation.test_engine_contract import ids_of, oracle, prompts_of, scored_logps
from tests.tiny import tiny_model, tiny_seq2seq
from trl.generation.engine import Sampling
from trl.generation.transformers import decoders as fused
from trl.generation.transformers.engine import TransformersEngine
from trl.models.scoring.encoder_decoder import Seq2SeqScorer
from trl.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead

GREEDY = Sampling(max_new_tokens=16, do_sample=False)
PROJECTIONS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def adapted(base, **options):
    """A model with an adapter whose weights say something."""
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=PROJECTIONS, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("route", ["auto", "forward", "generate"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"use_rslora": True, "lora_dropout": 0.5}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}],
    ids=str,
)  # fmt: skip
def test_adapters_are_honoured(route, options):
    base = tiny_model("qwen2", dtype=torch.float64)
    model = adapted(base, **options)
    if "modules_to_save" in options:
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = TransformersEngine(model.train(), route=route)
    found = ids_of(engine.generate(prompts_of(), GREEDY))
    assert bool(engine.fallbacks) == (route == "auto" and ("use_dora" in options or "modules_to_save" in options))
    assert found == oracle(model.eval(), prompts_of(), max_new_tokens=16)
    assert found != oracle(base, prompts_of(), max_new_tokens=16)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with model.disable_adapter():
        assert ids_of(engine.generate(prompts_of(), GREEDY)) == oracle(base, prompts_of(), max_new_tokens=16)


def test_weights_too_large_to_copy_are_not(monkeypatch):
    monkeypatch.setattr(fused, "LARGEST_COPIED", 0)
    engine = TransformersEngine(tiny_model("qwen2"))
    engine.generate(prompts_of(), GREEDY)
    assert engine.fallbacks == ["its weights are too large to be copied"]


def test_prompt_learning_falls_back():
    torch.manual_seed(0)
    base = tiny_model("llama", dtype=torch.float64)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).double().eval()
    engine = TransformersEngine(model)
    prompts = prompts_of()
    expected = [oracle(model, [prompt], max_new_tokens=8)[0] for prompt in prompts]
    found = engine.generate(prompts, Sampling(max_new_tokens=8, do_sample=False))
    assert ids_of(found) == expected
    assert "virtual tokens" in engine.fallbacks[0]


@pytest.mark.parametrize("route", ["fused", "forward"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_of_adapted_models_are_those_of_the_scoring_forward(route, temperature):
    model = adapted(tiny_model("qwen3"), lora_dropout=0.5).train()
    sampling = Sampling(max_new_tokens=16, temperature=temperature, seed=2)
    found = TransformersEngine(model, route=route).generate(prompts_of(), sampling)
    for prompt, completion in zip(prompts_of(), found, strict=True):
        expected = scored_logps(model.eval(), prompt, completion.ids, temperature)
        torch.testing.assert_close(completion.logps, expected, rtol=1e-5, atol=1e-5)


def test_value_heads_are_looked_through():
    base = tiny_model("llama", dtype=torch.float64)
    expected = oracle(base, prompts_of(), max_new_tokens=16)
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    assert ids_of(TransformersEngine(wrapped).generate(prompts_of(), GREEDY)) == expected
    model = adapted(base)
    wrapped = AutoModelForCausalLMWithValueHead.from_pretrained(model)
    found = ids_of(TransformersEngine(wrapped).generate(prompts_of(), GREEDY))
    assert found == oracle(model, prompts_of(), max_new_tokens=16)
    seq2seq = tiny_seq2seq("t5", dtype=torch.float64)
    wrapped = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(seq2seq)
    expected = ids_of(TransformersEngine(seq2seq).generate(prompts_of(), GREEDY))
    assert ids_of(TransformersEngine(wrapped).generate(prompts_of(), GREEDY)) == expected


# ---- encoder-decoders


@pytest.mark.parametrize("architecture", ["t5", "mt5", "bart", "marian"])
@pytest.mark.parametrize("max_batch", [None, 5])
def test_encoder_decoders(architecture, max_batch):
    model = tiny_seq2seq(architecture, dtype=torch.float64)
    prompts = prompts_of()
    engine = TransformersEngine(model, max_batch=max_batch)
    found = engine.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, found, strict=True):
        row = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, 1:].tolist()
        assert completion.ids == row[: row.index(2) + 1 if 2 in row else None]
    sampling = Sampling(max_new_tokens=16, temperature=0.8, seed=4)
    sampled = engine.generate(prompts, sampling)
    alone = engine.generate(prompts[4:5], sampling, streams=[4])
    assert alone[0].ids == sampled[4].ids
    assert engine.fallbacks == ["it is an encoder-decoder model"]


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_logps_of_encoder_decoders_are_those_of_the_scoring_forward(architecture):
    factor = {"initializer_factor": 1.0} if architecture == "t5" else {}
    model = tiny_seq2seq(architecture, **factor)
    prompts = prompts_of(copies=2)
    found = TransformersEngine(model).generate(prompts, Sampling(max_new_tokens=10, seed=0))
    scorer = Seq2SeqScorer(model)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "decoder_labels": torch.tensor([completion.ids]),
            "decoder_prompt": torch.tensor([0]),
        }
        with torch.no_grad():
            expected = scorer.score(model, batch).logps
        torch.testing.assert_close(completion.logps, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bart", "marian"])
def test_windows_of_encoder_decoders(architecture):
    """As many positions for the prompt as for the completion, which begins with one of its own."""
    engine = TransformersEngine(tiny_seq2seq(architecture, max_position_embeddings=16))
    sampling = Sampling(max_new_tokens=40, stop_token_ids=(), seed=0)
    assert [len(found.ids) for found in engine.generate([[5] * 16, [6]], sampling)] == [15, 15]
    with pytest.raises(ValueError, match=r"prompts\[1\] has 17 tokens, the context length is 16"):
        engine.generate([[5], [5] * 17], sampling)


def test_virtual_tokens_take_places_of_the_window():
    base = tiny_model("llama", max_position_embeddings=16)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    engine = TransformersEngine(model)
    found = engine.generate([[5] * 6], Sampling(max_new_tokens=40, stop_token_ids=(), seed=0))
    assert len(found[0].ids) == 16 - 3 - 6
    with pytest.raises(ValueError, match=r"prompts\[0\] has 13 tokens, the context length is 13"):
        engine.generate([[5] * 13], Sampling())


# ---- precision


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("through", ["context", "accelerator"])
def test_autocast(architecture, through):
    model = tiny_model(architecture, initializer_range=0.1)
    prompts, sampling = prompts_of(), Sampling(max_new_tokens=12, seed=0, stop_token_ids=())
    if through == "accelerator":
        accelerator = SimpleNamespace(
            mixed_precision="bf16",
            unwrap_model=lambda model: model,
            state=SimpleNamespace(deepspeed_plugin=None),
        )
        found = TransformersEngine(model, accelerator=accelerator).generate(prompts, sampling)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = TransformersEngine(model).generate(prompts, sampling)
    differences, plain = [], []
    for prompt, completion in zip(prompts, found, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            differences.append(completion.logps - scored_logps(model, prompt, completion.ids))
        plain.append(completion.logps - scored_logps(model, prompt, completion.ids))
        assert completion.logps.dtype == torch.float32
    assert torch.cat(differences).abs().max() < 0.05
    assert torch.cat(plain).abs().max() > 1e-4  # it was half precision


# ---- routes


def test_routes_are_chosen_by_what_a_model_can_take():
    for architecture, reasons in (("llama", 0), ("gpt2", 1), ("bloom", 1)):
        engine = TransformersEngine(tiny_model(architecture))
        engine.generate([[3, 4]], Sampling(max_new_tokens=2))
        assert len(engine.fallbacks) == reasons
    with pytest.raises(ValueError, match="route='fused' needs another model: its architecture"):
        TransformersEngine(tiny_model("gpt2"), route="fused").generate([[3]], Sampling())
    with pytest.raises(ValueError, match="max_batch must be"):
        TransformersEngine(tiny_model("gpt2"), max_batch=0)


def test_hooks_on_layers_are_run():
    model = tiny_model("llama", dtype=torch.float64)
    plain = ids_of(TransformersEngine(model).generate(prompts_of(), GREEDY))
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0)
    engine = TransformersEngine(model)
    found = ids_of(engine.generate(prompts_of(), GREEDY))
    assert found == oracle(model, prompts_of(), max_new_tokens=16) != plain
    assert engine.fallbacks == ["its layers have hooks"]


def test_many_prompts_are_read_in_several_rows(monkeypatch):
    monkeypatch.setattr("trl.generation.transformers.rollout_loop.PREFILL_TOKENS", 10)
    model = tiny_model("llama", dtype=torch.float64)
    prompts = prompts_of(lengths=(5, 9, 3, 12, 30, 2, 7), copies=2)
    sampling = Sampling(max_new_tokens=90, seed=1, top_p=0.9)
    one = TransformersEngine(model).generate(prompts, sampling)
    assert max(len(completion.ids) for completion in one) > 64  # the first columns were not enough
    for max_batch in (3, 4, 9):
        assert ids_of(TransformersEngine(model, max_batch=max_batch).generate(prompts, sampling)) == ids_of(one)
