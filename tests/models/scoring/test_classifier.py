"""The classifiers' scoring forward gives their own logits at the right positions, in either layout, groups included."""

import copy

import pytest
import torch

from tests.tiny import SOFT_CAPPED, tiny_classifier, tiny_model
from trl.collators.preference import pack_prefix_groups
from trl.models.parts import causal_core
from trl.models.scoring.classifier import ClassificationScorer
from trl.tensors.padding import flush_right

DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt_neox", "opt")
GROUPS = [([5, 9, 3], [[7, 8], [9]]), ([4, 4], [[3], [2, 1, 7], [6, 0]])]
SEQUENCES = [prompt + branch for prompt, branches in GROUPS for branch in branches]


def decoder(architecture, **options):
    return tiny_classifier(architecture, dtype=torch.float64, **options)


def padded_of(sequences=SEQUENCES, pad=0):
    width = max(len(ids) for ids in sequences)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in sequences])
    return {"input_ids": ids, "attention_mask": mask}


def packed_of(sequences=SEQUENCES):
    ids = torch.tensor([[token for ids in sequences for token in ids]])
    return {
        "input_ids": ids,
        "position_ids": torch.tensor([[t for ids in sequences for t in range(len(ids))]]),
    }


def groups():
    return pack_prefix_groups(GROUPS)


def own_logits(model, sequences=SEQUENCES):
    """The model's logits of each sequence alone: its last token is the row's last, whatever its id."""
    config = causal_core(model).config
    before, config.pad_token_id = config.pad_token_id, None
    logits = torch.cat([model(input_ids=torch.tensor([ids])).logits for ids in sequences])
    config.pad_token_id = before
    return logits


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def weighted_sum(logits):
    return (logits * torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum()


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("make", [padded_of, packed_of, groups])
def test_sequence_logits_and_gradients_are_the_models_own_in_every_layout(architecture, make):
    model = decoder(architecture)
    plain = copy.deepcopy(model)
    expected = own_logits(plain)
    theirs = gradients(plain, weighted_sum(expected))
    scale = 1 if expected.abs().max() < 10 else expected.abs().max().item()
    tolerance = 1e-4 if architecture not in ("gpt2", "gpt_neox", "opt") else 1e-10  # norms and rotations in float32
    for packed in (None, False):
        scorer = ClassificationScorer(model, packed=packed)
        assert scorer.uses_head
        assert scorer.packed == (packed is None)
        assert not scorer.fallbacks
        found = scorer.score(model, make())
        assert found.shape == (5, 3)
        close(found / scale, expected.detach() / scale, 1e-6 if architecture in SOFT_CAPPED else 1e-12)
        ours = gradients(model, weighted_sum(found))
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            size = gradient.abs().max().clamp(min=1e-2)
            assert (ours[name] - gradient).abs().max() <= tolerance * size, name


@pytest.mark.parametrize(("architecture", "norm"), [("llama", "model.norm"), ("opt", "model.decoder.final_layer_norm")])
def test_the_final_norm_computes_the_ends_of_sequences_alone(architecture, norm):
    model, seen = decoder(architecture), []
    model.get_submodule(norm).register_forward_hook(lambda _, given, found: seen.append(found.shape[:2]))
    ClassificationScorer(model).score(model, groups())
    assert seen == [(1, 5)]


@pytest.mark.parametrize("packed", [None, False])
def test_the_end_is_told_by_the_mask_not_by_the_pad_token(packed):
    # 6, 0 ends with the id that pads; config says nothing, or something else, about padding.
    sequences = [[5, 6, 0], [7, 0, 0, 0], [9]]
    model = decoder("qwen2")
    expected = own_logits(model, sequences)
    for pad in (0, None, 7):
        model.config.pad_token_id = pad
        scorer = ClassificationScorer(model, packed=packed, pad_token_id=0)
        right = padded_of(sequences)
        left = dict(zip(right, flush_right(right["attention_mask"], right["input_ids"])[::-1], strict=True))
        for batch in (right, left, packed_of(sequences)):
            close(scorer.score(model, batch), expected)


def test_filler_and_labels_of_a_batch_are_left_aside():
    model = decoder("llama")
    batch = packed_of()
    filled = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, 3)),
        "position_ids": torch.cat([batch["position_ids"], torch.arange(3)[None]], dim=1),
        "filler": torch.tensor([3]),
        "labels": torch.tensor([1, 0, 1, 1, 0]),
    }
    for packed in (None, False):
        close(ClassificationScorer(model, packed=packed).score(model, filled), own_logits(model))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "bloom", "bert"])
def test_token_logits_are_those_of_the_labelled_tokens(architecture):
    model = tiny_classifier(architecture, of_tokens=True, dtype=torch.float64)
    plain = copy.deepcopy(model)
    labels = [[-100, -100, 1, -100, 0], [-100, 2, -100, 1], [0, -100, 1], [-100] * 5, [-100, 1, 1, 2]]
    batch = padded_of()
    width = batch["input_ids"].shape[1]
    batch["labels"] = torch.tensor([row + [1] * (width - len(row)) for row in labels])  # labelled padding
    expected = torch.cat(
        [
            plain(input_ids=torch.tensor([ids])).logits[0][torch.tensor(row) != -100]
            for ids, row in zip(SEQUENCES, labels, strict=True)
        ]
    )
    theirs = gradients(plain, weighted_sum(expected))
    wanted = [label for row in labels for label in row if label != -100]
    batches = [batch]
    if architecture != "bert":
        batches.append({**packed_of(), "labels": torch.tensor([[label for row in labels for label in row]])})
    for packed in (None, False):
        scorer = ClassificationScorer(model, packed=packed)
        assert scorer.uses_head
        assert scorer.packed == (packed is None and architecture not in ("bert", "bloom"))
        for given in batches:
            found, targets = scorer.score_tokens(model, given)
            assert targets.tolist() == wanted
            close(found, expected.detach())
            ours = gradients(model, weighted_sum(found))
            for name, gradient in theirs.items():
                size = gradient.abs().max().clamp(min=1e-2)
                assert (ours[name] - gradient).abs().max() <= 1e-4 * size, name


# ---- PEFT


def lora(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "SEQ_CLS"}
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **options}))


@pytest.mark.parametrize(
    "options",
    [{}, {"task_type": None, "modules_to_save": ["score"]}, {"target_modules": ["q_proj", "score"]}],
    ids=["task", "saved-head", "adapted-head"],
)
def test_adapters_and_saved_heads_are_scored_and_trained(options):
    model = lora(decoder("llama"), **{"target_modules": ["q_proj"], **options}).eval()
    head = causal_core(model).score
    if hasattr(head, "modules_to_save"):
        with torch.no_grad():
            head.modules_to_save["default"].weight.mul_(1.5)
    expected = own_logits(model)
    theirs = gradients(model, weighted_sum(expected))
    assert any("score" in name for name in theirs)
    scorer = ClassificationScorer(model)
    assert scorer.uses_head
    assert scorer.packed
    for batch in (padded_of(), groups()):
        found = scorer.score(model, batch)
        close(found, expected.detach())
        ours = gradients(model, weighted_sum(found))
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    with model.disable_adapter():
        close(scorer.score(model, groups()), own_logits(model).detach())


def test_prompt_tuning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="prompt learning"):
        ClassificationScorer(peft.get_peft_model(tiny_classifier("llama"), config))


# ---- models that are run as they are


def test_an_encoder_is_run_as_it_is():
    model = tiny_classifier("bert", dtype=torch.float64)
    scorer = ClassificationScorer(model)
    assert not scorer.uses_head
    assert not scorer.packed
    assert "its batches are padded" in scorer.fallbacks[1]
    expected = own_logits(model)
    for batch in (padded_of(), packed_of(), groups()):
        close(scorer.score(model, batch), expected)
    with pytest.raises(TypeError, match="AutoModelForTokenClassification"):
        scorer.score_tokens(model, {**padded_of(), "labels": padded_of()["input_ids"]})


def test_a_decoder_that_changes_its_logits_is_found_out_and_still_ends_by_the_mask():
    model = decoder("qwen2")
    inner = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            outputs = inner(self, *args, **kwargs)
            outputs.logits = outputs.logits * 0.5
            return outputs

    model.__class__ = Odd
    for pad_token_id in (2, 0):  # the last completion ends with 0
        scorer = ClassificationScorer(model, pad_token_id=pad_token_id)
        assert "not what its output head" in scorer.fallbacks[0]
        for of_config in (0, 3, None):
            model.config.pad_token_id = of_config
            for batch in (groups(), padded_of(pad=pad_token_id)):
                close(scorer.score(model, batch), own_logits(model))
            assert model.config.pad_token_id == of_config


@pytest.mark.parametrize("model", [lambda: tiny_model("llama"), lambda: tiny_model("llama").model])
def test_models_without_a_head_for_classes_are_refused(model):
    with pytest.raises(TypeError, match="AutoModelForSequenceClassification"):
        ClassificationScorer(model())


def test_rows_without_tokens_and_batches_without_labels_are_refused():
    model = tiny_classifier("llama")
    scorer = ClassificationScorer(model)
    batch = padded_of()
    batch["attention_mask"][2] = 0
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        scorer.score(model, batch)
    with pytest.raises(ValueError, match="labels"):
        scorer.score_tokens(model, padded_of())


BIDIRECTIONAL = {
    **{name: {"is_causal": False} for name in ("llama", "qwen2", "mistral", "gpt2", "gemma2", "opt")},
    "gemma3_text": {"use_bidirectional_attention": True},
}


@pytest.mark.parametrize("architecture", BIDIRECTIONAL)
def test_bidirectional_models_see_later_tokens(architecture):
    """Of rows of different lengths, in either layout, reward models and value models of causal batches."""
    model = decoder(architecture, **BIDIRECTIONAL[architecture])
    scorer = ClassificationScorer(model)
    sequences = [[5, 9, 3, 7, 8], [4, 4, 6], [3]]
    expected = own_logits(model, sequences)
    assert (expected - own_logits(decoder(architecture), sequences)).abs().max() > 0.1
    for batch in (padded_of(sequences), packed_of(sequences)):
        close(scorer.score(model, batch), expected)


def test_values_of_a_bidirectional_model_are_those_of_its_own_states():
    model = decoder("llama", is_causal=False)
    batch = {**packed_of([[5, 9, 3], [4, 4]]), "labels": torch.tensor([[-100, 9, 3, -100, 4]])}
    values, _ = ClassificationScorer(model).score_predictors(model, batch)
    rows = torch.tensor([[5, 9, 3]]), torch.tensor([[4, 4]])
    states = [model.model(input_ids=ids).last_hidden_state[0, :-1] for ids in rows]
    close(values, model.score(torch.cat(states)))


def test_bidirectional_layers_under_causal_masks_are_refused():
    with pytest.raises(ValueError, match=r"its masks are causal. Set model.config.is_causal=False"):
        ClassificationScorer(decoder("gemma2", use_bidirectional_attention=True))
