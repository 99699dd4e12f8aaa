"""The scoring forward of encoder-decoders gives what their own logits give, and runs each prompt once."""

import copy

import pytest
import torch

from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from trl.collators.preference import seq2seq_batch
from trl.models.scoring.encoder_decoder import Seq2SeqScorer
from trl.models.scoring.head import ScoreOptions

FAMILIES = ("t5", "mt5", "bart", "marian", "pegasus")
ROWS = [
    {"prompt_input_ids": [5, 6, 7, 1], "chosen_input_ids": [7, 0, 9, 1], "rejected_input_ids": [8, 1]},
    {"prompt_input_ids": [9, 1], "chosen_input_ids": [1], "rejected_input_ids": [3, 4, 0, 0, 1]},
]


def model_of(architecture, **overrides):
    """A model in float64; the bias that BART and its kin add to their logits is not zero."""
    model = tiny_seq2seq(architecture, dtype=torch.float64, **overrides)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.linspace(-2, 2, model.config.vocab_size, dtype=torch.float64))
    return model


def own_logits(model, batch):
    prompt = batch["decoder_prompt"]
    inputs = {name: batch[name][prompt] for name in ("input_ids", "attention_mask")}
    return model(**inputs, labels=batch["decoder_labels"], use_cache=False).logits


def own_logps(model, batch):
    logits = own_logits(model, batch)
    labels = batch["decoder_labels"]
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return logps[labels != -100]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mixed(logps):
    return (logps * torch.linspace(-1, 2, len(logps), dtype=logps.dtype)).sum()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(architecture):
    model = model_of(architecture)
    plain = copy.deepcopy(model)
    batch = seq2seq_batch(ROWS)
    scorer = Seq2SeqScorer(model)
    assert scorer.uses_head
    assert not scorer.fallbacks
    expected = own_logps(plain, batch)
    scored = scorer.score(model, batch)
    torch.testing.assert_close(scored.logps, expected, rtol=1e-10, atol=1e-10)
    assert scored.positions.sequence.tolist() == [0] * 4 + [1] * 2 + [2] + [3] * 5
    assert scored.positions.target.tolist() == [7, 0, 9, 1, 8, 1, 1, 3, 4, 0, 0, 1]
    ours, theirs = gradients(model, mixed(scored.logps)), gradients(plain, mixed(expected))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        size = gradient.abs().max().clamp(min=1e-2)
        assert (ours[name] - gradient).abs().max() <= 1e-4 * size, name  # norms in float32
    loss = scorer.score(model, batch, ScoreOptions(loss_of=lambda logps, _: -logps / 5))
    torch.testing.assert_close(loss.total, -expected.detach().sum() / 5, rtol=1e-10, atol=1e-10)


def test_t5_with_and_without_the_scale_of_a_tied_head():
    for scaled in (True, False):
        model = model_of("t5")
        model.config.scale_decoder_outputs = scaled
        scorer, batch = Seq2SeqScorer(model), seq2seq_batch(ROWS)
        assert scorer.uses_head
        assert (scorer.rule.scale == 32**-0.5) == scaled
        torch.testing.assert_close(scorer.score(model, batch).logps, own_logps(model, batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_the_encoder_runs_each_prompt_once_and_the_models_hooks_fire(architecture):
    model = model_of(architecture)
    scorer, seen = Seq2SeqScorer(model), []
    model.register_forward_pre_hook(lambda *_: seen.append("model"))
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append("head"))
    model.get_encoder().register_forward_hook(lambda _, __, outputs: seen.append(len(outputs.last_hidden_state)))
    scorer.score(model, seq2seq_batch(ROWS))
    assert seen == ["model", 2, "head"]
    assert "forward" not in vars(model)


def test_completions_may_come_in_any_order_of_prompts():
    model = model_of("t5")
    batch = seq2seq_batch(ROWS)
    order = torch.tensor([3, 0, 2, 1])
    mixed_up = {**batch, **{name: batch[name][order] for name in ("decoder_labels", "decoder_prompt")}}
    scorer = Seq2SeqScorer(model)
    found, expected = scorer.score(model, mixed_up), scorer.score(model, batch)
    for row, original in enumerate(order.tolist()):
        torch.testing.assert_close(
            found.logps[found.positions.sequence == row],
            expected.logps[expected.positions.sequence == original],
            rtol=1e-10,
            atol=1e-10,
        )


@pytest.mark.parametrize("architecture", ["t5", "bart"])
@pytest.mark.parametrize("head", [False, True])
def test_adapters_are_scored_and_trained(architecture, head):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    targets = (["q", "v"] if architecture == "t5" else ["q_proj"]) + ["lm_head"] * head
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    model = peft.get_peft_model(model_of(architecture), config).eval()
    batch = seq2seq_batch(ROWS)
    scorer = Seq2SeqScorer(model)
    assert scorer.uses_head
    expected = own_logps(model, batch)
    theirs = gradients(model, mixed(expected))
    scored = scorer.score(model, batch)
    torch.testing.assert_close(scored.logps, expected.detach(), rtol=1e-10, atol=1e-10)
    ours = gradients(model, mixed(scored.logps))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    with model.disable_adapter():
        base = scorer.score(model, batch).logps
        torch.testing.assert_close(base, own_logps(model, batch), rtol=1e-10, atol=1e-10)


def test_what_cannot_be_scored_is_refused():
    for other in (tiny_model("llama"), tiny_classifier("bart")):
        with pytest.raises(TypeError, match="must be an encoder-decoder"):
            Seq2SeqScorer(other)
    model, batch = tiny_seq2seq("t5"), seq2seq_batch(ROWS)
    scorer = Seq2SeqScorer(model)
    scorer.neftune_alpha = 5.0
    with pytest.raises(ValueError, match="neftune_noise_alpha"):
        scorer.score(model, batch)
    model.config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        Seq2SeqScorer(model)
