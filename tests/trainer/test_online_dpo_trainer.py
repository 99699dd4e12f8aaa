"""Online DPO, Nash-MD and XPO: their steps against plain formulas, judges, metrics and errors."""

import logging

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.tiny import tiny_model
from tests.trainer import image_prompt_runs
from tests.trainer.grpo_runs import even_tokens, first_is_rare, make, prompts, run
from trl import NashMDConfig, OnlineDPOConfig, OnlineDPOTrainer, XPOConfig
from trl.experimental.judges import BasePairwiseJudge
from trl.experimental.nash_md import NashMDTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer as SameTrainer
from trl.experimental.xpo import XPOTrainer
from trl.rewards import JudgeSource, RewardError
from trl.rollouts.experience import REF

ONE = {
    "max_steps": 1,
    "num_generations": 2,
    "num_generations_eval": 2,
    "per_device_train_batch_size": 6,
    "temperature": 0.7,
}
MOVED = 0.02  # from the reference, so that the log-ratios are not 0


class EvenJudge(BasePairwiseJudge):
    """Prefers the text with more even words; `answers` replaces answers by their number."""

    def __init__(self, **answers):
        self.answers, self.calls = {int(k.removeprefix("a")): v for k, v in answers.items()}, 0

    def judge(self, prompts, completions, shuffle_order=True):
        found = []
        for first, second in completions:
            own = [
                sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit()) for text in (first, second)
            ]
            found.append(self.answers.get(self.calls, int(own[1] > own[0])))
            self.calls += 1
        return found


class SoftJudge(EvenJudge):
    """Says 0.8 for what `EvenJudge` prefers."""

    def judge(self, prompts, completions, shuffle_order=True, return_scores=False):
        found = super().judge(prompts, completions, shuffle_order)
        return [0.8 if answer == 0 else 0.2 for answer in found] if return_scores else found


def models():
    """A policy that differs from its reference."""
    reference = tiny_model("gpt2", dtype=torch.float64)
    policy = tiny_model("gpt2", dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=MOVED)
    return policy, reference


def sequence_logps(model, experience, temperature):
    """Log-probs of the tokens of each completion, by the model's own forward, row by row."""
    found = []
    for prompt, ids in zip(experience.prompts.split(), experience.completions.split(), strict=True):
        logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
    return found


def stepped(method, **settings):
    """A trainer after one step, its rollout batch, and plain log-probs of policy (with gradient) and reference."""
    policy, reference = models()
    given = {"model": policy, "ref_model": reference, **settings.pop("given", {})}
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    trainer, keep = run(method, **{**ONE, **settings}, given=given)
    plain = tiny_model("gpt2", dtype=torch.float64)
    plain.load_state_dict(before, strict=False)
    batch, temperature = trainer._rollout_batch, settings.get("temperature", ONE["temperature"])
    temperature = temperature if method == "nash_md" else 1.0
    own = sequence_logps(plain, batch, temperature)
    with torch.no_grad():
        ref = sequence_logps(reference, batch, temperature)
    return trainer, keep.steps[0], batch, plain, own, ref


def assert_gradients(found, loss, plain):
    named = dict(plain.named_parameters())
    for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("loss_type", "ties", "reward"), [("sigmoid", "drop", even_tokens), ("ipo", "drop", even_tokens), ("sigmoid", "both", first_is_rare)]
)  # fmt: skip
def test_a_step_of_online_dpo(loss_type, ties, reward):
    """Ties are dropped, or trained in both orders with half the weight."""
    trainer, found, batch, plain, own, ref = stepped(
        "online_dpo", loss_type=loss_type, missing_eos_penalty=0.5, tie_policy=ties, reward_funcs=reward
    )
    texts = [ids.tolist() for ids in batch.completions.split()]
    stopped = batch.per_row["stopped"].tolist()
    assert not all(stopped)
    scores = [score - 0.5 * (not stop) for score, stop in zip(reward(texts), stopped, strict=True)]
    losses, weights, margins = [], [], []
    for i in range(0, len(own), 2):
        gap = scores[i] - scores[i + 1]
        orders = [(i, i + 1)] * (gap > 0) + [(i + 1, i)] * (gap < 0)
        for c, r in orders or [(i, i + 1), (i + 1, i)] * (ties == "both"):
            margin = (own[c] - ref[c]).sum() - (own[r] - ref[r]).sum()
            losses.append(-logsigmoid(0.1 * margin) if loss_type == "sigmoid" else (margin - 5.0).square())
            weights.append(1.0 if orders else 0.5)
            margins.append(scores[c] - scores[r])
    assert (0.5 in weights) == (ties == "both") and 1.0 in weights
    loss = (torch.stack(losses) * torch.tensor(weights)).sum() / sum(weights)
    log = trainer.state.log_history[0]
    assert log["objective/scores_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-6)
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gaps = torch.stack([(a - b).sum() for a, b in zip(own, ref, strict=True)]).detach()
    assert log["objective/kl"] == pytest.approx(gaps.mean().item(), rel=1e-6)
    assert log["objective/entropy"] == pytest.approx(-torch.stack([a.sum() for a in own]).mean().item(), rel=1e-6)
    assert log["objective/scores"] == pytest.approx(sum(scores) / len(scores), rel=1e-6)
    assert log["objective/rlhf_reward"] == pytest.approx(log["objective/scores"] - 0.1 * gaps.mean().item(), rel=1e-6)
    assert log["val/contain_eos_token"] == pytest.approx(sum(stopped) / len(stopped))
    assert_gradients(found, loss, plain)


def test_a_step_of_nash_md():
    trainer, found, batch, plain, own, ref = stepped("nash_md", beta=0.2, mixture_coef=0.3)
    scores = even_tokens([ids.tolist() for ids in batch.completions.split()])
    losses, gaps, values = [], [], []
    for i in range(0, len(own), 2):
        preference = torch.sigmoid(torch.tensor(scores[i] - scores[i + 1], dtype=torch.float64))
        gap = (own[i] - ref[i]).detach()
        rest = gap.flip(0).cumsum(0).flip(0)
        losses.append(-((preference - 0.5 - 0.2 * rest) * own[i]).sum())
        gaps.append(gap.sum())
        values.append((preference - 0.5) * own[i].sum().detach())
    log = trainer.state.log_history[0]
    assert log["loss/kl"] == pytest.approx(torch.stack(gaps).mean().item(), rel=1e-6)
    assert log["loss/score"] == pytest.approx(torch.stack(values).mean().item(), rel=1e-6)
    assert (log["mixture_coef"], log["beta"]) == (pytest.approx(0.3), pytest.approx(0.2))
    assert_gradients(found, torch.stack(losses).mean(), plain)


def test_a_step_of_xpo():
    trainer, found, batch, plain, own, ref = stepped("xpo", alpha=0.05)
    scores = even_tokens([ids.tolist() for ids in batch.completions.split()])
    losses = []
    for i in range(0, len(own), 2):
        if scores[i] == scores[i + 1]:
            continue
        c, r = (i, i + 1) if scores[i] > scores[i + 1] else (i + 1, i)
        margin = (own[c] - ref[c]).sum() - (own[r] - ref[r]).sum()
        losses.append(-logsigmoid(0.1 * margin) + 0.05 * own[i + 1].sum())
    loss = torch.stack(losses).mean()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert log["loss/dpo"] + log["loss/xpo"] == pytest.approx(loss.item(), rel=1e-5)
    assert log["objective/scores_margin"] == pytest.approx(
        sum(scores[::2]) / len(scores[::2]) - sum(scores[1::2]) / len(scores[1::2]), rel=1e-6
    )
    assert_gradients(found, loss, plain)


@pytest.mark.parametrize(("method", "turn"), [("nash_md", 0.0), ("xpo", 1.0)])
def test_the_opponent_is_the_policy_or_the_reference(method, turn):
    """With coefficient 0 the opponent of Nash-MD has the policy's probabilities; XPO's has the reference's."""
    settings = {"mixture_coef": turn} if method == "nash_md" else {}
    _, _, batch, _, own, ref = stepped(method, temperature=1.0, **settings)
    sampled = batch.ragged("sampling_logps").split()
    source = own if turn == 0 else ref
    for i in range(1, len(own), 2):
        torch.testing.assert_close(sampled[i].double(), source[i].detach(), rtol=0, atol=1e-9)


# ---- judges


@pytest.mark.parametrize("method", ["online_dpo", "nash_md", "xpo"])
def test_pairs_without_an_answer_are_dropped(method):
    """A judge's -1 is no preference for the second completion: gradients are those of the other pairs alone."""
    policy, reference = models()
    judge = EvenJudge(a0=-1, a2=-1)
    trainer, _keep = run(
        method, **ONE, reward_funcs=None, given={"model": policy, "ref_model": reference, "judge": judge}
    )
    experience = trainer._rollout_batch
    assert experience.per_row["scores"][:2].isnan().all() and experience.per_row["scores"][4:6].isnan().all()
    assert trainer.method.divisor(experience) == 4
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_a_soft_judge_gives_nash_md_its_probabilities():
    trainer, _ = run("nash_md", **ONE, reward_funcs=None, given={"judge": SoftJudge()})
    preference = trainer._rollout_batch.per_row["preference"][::2]
    assert set(preference.tolist()) <= {0.2, 0.5, 0.8} and 0.8 in preference.tolist()
    assert trainer.state.log_history[0]["rewards/probabilities"] == pytest.approx(preference.mean().item())


def test_equal_prompts_of_a_batch_are_separate_pairs():
    """Each pair is compared by itself: 1 and 0 for its two completions, not shares over all of the prompt's."""
    trainer, _ = run(
        "online_dpo",
        **{**ONE, "per_device_train_batch_size": 14},
        reward_funcs=None,
        given={"judge": EvenJudge()},
    )
    pairs = trainer._rollout_batch.per_row["scores"].view(-1, 2)
    assert set(pairs.flatten().tolist()) <= {0.0, 0.5, 1.0} and (pairs.sum(dim=1) == 1).all()


def test_a_judge_wins_over_rewards_with_a_warning(recwarn):
    trainer, _ = make("online_dpo", **ONE, given={"judge": EvenJudge()})
    assert trainer.rewards.names == ("EvenJudge",)
    assert any("reward_funcs has no effect with a judge" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("method", ["online_dpo", "nash_md", "xpo"])
def test_a_judge_source_is_a_reward(method):
    trainer, _ = run(method, **ONE, reward_funcs=JudgeSource(EvenJudge()))
    assert trainer.method.judge is None and trainer.state.log_history[0]["grad_norm"] > 0


@pytest.mark.parametrize("answer", [2, 0.3, float("nan"), "first"])
def test_a_wrong_answer_is_an_error(answer):
    with pytest.raises(RewardError, match="EvenJudge"):
        run("online_dpo", **ONE, reward_funcs=None, given={"judge": EvenJudge(a1=answer)})


def test_a_judge_that_raises_may_be_skipped(caplog):
    class Broken(EvenJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            raise RuntimeError("no connection")

    with caplog.at_level(logging.WARNING):
        trainer, _ = run("online_dpo", **ONE, reward_failure="skip", reward_funcs=None, given={"judge": Broken()})
    assert trainer.state.log_history[0]["grad_norm"] == 0.0
    assert "no connection" in caplog.text


def test_all_ties_give_no_gradient():
    trainer, _ = run("online_dpo", **ONE, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    log = trainer.state.log_history[0]
    assert log["grad_norm"] == 0.0 and log["loss"] == 0.0


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_masked_completions_are_in_no_pair(loss_type):
    """With `mask_truncated_completions` a pair with a completion without an end token is dropped, from metrics too."""
    settings = {**ONE, "per_device_train_batch_size": 14, "max_completion_length": 5, "loss_type": loss_type}
    trainer, _ = run("online_dpo", **settings, mask_truncated_completions=True)
    rows = trainer._rollout_batch.per_row
    assert torch.equal(rows["scores"].isnan(), ~rows["stopped"].bool()) and not rows["stopped"].all()
    both = rows["stopped"].bool().view(-1, 2).all(dim=1)
    assert trainer.method.divisor(trainer._rollout_batch) <= both.sum()
    assert trainer.state.log_history[0]["objective/entropy"] > 2  # nats of whole completions, not diluted by empty ones


def test_xpo_measures_answered_pairs_alone():
    judge = EvenJudge(a0=-1, a1=-1)
    trainer, _ = run("xpo", **{**ONE, "temperature": 1.0}, reward_funcs=None, given={"judge": judge})
    known = ~trainer._rollout_batch.per_row["scores"].isnan().view(-1, 2).any(dim=1)
    lengths = trainer._rollout_batch.completions.lengths.view(-1, 2).double()
    per_token = trainer.state.log_history[0]["objective/entropy"] / lengths[known].mean().item()
    assert not known.all() and 2.5 < per_token < 5  # about the entropy of the tiny model's vocabulary


# ---- schedules, names, errors


def test_lists_hold_one_value_for_each_epoch():
    settings = {
        **ONE,
        "max_steps": 6,
        "per_device_train_batch_size": 7,
        "alpha": [0.1, 0.02],
        "beta": [0.3, 0.2, 0.1],
    }
    trainer, _ = run("xpo", **settings)  # 14 prompts: two steps an epoch
    logs = trainer.state.log_history[:-1]
    assert [log["beta"] for log in logs] == pytest.approx([0.3, 0.3, 0.2, 0.2, 0.1, 0.1])
    assert [log["alpha"] for log in logs] == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.02, 0.02])
    assert (trainer.beta, trainer.alpha) == (0.1, 0.02)


def test_the_relations_of_the_classes():
    assert SameTrainer is OnlineDPOTrainer
    assert issubclass(NashMDTrainer, OnlineDPOTrainer) and issubclass(XPOTrainer, OnlineDPOTrainer)


def test_an_adapter_is_compared_with_its_base():
    from peft import LoraConfig

    for method in ("online_dpo", "nash_md", "xpo"):
        given = {"peft_config": LoraConfig(r=4, target_modules=["c_attn"])}
        trainer, keep = run(method, **ONE, given=given)
        assert keep.steps[0] and all("lora" in name for name in keep.steps[0])
        assert trainer.state.log_history[0]["rewards/margins"] == pytest.approx(
            0.0, abs=1e-9
        )  # the adapter begins at 0


@pytest.mark.parametrize("method", ["online_dpo", "nash_md", "xpo"])
def test_an_adapter_is_compared_with_another_model(method):
    """The reference of an adapter's trainer is the `ref_model`, where one is passed."""
    from peft import LoraConfig

    policy, reference = models()
    given = {
        "peft_config": LoraConfig(r=4, target_modules=["c_attn"]),
        "model": policy,
        "ref_model": reference,
    }
    trainer, keep = run(method, **ONE, given=given)
    assert keep.steps[0] and all("lora" in name for name in keep.steps[0]) and trainer.ref_model is reference
    batch = trainer._rollout_batch
    with torch.no_grad():
        expected = sequence_logps(reference, batch, ONE["temperature"] if method == "nash_md" else 1.0)
    torch.testing.assert_close(batch.per_token[REF], torch.cat(expected), rtol=0, atol=1e-10)
    assert abs(trainer.state.log_history[0]["rewards/margins"]) > 1e-4


def test_evaluation():
    for method in ("online_dpo", "nash_md", "xpo"):
        trainer, _ = make(method, **ONE)
        found = trainer.evaluate(prompts(4))
        assert 0 < found["eval_beta"] < 1 and "eval_rewards/margins" in found


@pytest.mark.parametrize(
    ("config", "settings", "error"),
    [
        (OnlineDPOConfig, {"num_generations": 1}, "num_generations"),
        (OnlineDPOConfig, {"beta": [0.1, -1.0]}, "beta"),
        (OnlineDPOConfig, {"beta": 0.0}, "beta"),
        (OnlineDPOConfig, {"loss_type": "aot"}, "loss_type"),
        (OnlineDPOConfig, {"max_new_tokens": 600}, "max_length"),
        (OnlineDPOConfig, {"num_generations": 4, "num_generations_eval": 2}, "num_generations_eval"),
        (NashMDConfig, {"mixture_coef": 1.5}, "mixture_coef"),
        (NashMDConfig, {"num_generations": 4}, "num_generations"),
        (XPOConfig, {"alpha": "many"}, "alpha"),
    ],
)
def test_wrong_settings(config, settings, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        config(str(tmp_path), use_cpu=True, **settings)


def test_wrong_arguments(monkeypatch):
    with pytest.raises(ValueError, match="got neither"):
        make("online_dpo", **ONE, reward_funcs=None)
    with pytest.raises(TypeError, match="BasePairwiseJudge"):
        make("online_dpo", **ONE, given={"judge": even_tokens})
    with pytest.raises(TypeError, match="compute_metrics"):
        make("online_dpo", **ONE, given={"compute_metrics": lambda found: {}})
    with pytest.raises(ValueError, match="text alone, got tools"):
        make("xpo", **ONE, given={"tools": [even_tokens]})
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        make("online_dpo", **{**ONE, "per_device_eval_batch_size": 3})[0].evaluate(prompts(4))
    with pytest.raises(ValueError, match="vocabulary"):
        make("nash_md", **ONE, given={"ref_model": tiny_model("gpt2", dtype=torch.float64, vocab_size=90)})
    monkeypatch.setattr("trl.trainer.group_setup.stop_tokens", lambda *_: ())
    with pytest.raises(ValueError, match="missing_eos_penalty"):
        make("online_dpo", **ONE, missing_eos_penalty=1.0)


def test_prompts_with_images():
    """A step on rows with images: the pair loss of equal policy and reference, and gradients that reach the projector."""
    trainer, keep = image_prompt_runs.run(
        "online_dpo", num_generations=2, num_generations_eval=2, per_device_train_batch_size=4, max_steps=1
    )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931472, rel=1e-6)
    assert any("projector" in name and gradient.any() for name, gradient in keep.steps[0].items())


def test_completions_that_are_cut_are_counted_as_truncated(caplog):
    with caplog.at_level(logging.WARNING, logger="trl"):
        trainer, _ = run("online_dpo", **{**ONE, "mask_truncated_completions": True, "max_completion_length": 1})
    entry = trainer.state.log_history[0]
    assert entry["tokens/truncated"] > 0 and "tokens/reward_failed" not in entry
    assert "mask_truncated_completions" in caplog.text and "returned None" not in caplog.text
