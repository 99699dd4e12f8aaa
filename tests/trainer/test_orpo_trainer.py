"""ORPOTrainer: its loss is the paper's formula, prompts included, however rows are cut and laid out."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.tiny import tiny_seq2seq
from tests.trainer.cpo_runs import assert_step, plain
from tests.trainer.cpo_runs import make_orpo as make
from tests.trainer.dpo_runs import pairs
from tests.trainer.one_step import assert_same_gradient, plain_gradient, step
from tests.trainer.test_cpo_trainer import IN_TWOS, LOGGED, padded
from trl.collators.preference import DPODataCollatorWithPadding, PairCollator, with_prompts_scored

WITH_ODDS = LOGGED | {"log_odds_ratio", "log_odds_chosen"}


def log_odds(logps):
    return logps - torch.log1p(-torch.exp(logps))


def formula(found, *, beta=0.1):
    """ORPO's loss over all pairs from plain log-probs, as the paper writes it, and its metrics."""
    chosen, rejected = found.totals(per_token=True)
    ratio = log_odds(chosen) - log_odds(rejected)
    nll = -torch.cat([*found.prompt, *found.chosen]).mean()
    metrics = {
        "rewards/chosen": beta * chosen.mean(),
        "rewards/rejected": beta * rejected.mean(),
        "rewards/margins": beta * (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).double().mean() if beta else torch.zeros(()),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "logits/chosen": found.chosen_logits.mean(),
        "logits/rejected": found.rejected_logits.mean(),
        "log_odds_ratio": logsigmoid(ratio).mean(),
        "log_odds_chosen": ratio.mean(),
        "nll_loss": nll,
    }
    return nll - beta * logsigmoid(ratio).mean(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
def test_a_step_is_the_formula(beta):
    assert_step(make, formula, {"beta": beta}, WITH_ODDS)


@pytest.mark.parametrize("collator", [padded(40), DPODataCollatorWithPadding()])
def test_own_collators_and_mean_logits_do_not_depend_on_padding(collator):
    settings = {"beta": 0.5, "data_collator": collator, **IN_TWOS}
    assert_step(make, formula, settings, WITH_ODDS, expected=step(make(beta=0.5)))


def test_each_chosen_prompt_is_scored_once_in_every_layout():
    rows = pairs()[:3]
    rows[1] = {**rows[1], "rejected_prompt_input_ids": [9, 9, 9]}  # its completions do not share their prompt
    prompts = [len(row["prompt_input_ids"]) - 1 for row in rows]
    completions = [len(row["chosen_input_ids"]) for row in rows]
    for batch in (PairCollator()(rows), PairCollator(prefix_sharing=False)(rows), padded(20)(rows)):
        found = with_prompts_scored(batch)
        assert found["prompt_tokens"].tolist() == prompts
        assert with_prompts_scored(found) is found
        trainer = make()
        scored = trainer.scoring().logps(found)
        sequence = scored.positions.sequence
        assert torch.bincount(sequence)[::2].tolist() == [p + c for p, c in zip(prompts, completions, strict=True)]
        assert trainer.method.count(found).tolist() == [3, sum(prompts) + sum(completions)]
        expected = [(row["prompt_input_ids"] + row["chosen_input_ids"])[1:] for row in rows]
        for index, tokens in enumerate(expected):
            assert scored.positions.target[sequence == 2 * index].tolist() == tokens


def test_older_methods_give_the_same_loss():
    trainer = make(beta=0.5)
    expected, metrics = formula(plain(trainer.model, pairs()), beta=0.5)
    batch = DPODataCollatorWithPadding()(pairs())
    chosen, rejected, _, _, nll = trainer.concatenated_forward(trainer.model, batch)
    losses, chosen_rewards, rejected_rewards, ratio, log_odds_chosen = trainer.odds_ratio_loss(chosen, rejected)
    assert (nll - losses.mean()).item() == pytest.approx(expected.item(), rel=1e-12)
    assert ratio.item() == pytest.approx(metrics["log_odds_ratio"], rel=1e-12)
    assert log_odds_chosen.item() == pytest.approx(metrics["log_odds_chosen"], rel=1e-12)
    assert (chosen_rewards - rejected_rewards).mean().item() == pytest.approx(metrics["rewards/margins"], rel=1e-10)
    loss, found = trainer.get_batch_loss_metrics(trainer.model, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found == pytest.approx(metrics, rel=1e-12, abs=1e-12)


# ---- encoder-decoders


def seq2seq_tokens(model, rows):
    """Log-probs `(T,)` of the tokens of chosen and rejected completions, one call of the model each."""
    found = {"chosen": [], "rejected": []}
    for row in rows:
        for side, logps in found.items():
            labels = torch.tensor([row[f"{side}_input_ids"]])
            logits = model(input_ids=torch.tensor([row["prompt_input_ids"]]), labels=labels).logits[0]
            logps.append(logits.log_softmax(-1).gather(1, labels[0, :, None])[:, 0])
    return found["chosen"], found["rejected"]


@pytest.mark.parametrize(("kind", "tolerance"), [("bart", 1e-10), ("t5", 1e-4)])  # T5's norms round to float32
@pytest.mark.parametrize("split", [{}, IN_TWOS])
def test_an_encoder_decoder_judges_what_its_decoder_says(split, kind, tolerance):
    gradients, log = step(make(model=tiny_seq2seq(kind, dtype=torch.float64), beta=0.5, **split))
    model = tiny_seq2seq(kind, dtype=torch.float64)
    chosen, rejected = seq2seq_tokens(model, pairs())
    ratio = torch.stack([log_odds(c.mean()) - log_odds(r.mean()) for c, r in zip(chosen, rejected, strict=True)])
    nll = -torch.cat(chosen).mean()  # of the decoder's tokens: the prompt is the encoder's
    loss = nll - 0.5 * logsigmoid(ratio).mean()
    assert log["nll_loss"] == pytest.approx(nll.item(), rel=tolerance)
    assert log["log_odds_chosen"] == pytest.approx(ratio.mean().item(), rel=tolerance)
    assert_same_gradient(gradients, plain_gradient(model, loss), tolerance)
