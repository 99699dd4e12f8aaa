"""Decoders that complete with our cache, and those that their own `generate` completes: by what a small copy does."""

import logging

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from tests.architectures import config_of, model_of
from tests.generation.test_engine_contract import prompts_of, scored_logps
from tests.tiny import tiny_model
from trl.generation.engine import Sampling
from trl.generation.live import Request
from trl.generation.transformers import decode_check
from trl.generation.transformers.decode_check import decode_unsupported, padding_leaks
from trl.generation.transformers.engine import TransformersEngine
from trl.models.packed import support
from trl.models.parts import CACHE

# With the largest difference of log-probs in float64: more where layers compute in float32.
OURS = {
    **dict.fromkeys(
        ["cohere2", "ernie4_5_moe", "exaone4", "gemma3n_text", "gemma4_text", "gpt_bigcode", "gpt_oss", "granite_swa",
         "hunyuan_v1_moe", "longcat_flash", "ministral3", "olmo3", "seed_oss", "smollm3"],
        1e-10,
    ),
    **dict.fromkeys(
        ["afmoe", "deepseek_v2", "deepseek_v3", "gemma2", "glm4_moe", "laguna", "llama4_text", "mimo_v2_flash",
         "minimax_m2"],
        1e-5,
    ),
    **dict.fromkeys(STATES := (
        "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba2", "olmo_hybrid",
        "qwen3_5_text", "qwen3_next",
    ), 1e-5),
}  # fmt: skip
GENERATE = {
    "deepseek_v32": "its DeepseekV32Indexer (layers.0.self_attn.indexer) fails on packed rows",
    "diffllama": "self_attn (DiffLlamaAttention, layer 0) of a small copy gives other states",
    "falcon": "its FalconAttention (h.0.self_attention) fails on packed rows",
    **({} if CACHE == "cache" else {"gptj": "its GPTJAttention (h.0.attn) fails on packed rows"}),  # before 5.24
    "minimax": "self_attn (MiniMaxLightningAttention, layer 0) fails with our cache",
    "mpt": "its MptAttention (blocks.0.attn) fails on packed rows",
    "nemotron_h": "mixer (NemotronHMamba2Mixer, layer 0) of a small copy gives other states",
    "recurrent_gemma": "temporal_block (RecurrentGemmaRecurrentBlock, layer 0) fails with our cache",
    "zamba2": "mamba (Zamba2MambaMixer, layer 0) of a small copy gives other states",
}
SAMPLING = Sampling(max_new_tokens=10, temperature=0.8, seed=3, stop_token_ids=())


def in_float64(model_type: str, **overrides: object):
    """A model whose experts take float64."""
    model = model_of(model_type, dtype=torch.float64, **overrides)
    model.set_experts_implementation("eager")
    return model


def differences(model, prompts, completions):
    """Of log-probs of completions, from those of the scoring forward."""
    pairs = zip(prompts, completions, strict=True)
    return torch.stack([(row.logps - scored_logps(model, prompt, row.ids, 0.8)).abs().max() for prompt, row in pairs])


@pytest.mark.parametrize("model_type", OURS)
def test_our_cache_gives_the_log_probs_of_scoring(model_type):
    """Of two completions of each prompt, and of later prompts whose beginning is kept, beyond windows of 6 tokens."""
    model = in_float64(model_type)
    engine, prompts = TransformersEngine(model, route="forward"), prompts_of(lengths=(11, 3, 7), copies=2)
    completions = engine.generate(prompts, SAMPLING)
    assert engine.exact
    with engine.live() as live:
        later = [[*prompt, *row.ids, 5, 6] for prompt, row in zip(prompts[::2], completions[::2], strict=True)]
        for rows in (prompts[::2], later):
            numbers = [live.submit(Request(prompt, SAMPLING)) for prompt in rows]
            answers = {}
            while live.busy:
                answers |= live.step()
        completions += [answers[number] for number in numbers]
    assert differences(model, prompts + later, completions).max() < OURS[model_type]


@pytest.mark.parametrize("model_type", STATES)
def test_rows_keep_their_states_as_others_come_and_go(model_type):
    """Three rows at once of nine, of three prompts, with completions of other lengths: as each is alone."""
    model, prompts, limits = (
        in_float64(model_type),
        prompts_of(lengths=(11, 3, 7), copies=3),
        [1, 9, 4, 2, 7, 7, 3, 1, 8],
    )
    few = TransformersEngine(model, route="forward", max_batch=3)
    rows, streams = few.generate(prompts, SAMPLING, limits=limits), range(len(prompts))
    for row, prompt, limit, stream in zip(rows, prompts, limits, streams, strict=True):
        alone = few.generate([prompt], SAMPLING, limits=[limit], streams=[stream])[0]
        assert row.ids == alone.ids and len(row.ids) == limit
        torch.testing.assert_close(row.logps, alone.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", GENERATE)
def test_other_decoders_generate_themselves_with_one_warning(model_type, caplog):
    """Rows are those that they are alone; the engine does not vouch for log-probs."""
    model, prompts = in_float64(model_type), prompts_of(lengths=(11, 3, 7, 7), copies=1)
    engine = TransformersEngine(model)
    with caplog.at_level(logging.WARNING, "trl"):
        together = engine.generate(prompts, SAMPLING)
        alone = [engine.generate([prompt], SAMPLING, streams=[row])[0] for row, prompt in enumerate(prompts[:3])]
    assert not engine.exact
    message = f"{type(model).__name__} generates with its own `generate`, because {GENERATE[model_type]}"
    assert [record.getMessage().startswith(message) for record in caplog.records if record.name.startswith("trl")] == [
        True
    ]
    for row, expected in zip(together, alone, strict=False):
        assert row.ids == expected.ids
        torch.testing.assert_close(row.logps, expected.logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "qwen3_next"])
def test_rows_that_would_see_padding_have_prompts_of_equal_length(model_type, monkeypatch):
    model, shapes = in_float64(model_type), []
    generate = type(model).generate

    def counted(self, ids=None, **inputs):
        ids = inputs.pop("input_ids") if ids is None else ids
        shapes.append([*ids.shape])
        return generate(self, ids, **inputs)

    monkeypatch.setattr(type(model), "generate", counted)
    TransformersEngine(model, route="generate").generate(prompts_of(lengths=(7, 3), copies=2), SAMPLING)
    leaks = model_type == "recurrent_gemma"
    assert padding_leaks(model) is leaks
    assert [shape for shape in shapes if shape[0] > 1] == ([[2, 7], [2, 3]] if leaks else [[4, 7]])


class LeakingMLP(nn.Module):
    """Adds the mean of the tokens so far, which other rows of a packed row change."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        counts = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return self.inner(hidden) + 0.1 * hidden.cumsum(1) / counts


class LeakingDecoder(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers[1].mlp = LeakingMLP(self.layers[1].mlp)


class LeakingLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = LeakingDecoder(config)


class RaisingLlama(LlamaForCausalLM):
    def forward(self, **inputs):
        raise OverflowError("in every forward")


def test_a_layer_that_mixes_rows_is_named():
    model = LeakingLlama(config_of("llama"))
    assert decode_unsupported(model).startswith("mlp (LeakingMLP, layer 1) fails with our cache")
    model = LlamaForCausalLM(config_of("llama"))
    assert decode_unsupported(model) is None
    model.model.layers[1].mlp = LeakingMLP(model.model.layers[1].mlp)
    assert "has no LeakingMLP" in decode_unsupported(model)
    assert "OverflowError: in every forward" in decode_unsupported(RaisingLlama(config_of("llama")))


def test_a_copy_runs_once_for_each_class_and_leaves_no_trace(monkeypatch):
    counts, made = [], decode_check.small_model
    monkeypatch.setattr(decode_check, "_ANSWERS", {})
    monkeypatch.setattr(decode_check, "small_model", lambda *args, **kw: (counts.append(args[0]), made(*args, **kw))[1])
    before = torch.random.get_rng_state()
    for architecture, width in (("llama", 32), ("llama", 64), ("qwen3", 32)):
        assert decode_unsupported(tiny_model(architecture, hidden_size=width)) is None
    assert [kind.__name__ for kind in counts] == ["LlamaForCausalLM", "Qwen3ForCausalLM"]
    assert torch.equal(torch.random.get_rng_state(), before) and torch.is_grad_enabled()


def test_copies_are_run_once_and_before_the_first_completion(monkeypatch):
    model, runs = tiny_model("llama"), []
    for module, cache, function in ((support, "_PACKINGS", "_tested"), (decode_check, "_ANSWERS", "_cache_differs")):
        monkeypatch.setattr(module, cache, {})
        run = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args, run=run: runs.append(run.__name__) or run(*args))
    engine = TransformersEngine(model)
    assert runs == ["_tested", "_cache_differs"]
    model.config.use_cache = False  # as trainers set it
    engine.generate(prompts_of(), SAMPLING)
    TransformersEngine(model)
    assert runs == ["_tested", "_cache_differs"]
