"""Which models take packed rows is found by a test of a small copy; what it says holds for every type of decoder."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from tests.architectures import MODEL_TYPES, config_of, model_of
from tests.tiny import tiny_config, tiny_model
from trl.collators.preference import pack_prefix_groups
from trl.models.packed import mixers, support
from trl.models.packed.support import packing_of
from trl.models.parts import CACHE
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions

# Their attention is not transformers' interface, and reads a mask of its own.
OWN_ATTENTION = "fails on packed rows"
PADDED = {
    "bloom": OWN_ATTENTION,  # ALiBi is computed from a padding mask
    "codegen": OWN_ATTENTION,
    "deepseek_v32": OWN_ATTENTION,  # an indexer chooses keys by the mask of the whole row
    "doge": OWN_ATTENTION,  # as above, by their values
    "falcon": OWN_ATTENTION,
    "glm_moe_dsa": OWN_ATTENTION,  # as DeepSeek 3.2
    "gptj": OWN_ATTENTION,
    "mpt": OWN_ATTENTION,
    "phimoe": "PhimoeAttention (layers.0.self_attn) mixes",  # its window is in the mask alone
}
PACKED_NOW = {"codegen", "gptj"} if CACHE == "cache" else set()  # transformers 5.24 has them on its interface
MIXERS = {
    "bamba", "falcon_h1", "falcon_mamba", "gpt_neo", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
    "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "zamba2",
}  # fmt: skip
# A prompt with two completions, one whose completion is longer than every window, and a single token.
GROUPS = [([5, 9, 3, 14, 6, 21, 8], [[7, 8, 30], [9]]), ([4], [[3, 40, 11, 7, 28, 17, 33, 9, 12, 60], [2, 1, 7]])]


def loss_and_gradients(model, packed):
    scorer = Scorer(model, packed=packed)
    nll = ScoreOptions(loss_of=lambda logps, _: -logps * torch.sin(torch.arange(len(logps)) + 1.0))
    scored = scorer.score(model, pack_prefix_groups(GROUPS), nll)
    scored.total.backward()
    return scorer, scored.logps.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.fixture
def short_rows_apart(monkeypatch):
    """Mixers are called for groups of rows of like length, also where this saves few tokens."""
    monkeypatch.setattr(mixers, "LEAST_SAVED", 1)


@pytest.fixture
def all_in_float64(monkeypatch):
    """Norms, rotary angles and routers compute in float32 whatever the dtype: here that is float64."""
    # A default argument, which is that of the moment when the module was imported.
    monkeypatch.setattr(RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("short_rows_apart")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_rows_give_what_padded_rows_give(model_type, all_in_float64):
    model = model_of(model_type, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager")
    plain = copy.deepcopy(model)
    scorer, logps, gradients = loss_and_gradients(model, None)
    packing = packing_of(model)
    if model_type in PADDED.keys() - PACKED_NOW:
        assert not scorer.packed and not scorer.shares_prefixes
        assert PADDED[model_type] in packing.unsupported and packing.unsupported in scorer.fallbacks[-1]
        return
    assert scorer.packed and scorer.shares_prefixes, packing
    assert bool(packing.mixers) == (model_type in MIXERS)
    _, expected, expected_gradients = loss_and_gradients(plain, False)
    torch.testing.assert_close(logps, expected, rtol=1e-10, atol=1e-10)
    assert gradients.keys() == expected_gradients.keys()
    largest = max(float(part.abs().max()) for part in expected_gradients.values())
    for name, part in expected_gradients.items():
        assert (gradients[name] - part).abs().max() <= 1e-10 * largest, name


def test_a_temperature_by_position_is_that_of_the_rows_own_positions(all_in_float64):
    """Llama 4 takes the place in the row for it, here with a step every four tokens."""
    model = model_of("llama4_text", dtype=torch.float64, experts_implementation="eager", floor_scale=4)
    _, expected, _ = loss_and_gradients(copy.deepcopy(model), False)
    torch.testing.assert_close(loss_and_gradients(model, None)[1], expected, rtol=1e-10, atol=1e-10)


# ---- planted leaks


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=2)

    def forward(self, x):
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class CumulativeSum(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).cumsum(dim=1) / 4


class Mean(CumulativeSum):
    def forward(self, x):
        return self.linear(x).mean(dim=1, keepdim=True).expand(x.shape)


def with_planted(kind):
    """A Llama whose feed-forward layers are of this class."""

    class Decoder(LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.layers:
                layer.mlp = kind(config.hidden_size)

    class Model(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Decoder(config)

    torch.manual_seed(0)
    return Model(tiny_config("llama")).double().eval()


def test_rows_of_like_length_are_one_call(monkeypatch):
    bounds = mixers._bounds
    assert bounds([30, 11, 10, 4]) == [0, 4]
    monkeypatch.setattr(mixers, "LEAST_SAVED", 57)
    # The longest apart saves 3 x (30 - 11) = 57 tokens of padding; then the shortest apart 1 x (11 - 4) = 7.
    assert bounds([30, 11, 10, 4]) == [0, 1, 4]
    monkeypatch.setattr(mixers, "LEAST_SAVED", 2)
    assert bounds([30, 11, 10, 4]) == [0, 1, 3, 4]  # at least a sixteenth of 3 x 11
    assert bounds([90, 33, 32, 31]) == [0, 1, 4]  # 2 x (33 - 32) is less than a sixteenth of 3 x 33
    assert bounds([7, 7, 7]) == [0, 3] and bounds([5]) == [0, 1]


@pytest.mark.parametrize("kind", [Convolution, CumulativeSum])
def test_a_planted_layer_that_mixes_tokens_is_run_on_each_sequence(kind):
    model = with_planted(kind)
    _, expected, _ = loss_and_gradients(copy.deepcopy(model), False)
    scorer, logps, _ = loss_and_gradients(model, None)
    assert scorer.packed and packing_of(model).mixers == {kind}
    torch.testing.assert_close(logps, expected, rtol=1e-10, atol=1e-10)
    for module in model.modules():
        module._forward_pre_hooks.clear()
    assert (loss_and_gradients(model, None)[1] - expected).abs().max() > 1e-3


def test_a_planted_layer_that_sees_later_tokens_is_named():
    scorer = Scorer(with_planted(Mean))
    assert not scorer.packed
    assert scorer.fallbacks == [
        "its batches are padded, because its Mean (layers.0.mlp) mixes the sequences of a packed row"
    ]


def test_a_layer_that_was_put_in_later_is_not_trusted():
    model = tiny_model("llama")
    model.model.layers[1].mlp = CumulativeSum(32)
    assert "has no CumulativeSum, which may mix" in Scorer(model).fallbacks[0]


# ---- gradient checkpointing


def summed_gradients(model, checkpointing):
    """Gradients of two packed rows, whose forwards are both run before backward."""
    model = copy.deepcopy(model).train()
    scorer = Scorer(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    total = sum(scorer.score(model, pack_prefix_groups(groups)).logps.sum() for groups in (GROUPS, GROUPS[1:]))
    total.backward()
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def copied_activations():
    """Activations that come back as other tensors, as offloading gives them."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied)


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "lfm2", "nemotron_h", "recurrent_gemma", "gpt_oss"])
def test_checkpointed_layers_are_cut_into_the_same_rows_again(model_type, all_in_float64):
    model = model_of(model_type, dtype=torch.float64, experts_implementation="eager")
    plain = summed_gradients(model, False)
    with copied_activations():
        checkpointed = summed_gradients(model, True)
    torch.testing.assert_close(checkpointed, plain, rtol=1e-10, atol=1e-10 * float(plain.abs().max()))


# ---- the test of a small copy


def test_a_config_is_tested_once_and_leaves_the_process_as_it_was(monkeypatch):
    calls, tested = [], support._tested
    monkeypatch.setattr(support, "_tested", lambda kind, *configs: calls.append(kind) or tested(kind, *configs))
    monkeypatch.setattr(support, "_PACKINGS", {})
    models = [model_of("lfm2"), model_of("lfm2", seed=1), model_of("lfm2", vocab_size=60)]
    before = torch.random.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            packings = [packing_of(model) for model in models]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(calls) == 1 and all(packing is packings[0] for packing in packings)
    assert packings[0].unsupported is None and packings[0].shares
    packing_of(model_of("lfm2", conv_L_cache=4))
    assert len(calls) == 2


def test_a_model_that_cannot_be_copied_small_takes_padded_rows():
    config = config_of("llama", hidden_act="gelu")
    model = LlamaForCausalLM(config)
    config.hidden_act = "no such function"
    assert packing_of(model).unsupported.startswith("a small copy of it could not be run (KeyError")
