"""The router's loss counts real tokens alone, in every layout, and is transformers' own: to 1e-6 in float32."""

import pytest
import torch
from transformers import AutoConfig

from tests.architectures import MODEL_TYPES, model_of
from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions, router_inputs

LENGTHS = (9, 4, 6)
WITHOUT = (
    "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "hunyuan_v1_moe", "kimi_linear", "lfm2_moe", "llama4_text", "longcat_flash", "mimo_v2_flash",
    "nemotron_h", "solar_open",
)  # fmt: skip
WITH = tuple(
    name
    for name in MODEL_TYPES
    if hasattr(AutoConfig.for_model(name), "output_router_logits") and name not in (*WITHOUT, "doge")
)


def rows():
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 90, (n,), generator=generator).tolist()} for n in LENGTHS]


def by_hand(model, sequences):
    """arXiv:2101.03961, eq. 4-6, each sequence by itself: tokens of all layers, in float64."""
    shares = []
    for ids in sequences:
        logits = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
        shares += [part.flatten(0, -2).double().softmax(-1) for part in logits]
    every = torch.cat(shares)
    choices = model.num_experts_per_tok
    chosen = torch.zeros_like(every).scatter(1, every.topk(choices, dim=-1).indices, 1.0)
    return every.shape[1] * (chosen.mean(0) * every.mean(0)).sum()


def batches(model):
    """Padded rows, a packed row, and one with filler at its end."""
    for settings in ({}, {"padding_free": True}, {"padding_free": True, "pad_to_multiple_of": 16}):
        collate = DataCollatorForLanguageModeling(pad_token_id=0, **settings)
        yield collate(rows())


@pytest.mark.parametrize("model_type", WITH)
def test_packed_and_padded_rows_have_the_loss_counted_by_hand(model_type):
    model = model_of(model_type, output_router_logits=True)
    expected = by_hand(model, [row["input_ids"] for row in rows()]).float()
    for packed in (None, False):
        scorer = Scorer(model, packed=packed)
        assert scorer.is_balanced
        for batch in batches(model):
            aux_loss = scorer.score(model, batch).aux_loss
            torch.testing.assert_close(aux_loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model_type", WITH)
def test_the_loss_is_transformers_own(model_type):
    model = model_of(model_type, output_router_logits=True)
    batch = next(batches(model))
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True)
    scorer = Scorer(model)
    torch.testing.assert_close(scorer.score(model, batch).aux_loss, own.aux_loss, rtol=1e-6, atol=1e-6)
    assert scorer.router_weight == pytest.approx(
        (model(**batch, output_router_logits=True).loss - model(**batch, output_router_logits=False).loss).item()
        / own.aux_loss.item(),
        rel=1e-2,
    )


@pytest.mark.parametrize("model_type", WITHOUT)
def test_architectures_for_which_transformers_has_no_loss_say_so(model_type):
    model = model_of(model_type, output_router_logits=True)
    scorer = Scorer(model)
    assert not router_inputs(model)
    assert scorer.score(model, next(batches(model))).aux_loss is None
    assert any("output_router_logits has no effect" in reason for reason in scorer.fallbacks)
    assert not any("router" in reason for reason in Scorer(model_of(model_type)).fallbacks)


def test_routers_with_product_keys_are_refused():
    model = model_of("doge", is_moe=True, output_router_logits=True)
    with pytest.raises(ValueError, match="Set output_router_logits=False"):
        Scorer(model).score(model, next(batches(model)), ScoreOptions())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_shared_prompt_counts_once_per_branch(model_type):
    model = model_of(model_type, output_router_logits=True)
    scorer = Scorer(model)
    prompt, branches = list(range(3, 8)), [[20, 21], [30], [40, 41, 42]]
    table = torch.tensor([[0, 5, 0, 0], [5, 2, 0, 5], [7, 1, 0, 5], [8, 3, 0, 5]])[None, None]
    ids = torch.tensor([[*prompt, *(token for branch in branches for token in branch)]])
    packed = {"input_ids": ids, "labels": ids, "segment_table": table}
    expected = by_hand(model, [prompt + branch for branch in branches]).float()
    torch.testing.assert_close(scorer.score(model, packed).aux_loss, expected, rtol=1e-6, atol=1e-6)


def test_the_loss_of_a_step_is_the_mean_of_its_batches_by_tokens():
    model = model_of("mixtral", output_router_logits=True)
    scorer, whole = Scorer(model), next(batches(model))
    expected = scorer.score(model, whole).aux_loss
    expected_gradients = torch.autograd.grad(expected, [x for n, x in model.named_parameters() if "gate.weight" in n])
    parts = [{name: value[row : row + 1] for name, value in whole.items()} for row in range(len(LENGTHS))]
    counts = [scorer.routing(model, part) for part in parts]
    scorer.routing_of_step = type(counts[0])(*(torch.stack(column).sum(0) for column in zip(*counts, strict=True)))
    total = sum(
        scorer.score(model, part).aux_loss * count.tokens / scorer.routing_of_step.tokens
        for part, count in zip(parts, counts, strict=True)
    )
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(total, [x for n, x in model.named_parameters() if "gate.weight" in n])
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6)
