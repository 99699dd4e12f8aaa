"""The scoring forward gives what a model's own logits give, in either layout, for every architecture."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

from tests.tiny import ARCHITECTURES, SOFT_CAPPED, tiny_model
from trl.collators.preference import pack_prefix_groups
from trl.generation.transformers.engine import TransformersEngine
from trl.models.packed.layout import packed_batch
from trl.models.parts import causal_core
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions
from trl.tensors.padding import flush_right

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
ALL_FLOAT64 = ("gpt2", "gpt_neox", "opt")


def padded(lengths=(6, 3, 8), vocab=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.stack([(torch.arange(width) < length).long() for length in lengths])
    ids = torch.randint(3, vocab, (len(lengths), width), generator=generator) * mask
    labels = torch.where(mask.bool(), ids, -100)
    labels[:, :2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def own_logps(model, batch):
    """Log-probs of the trained tokens from the model's own logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    logps = logits.log_softmax(-1)[:, :-1]
    keep = batch["labels"][:, 1:] != -100
    return logps[keep].gather(1, batch["labels"][:, 1:][keep][:, None])[:, 0]


def nll(denominator=1.0):
    return ScoreOptions(loss_of=lambda logps, _: -logps / denominator)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_and_gradients_are_those_of_the_models_own_logits(architecture, packed):
    exact = architecture not in MIXTURES
    dtype, tolerance = (torch.float64, 1e-10) if exact else (torch.float32, 2e-5)
    tolerance = max(tolerance, 1e-6 * (architecture in SOFT_CAPPED))
    gradient_tolerance = 1e-10 if architecture in ALL_FLOAT64 else 1e-4
    model = tiny_model(architecture, dtype=dtype).eval()
    plain = copy.deepcopy(model)
    scorer = Scorer(model, packed=None if packed else False)
    assert scorer.uses_head
    assert scorer.packed == (packed and architecture not in ("bloom", "falcon"))
    batch = padded()

    expected = own_logps(plain, batch)
    torch.testing.assert_close(scorer.score(model, batch).logps, expected, rtol=tolerance, atol=tolerance)

    scored = scorer.score(model, batch, nll(7.0))
    torch.testing.assert_close(scored.total, -expected.sum() / 7, rtol=tolerance, atol=tolerance)
    scored.total.backward()
    (-expected.sum() / 7).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None or one.grad is None:
            assert not any(p.grad is not None and p.grad.any() for p in (one, other)), name
            continue
        size = other.grad.abs().max().clamp(min=1e-2)
        assert (one.grad - other.grad).abs().max() <= gradient_tolerance * size, name


def test_temperature_divides_the_logits():
    model = tiny_model("gemma2").eval()
    scorer = Scorer(model)
    batch = padded()
    logits = model(input_ids=batch["input_ids"][:1], use_cache=False).logits[0, 1:5] / 0.5
    expected = logits.log_softmax(-1).gather(1, batch["input_ids"][0, 2:6, None])[:, 0]
    found = scorer.score(model, batch, ScoreOptions(temperature=0.5)).logps[:4]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [None, False])
def test_entropies_and_hits(packed):
    model = tiny_model("llama", dtype=torch.float64).eval()
    scorer = Scorer(model, packed=packed)
    batch = padded()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    keep = batch["labels"][:, 1:] != -100
    scored = scorer.score(model, batch, ScoreOptions(entropy="all", correct=True))
    torch.testing.assert_close(scored.entropies, entropy[:, :-1][keep], rtol=1e-9, atol=1e-9)
    everywhere = entropy[batch["attention_mask"].bool()]
    torch.testing.assert_close(scored.entropy.total, everywhere.sum(), rtol=1e-9, atol=1e-9)
    assert scored.entropy.count == everywhere.numel()
    expected = (logits.argmax(-1)[:, :-1] == batch["labels"][:, 1:])[keep]
    assert scored.correct.tolist() == expected.tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "bloom"])
@pytest.mark.parametrize("through", ["head", "adapted head", "own logits", "local loss"])
def test_collisions_and_mean_logits_are_those_of_the_models_own_logits(architecture, through):
    model = tiny_model(architecture)
    if through == "adapted head":
        model = lora(model, target_modules=["lm_head"]).eval()
    batch = padded()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double()
    logits = logits[:, :-1][batch["labels"][:, 1:] != -100]
    scorer = Scorer(model)
    scorer.uses_head = through != "own logits"
    scorer.packed = scorer.packed and scorer.uses_head
    loss_of = nll().loss_of if through == "local loss" else None
    options = ScoreOptions(loss_of=loss_of, collision=True, mean_logits=True)
    scored = scorer.score(model, batch, options)
    collisions = (2 * logits.log_softmax(-1)).logsumexp(-1)
    for found, expected in ((scored.log_collision, collisions), (scored.mean_logits, logits.mean(-1))):
        assert not found.requires_grad
        torch.testing.assert_close(found.double(), expected.detach(), rtol=2e-5, atol=2e-5)
    plain = scorer.score(model, batch, ScoreOptions(loss_of=loss_of))
    assert plain.log_collision is None
    assert plain.mean_logits is None
    assert torch.equal(plain.logps, scored.logps)


def test_router_loss_is_the_models_own():
    for architecture in MIXTURES:
        model = tiny_model(architecture, output_router_logits=True).eval()
        batch = padded(lengths=(6, 6))
        own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
        for packed in (None, False):
            scored = Scorer(model, packed=packed).score(model, batch, nll())
            torch.testing.assert_close(scored.aux_loss, own.aux_loss, rtol=1e-5, atol=1e-6)
        quiet = tiny_model(architecture)
        assert Scorer(quiet).score(quiet, batch).aux_loss is None


def test_router_loss_leaves_padding_out_in_both_layouts():
    model = tiny_model("mixtral", output_router_logits=True).eval()
    batch = padded(lengths=(7, 3))
    losses = [Scorer(model, packed=packed).score(model, batch, nll()).aux_loss for packed in (None, False)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


# ---- PEFT


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **options}))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 4]}},
    ],
    ids=["attention", "head", "dora", "saved-head", "trained-tokens"],
)
def test_adapters_are_scored_and_trained(options):
    model = lora(tiny_model("llama", dtype=torch.float64), **options).eval()
    if "modules_to_save" in options:
        with torch.no_grad():
            causal_core(model).lm_head.modules_to_save["default"].weight.mul_(1.5)
    batch = padded()
    expected = own_logps(model, batch)
    (-expected.sum()).backward()
    trained = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    scorer = Scorer(model)
    assert scorer.uses_head
    assert scorer.packed
    scored = scorer.score(model, batch, nll())
    torch.testing.assert_close(scored.logps, expected.detach(), rtol=1e-10, atol=1e-10)
    scored.total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == trained.keys()
    for name in trained:
        torch.testing.assert_close(found[name], trained[name], rtol=1e-4, atol=1e-6, msg=name)
    with model.disable_adapter():
        base = scorer.score(model, batch).logps
        torch.testing.assert_close(base, own_logps(model, batch), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(base, expected)


def test_prompt_tuning_is_scored_from_its_own_logits():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    scorer = Scorer(model)
    assert not scorer.uses_head
    assert "virtual tokens" in scorer.fallbacks[0]
    batch = padded()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 3:]
    keep = batch["labels"][:, 1:] != -100
    expected = logits.log_softmax(-1)[:, :-1][keep].gather(1, batch["labels"][:, 1:][keep][:, None])[:, 0]
    scored = scorer.score(model, batch, nll())
    torch.testing.assert_close(scored.logps, expected, rtol=1e-5, atol=1e-6)
    scored.total.backward()
    assert model.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0


# ---- models that are not what they seem


def test_a_model_that_changes_its_logits_is_found_out():
    model = tiny_model("llama").eval()
    inner = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            return CausalLMOutput(logits=inner(self, *args, **kwargs).logits * 0.5)

    model.__class__ = Odd
    scorer = Scorer(model)
    assert not scorer.uses_head
    assert not scorer.packed
    assert "not what its output head" in scorer.fallbacks[0]
    batch = padded()
    expected = own_logps(model, batch)
    torch.testing.assert_close(scorer.score(model, batch).logps, expected, rtol=1e-5, atol=1e-6)


def test_encoder_decoders_are_refused():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    config = BartConfig(vocab_size=60, decoder_attention_heads=4, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes)
    with pytest.raises(TypeError, match="encoder-decoder"):
        Scorer(BartForConditionalGeneration(config))


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "llama", "bloom"])
def test_rows_padded_on_the_left_are_those_padded_on_the_right(architecture):
    model = tiny_model(architecture).eval()
    right = padded()
    left = {name: flush_right(right["attention_mask"], value)[1] for name, value in right.items()}
    assert left["attention_mask"][0, 0] == 0
    for packed in (None, False):
        scorer = Scorer(model, packed=packed)
        found, expected = (scorer.score(model, batch).logps for batch in (left, right))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_compiled_model_is_scored_uncompiled_and_says_so(caplog):
    model = tiny_model("llama").eval()
    scorer, batch = Scorer(model), padded()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(scorer.score(compiled, batch).logps, own_logps(model, batch))
    assert caplog.text.count("torch_compile has no effect") == 1


# ---- noise on embeddings


def test_neftune_noise_has_the_size_of_the_paper_for_each_sequence():
    model = tiny_model("llama").train()
    scorer = Scorer(model)
    scorer.neftune_alpha = 5.0
    seen = {}
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(hidden=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    batch = padded(lengths=(16, 4))
    scorer.score(model, batch)
    handle.remove()
    clean = model.get_input_embeddings()(packed_batch(batch, with_table=True).inputs["input_ids"])
    noise = (seen["hidden"] - clean)[0]
    width = clean.shape[-1]
    for rows, length in ((slice(0, 16), 16), (slice(16, 20), 4)):
        bound = 5.0 / (length * width) ** 0.5
        assert 0.9 * bound < noise[rows].abs().max() <= bound
        assert abs(noise[rows].std() / (bound / 3**0.5) - 1) < 0.15
    model.eval()
    one, other = scorer.score(model, batch).logps, scorer.score(model, batch).logps
    assert torch.equal(one, other)


def test_an_empty_micro_batch_gives_zero_gradients_for_every_parameter():
    model = tiny_model("llama").train()
    batch = padded()
    batch["labels"][:] = -100
    scored = Scorer(model).score(model, batch, nll())
    assert scored.total == 0
    scored.total.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom"])
def test_prefix_groups_score_as_their_branches_would_alone(architecture):
    model = tiny_model(architecture, dtype=torch.float64)
    groups = [([5, 9, 3], [[7, 8], [9]]), ([4], [[3], [2, 1, 7]])]
    batch = pack_prefix_groups(groups)
    expected, sequences = [], []
    for prompt, branches in groups:
        for branch in branches:
            ids = torch.tensor([prompt + branch])
            logps = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            sequences += [len(set(sequences))] * len(branch)
            expected.append(logps.gather(1, torch.tensor(branch)[:, None])[:, 0])
    for packed in (None, False):
        scored = Scorer(model, packed=packed).score(model, batch)
        torch.testing.assert_close(scored.logps, torch.cat(expected), rtol=1e-10, atol=1e-10)
        assert scored.positions.sequence.tolist() == sequences


def test_prefix_groups_of_another_models_layout_become_sequences():
    """A reference under flash attention beside a policy without: its kernel would let the second branch see the first."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    found = Scorer(model).lay_out(pack_prefix_groups([([5, 6], [[7], [8, 9]])]))
    assert found.inputs["input_ids"].tolist() == [[5, 6, 7, 5, 6, 8, 9]]
    assert found.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert found.scored.target.tolist() == [7, 8, 9]
    assert found.scored.sequence.tolist() == [0, 1, 1]


def test_a_bidirectional_model_is_scored_by_its_own_forward():
    model = tiny_model("llama", dtype=torch.float64, is_causal=False)
    batch = padded()
    torch.testing.assert_close(Scorer(model).score(model, batch).logps, own_logps(model, batch), rtol=0, atol=1e-12)
    causal = tiny_model("llama", dtype=torch.float64)
    assert (own_logps(model, batch) - own_logps(causal, batch)).abs().max() > 0.1


def test_a_bidirectional_model_does_not_generate():
    with pytest.raises(ValueError, match="Generate with a causal model"):
        TransformersEngine(tiny_model("llama", is_causal=False))
