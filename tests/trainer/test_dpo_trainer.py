"""DPOTrainer's numbers: against losses written out over the model's own logits, every kind of reference."""

import functools

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer import dpo_plain
from tests.trainer.dpo_runs import make, pairs, policy_and_reference
from tests.trainer.one_step import KeepGradients

ROWS = pairs()
BETA = 0.3
LORA = LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False)


@functools.cache
def models():
    return policy_and_reference()


def first_step(**settings):
    """A trainer after one step, its gradients, and the log of that step."""
    trainer = make(**settings)
    trainer.train()
    return trainer, trainer.keep.steps[0], trainer.state.log_history[0]


def assert_gradients(found, loss, model, *, tolerance=1e-10):
    """The gradients are those of a plain loss, to `tolerance` of the largest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    size = max(g.abs().max() for g in plain if g is not None)
    assert size > 1e-6
    for (name, _), gradient in zip(named, plain, strict=True):
        expected = torch.zeros(()) if gradient is None else gradient
        assert (found.get(name, torch.zeros(())) - expected).abs().max() <= tolerance * size, name


# ---- the loss


def test_metrics_by_hand():
    policy, reference = models()
    with torch.no_grad():
        chosen, rejected, ref_chosen, ref_rejected = dpo_plain.pairs(policy, reference, ROWS)
        logits = {
            side: torch.cat(
                [
                    policy(torch.tensor([[*r["prompt_input_ids"], *r[f"{side}_input_ids"]]])).logits[
                        0, len(r["prompt_input_ids"]) - 1 : -1
                    ]
                    for r in ROWS
                ]
            ).mean()
            for side in ("chosen", "rejected")
        }
    good, bad = BETA * (chosen - ref_chosen), BETA * (rejected - ref_rejected)
    expected = {
        "rewards/chosen": good.mean(),
        "rewards/rejected": bad.mean(),
        "rewards/accuracies": (good > bad).double().mean(),
        "rewards/margins": (good - bad).mean(),
        "logps/chosen": chosen.mean(),
        "logps/rejected": rejected.mean(),
        "logits/chosen": logits["chosen"],
        "logits/rejected": logits["rejected"],
    }
    log = first_step(beta=BETA)[2]
    for name, value in expected.items():
        assert log[name] == pytest.approx(float(value), rel=1e-10), name


def nll(policy, rows=ROWS):
    """Mean over all tokens of the chosen completions."""
    return -torch.cat(
        [dpo_plain.token_logps(policy, r["prompt_input_ids"], r["chosen_input_ids"]) for r in rows]
    ).mean()


def test_rpo_and_sft_are_a_mean_over_the_chosen_tokens():
    policy, reference = models()
    sigmoid = dpo_plain.LOSSES["sigmoid"](dpo_plain.pairs(policy, reference, ROWS), BETA).mean()
    _, gradients, log = first_step(rpo_alpha=0.5, beta=BETA)
    assert log["nll_loss"] == pytest.approx(nll(policy).item(), rel=1e-10)
    assert_gradients(gradients, sigmoid + 0.5 * nll(policy), policy)
    _, gradients, _ = first_step(loss_type=["sigmoid", "sft"], loss_weights=[0.7, 0.2], beta=BETA)
    sigmoid = dpo_plain.LOSSES["sigmoid"](dpo_plain.pairs(policy, reference, ROWS), BETA).mean()
    assert_gradients(gradients, 0.7 * sigmoid + 0.2 * nll(policy), policy)


def wpo_weight(policy, row):
    """exp of the mean over tokens of log p - log sum p^2, of chosen and rejected, cut at 1 (WPO, eq. 6 and 7)."""
    means = []
    for side in ("chosen", "rejected"):
        ids = torch.tensor([[*row["prompt_input_ids"], *row[f"{side}_input_ids"]]])
        logps = policy(ids).logits[0, len(row["prompt_input_ids"]) - 1 : -1].log_softmax(-1)
        own = logps.gather(-1, torch.tensor(row[f"{side}_input_ids"])[:, None])[:, 0]
        means.append((own - (2 * logps).logsumexp(-1)).mean())
    return sum(means).exp().clamp(max=1)


@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_wpo_weighs_by_every_token(name):
    """The recorded reference leaves the last token of each completion out of the weight; the paper's mean has them all."""
    policy, reference = models()
    with torch.no_grad():
        weights = torch.stack([wpo_weight(policy, row) for row in ROWS])
    assert weights.unique().numel() == len(ROWS)
    scores = dpo_plain.pairs(policy, reference, ROWS, mean=name == "ipo")
    loss = (weights * dpo_plain.LOSSES[name](scores, BETA)).mean()
    _, gradients, _ = first_step(use_weighting=True, loss_type=name, beta=BETA)
    assert_gradients(gradients, loss, policy)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_ld_alpha_discounts_what_is_longer_than_the_shorter_completion(alpha, name):
    """Positions are counted in the completion (LD-DPO, arXiv:2409.06411, eq. 9); the recorded reference counts the prompt's
    too, and leaves its own log-probs whole, so that a policy equal to the reference has a reward."""
    policy, reference = models()

    def side_sums(model):
        found = {"chosen": [], "rejected": []}
        for row in ROWS:
            public = min(len(row["chosen_input_ids"]), len(row["rejected_input_ids"]))
            for side, values in found.items():
                logps = dpo_plain.token_logps(model, row["prompt_input_ids"], row[f"{side}_input_ids"])
                total = logps[:public].sum() + alpha * logps[public:].sum()
                values.append(total / (len(logps) if name == "ipo" else 1))
        return [torch.stack(values) for values in found.values()]

    with torch.no_grad():
        ref = side_sums(reference)
    loss = dpo_plain.LOSSES[name]((*side_sums(policy), *ref), BETA).mean()
    _, gradients, _ = first_step(ld_alpha=alpha, loss_type=name, beta=BETA)
    assert_gradients(gradients, loss, policy)
    log = first_step(ld_alpha=alpha, copied_reference=True)[2]
    assert log["rewards/chosen"] == 0 and log["rewards/rejected"] == 0


def test_padding_free_ipo_divides_each_completion_by_its_own_length():
    """The recorded reference divides by the number of completion tokens of the whole padding-free row."""
    policy, reference = models()
    loss = dpo_plain.LOSSES["ipo"](dpo_plain.pairs(policy, reference, ROWS, mean=True), BETA).mean()
    _, gradients, log = first_step(loss_type="ipo", beta=BETA, padding_free=True)
    assert_gradients(gradients, loss, policy)
    chosen = dpo_plain.sums(policy, ROWS, mean=True)[0]
    assert log["logps/chosen"] == pytest.approx(chosen.mean().item(), rel=1e-10)


@pytest.mark.parametrize("name", ["sigmoid", "ipo", "nca_pair", "apo_zero"])
def test_at_beta_zero_nothing_is_learnt(name):
    with pytest.raises(ValueError, match=f"beta must be > 0 for loss_type '{name}'"):
        make(beta=0, loss_type=name)
    if name != "ipo":
        _, gradients, log = first_step(beta=0, loss_type=[name, "sft"])
        assert max(g.abs().max() for g in gradients.values()) > 0
        assert log["rewards/margins"] == 0 and log["rewards/accuracies"] == 0


def test_without_reference_the_loss_is_of_the_policy_alone():
    policy, _ = models()
    chosen, rejected = dpo_plain.sums(policy, ROWS)
    nothing = torch.zeros_like(chosen)
    loss = dpo_plain.LOSSES["sigmoid"]((chosen, rejected, nothing, nothing), BETA).mean()
    trainer, gradients, log = first_step(reference_free=True, beta=BETA, model=tiny_model("gpt2", dtype=torch.float64))
    assert trainer.reference is None and trainer.ref_model is None
    assert_gradients(gradients, loss, policy)
    assert log["rewards/chosen"] == pytest.approx(BETA * chosen.mean().item(), rel=1e-10)


# ---- references


def with_adapter():
    model = get_peft_model(tiny_model("gpt2", dtype=torch.float64), LORA)
    return model.to(torch.float64)


def plain_reference(model):
    with torch.no_grad():
        return dpo_plain.sums(model, ROWS)


def assert_reference(trainer, expected):
    batch = trainer.data_collator([trainer.train_dataset[row] for row in range(len(ROWS))])
    for found, value in zip(trainer.compute_ref_log_probs(batch), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-10, atol=0)


def test_without_ref_model_the_reference_is_a_copy_of_the_first_policy():
    trainer = make(copied_reference=True, max_steps=2)
    expected = plain_reference(trainer.model)
    trainer.train()
    assert_reference(trainer, expected)
    assert not any(torch.allclose(a, b) for a, b in zip(expected, plain_reference(trainer.model), strict=True))
    assert trainer.state.log_history[0]["rewards/chosen"] == 0


def test_an_adapters_reference_is_its_base():
    trainer = make(model=with_adapter())
    assert trainer.ref_model is None
    trainer.train()
    assert_reference(trainer, plain_reference(tiny_model("gpt2", dtype=torch.float64)))
    with trainer.null_ref_context():
        inside = plain_reference(trainer.model)
    for found, value in zip(inside, plain_reference(tiny_model("gpt2", dtype=torch.float64)), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
    assert not torch.allclose(plain_reference(trainer.model)[0], inside[0])


def test_precomputed_log_probs_are_the_live_ones_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "train_sampling_strategy": "sequential"}
    live, precomputed = make(**settings), make(**settings, precompute_ref_log_probs=True)
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(precomputed.train_dataset.column_names)
    assert precomputed.ref_model is None
    for trainer in (live, precomputed):
        trainer.train()
    for one, other in zip(live.keep.steps, precomputed.keep.steps, strict=True):
        for name, gradient in one.items():
            assert torch.equal(other[name], gradient), name
    logs = [trainer.state.log_history[0] for trainer in (live, precomputed)]
    for name in ("rewards/chosen", "rewards/rejected", "loss", "grad_norm"):
        assert logs[0][name] == logs[1][name]


def test_evaluation_with_a_reference_that_was_asked_in_advance_compares_with_the_first_policy(tmp_path, monkeypatch):
    """The recorded reference asks the trained policy about the evaluation rows, so that their rewards are all 0."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    data = Dataset.from_list(pairs(seed=9))
    found = []
    for precompute in (True, False):
        trainer = make(copied_reference=True, eval_dataset=data, max_steps=3, precompute_ref_log_probs=precompute)
        trainer.train()
        found.append(trainer.evaluate())
    assert found[0]["eval_rewards/margins"] != 0
    for name in ("eval_loss", "eval_rewards/chosen", "eval_rewards/rejected", "eval_rewards/margins"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-12), name


def test_a_synchronised_reference_is_the_mixture():
    policy, reference = policy_and_reference()
    before = {name: p.clone() for name, p in reference.named_parameters()}
    trainer = make(
        model=policy, ref_model=reference, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.7,
        max_steps=3,
    )  # fmt: skip
    seen = {}

    class Watch(KeepGradients):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen[state.global_step] = {name: p.detach().clone() for name, p in model.named_parameters()}

    trainer.add_callback(Watch())
    trainer.train()
    for name, parameter in trainer.ref_model.named_parameters():
        torch.testing.assert_close(parameter, 0.7 * seen[2][name] + 0.3 * before[name], rtol=0, atol=1e-12)


# ---- evaluation


def test_mean_logits_are_those_that_predict_a_token():
    """Where truncation leaves no prompt, the first token is predicted by nothing: not, as in the recorded reference, by
    the row's last position."""
    policy, _ = models()
    row = {
        "prompt_input_ids": [5, 6],
        "chosen_input_ids": [7, 8, 9, 10],
        "rejected_input_ids": [11, 12, 13, 14],
    }
    log = first_step(
        train_dataset=Dataset.from_list([row] * 8),
        max_length=4,
        truncation_mode="keep_end",
        max_prompt_length=None,
    )[2]
    with torch.no_grad():
        logits = policy(torch.tensor([row["chosen_input_ids"]])).logits[0]
    assert log["logits/chosen"] == pytest.approx(float(logits[:-1].mean()), rel=1e-10)


def test_compute_metrics_gets_the_rewards():
    policy, reference = models()
    with torch.no_grad():
        chosen, rejected, ref_chosen, ref_rejected = dpo_plain.pairs(policy, reference, ROWS[:7])
    seen = []

    def compute_metrics(found):
        seen.append(found)
        return {"best": float(found.predictions.max())}

    data = Dataset.from_list(ROWS[:7])
    trainer = make(eval_dataset=data, compute_metrics=compute_metrics, beta=BETA, per_device_eval_batch_size=3)
    metrics = trainer.evaluate()
    rewards = BETA * torch.stack([chosen - ref_chosen, rejected - ref_rejected], dim=1)
    torch.testing.assert_close(torch.tensor(seen[0].predictions), rewards, rtol=1e-10, atol=1e-12)
    assert seen[0].label_ids.tolist() == [0] * 7
    assert metrics["eval_best"] == pytest.approx(float(rewards.max()))
    assert metrics["eval_rewards/accuracies"] == pytest.approx(float((rewards[:, 0] > rewards[:, 1]).double().mean()))


# ---- data


def test_a_stream_trains_as_a_stored_set():
    order = {"train_sampling_strategy": "sequential", "max_steps": 2, "per_device_train_batch_size": 4}
    stored = make(**order)
    stream = make(train_dataset=IterableDataset.from_generator(lambda: iter(ROWS)), **order)
    for trainer in (stored, stream):
        trainer.train()
    for one, other in zip(stored.keep.steps, stream.keep.steps, strict=True):
        for name, gradient in one.items():
            assert torch.equal(other[name], gradient), name


def test_tools_stand_in_every_prompt():
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    ask, up, next_one = (
        {"role": role, "content": text}
        for role, text in (("user", "And then?"), ("assistant", "Look up."), ("assistant", "Next."))
    )
    rows = Dataset.from_list([{"prompt": [ask], "chosen": [up], "rejected": [next_one]}] * 2)
    prompts = []
    for settings in ({}, {"tools": tools}):
        trainer = make(
            model=tiny_model("llama", vocab_size=400), train_dataset=rows, max_length=None, max_prompt_length=None,
            processing_class=tiny_tokenizer("qwen3_like"), **settings,
        )  # fmt: skip
        prompts.append(trainer.processing_class.decode(trainer.train_dataset[1]["prompt_input_ids"]))
    assert "look_up" not in prompts[0] and "look_up" in prompts[1]
