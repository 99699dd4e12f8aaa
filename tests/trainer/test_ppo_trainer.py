"""One step of step-level PPO: worked by hand, independent of how it is cut, for every kind of model."""

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState
from huggingface_hub import HfApi
from peft import LoraConfig

from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.ppo_runs import QUERIES, SCORES, batch, make_trainer, value_model
from tests.two_processes import launch
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

DOUBLE = {"dtype": torch.float64}


def weights(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sgd(model, lr=0.1):
    return {"optimizer": torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)}


def responses_of(model, queries, responses):
    """Log-probs and values of each response by the model's own forward, one row at a time."""
    found = []
    for query, response in zip(queries, responses, strict=True):
        if model.config.is_encoder_decoder:
            start = [model.config.decoder_start_token_id]
            inputs = {"input_ids": query[None], "decoder_input_ids": torch.tensor([[*start, *response[:-1]]])}
            place = slice(0, len(response))
        else:
            inputs = {"input_ids": torch.cat([query, response])[None]}
            place = slice(len(query) - 1, len(query) + len(response) - 1)
        logits, _, values = model(**inputs)
        logps = logits[0, place].log_softmax(-1).gather(-1, response[:, None])[:, 0]
        found.append((logps, values[0, place]))
    return found


def plain_step(model, reference, *, lr, kl_coef, gamma=1.0, lam=0.95, clip=0.2, vf_coef=0.1):
    """One epoch over one minibatch in plain loops with SGD; returns the loss and the mean KL."""
    queries, responses, scores = batch()
    with torch.no_grad():
        old, ref = responses_of(model, queries, responses), responses_of(reference, queries, responses)
    advantages, returns, kls = [], [], []
    for (logps, values), (ref_logps, _), score in zip(old, ref, scores, strict=True):
        kl = logps - ref_logps
        rewards = -kl_coef * kl
        rewards[-1] += score
        kls.append(float(kl.sum()))
        carried, following, row = 0.0, 0.0, []
        for t in reversed(range(len(values))):
            carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
            following = values[t]
            row.insert(0, carried)
        advantages.append(torch.stack(row))
        returns.append(torch.stack(row) + values)
    flat = torch.cat(advantages)
    whitened = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    new = responses_of(model, queries, responses)
    ratio = (torch.cat([logps for logps, _ in new]) - torch.cat([logps for logps, _ in old])).exp()
    policy = torch.maximum(-whitened * ratio, -whitened * ratio.clamp(1 - clip, 1 + clip)).mean()
    value = (torch.cat([values for _, values in new]) - torch.cat(returns)).square().mean() / 2
    loss = policy + vf_coef * value
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return float(loss), float(np.mean(kls))


@pytest.mark.parametrize("architecture", ["gpt2", "t5", "bart", "bloom"])
def test_a_step_is_the_formulas_in_plain_loops(architecture):
    model, reference = value_model(architecture, **DOUBLE), value_model(architecture, seed=1, **DOUBLE)
    plain = copy.deepcopy(model)
    trainer = make_trainer(model, copy.deepcopy(reference), options=sgd(model), init_kl_coef=0.3)
    stats = trainer.step(*batch())
    loss, kl = plain_step(plain, reference, lr=0.1, kl_coef=0.3)
    assert stats["ppo/loss/total"] == pytest.approx(loss, rel=1e-6)
    assert stats["objective/kl"] == pytest.approx(kl, rel=1e-6)
    found = weights(trainer)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-7, atol=1e-8, msg=name)


def test_rewards_and_advantages_by_hand():
    trainer = make_trainer(init_kl_coef=0.5, gamma=0.5, lam=0.5)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    logps = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-2.0, -2.0, 5.0], [-1.0, -3.0, -1.0]])
    rewards, non_score, kls = trainer.compute_rewards(torch.tensor([1.0, 2.0]), logps, ref, mask)
    assert kls[0, :2].tolist() == [1.0, 0.0]
    assert non_score.tolist() == [[-0.5, 0.0, 0.0], [0.0, -1.0, 0.0]]
    assert rewards.tolist() == [[-0.5, 1.0, 0.0], [0.0, -1.0, 2.0]]
    values = torch.tensor([[1.0, 2.0, 7.0], [0.0, 1.0, 2.0]])
    kept, advantages, returns = trainer.compute_advantages(values, rewards, mask)
    # surprises: row 0 [-0.5 + 1 - 1, 1 - 2], row 1 [0.5, -1 + 1 - 1, 0]; then gamma * lam = 0.25
    plain = torch.tensor([-0.75, -1.0, 0.25, -1.0, 0.0])
    whitened = (plain - plain.mean()) / plain.std()
    assert kept.tolist() == [[1.0, 2.0, 0.0], [0.0, 1.0, 2.0]]
    torch.testing.assert_close(advantages[mask != 0], whitened)
    torch.testing.assert_close(returns[mask != 0], plain + torch.tensor([1.0, 2.0, 0.0, 1.0, 2.0]))


def test_a_ratio_above_the_threshold_leaves_the_minibatch_out():
    trainer = make_trainer(ratio_threshold=2.0)
    logps, old = torch.zeros(1, 2, requires_grad=True), torch.full((1, 2), -1.0)
    one = torch.ones(1, 2)
    policy, value, stats = trainer.loss(old, one, torch.zeros(1, 2, 8), one, logps, one, one, one)
    assert (float(policy.detach()), float(value), float(stats["loss/total"])) == (0.0, 0.0, 0.0)
    assert float(stats["policy/entropy"]) == pytest.approx(np.log(8))
    assert stats["policy/ratio"].tolist() == pytest.approx([np.e, np.e])
    trainer.config.ratio_threshold = 3.0
    policy, _, _ = trainer.loss(old, one, None, one, logps, one, one, one)
    assert float(policy.detach()) == pytest.approx(-1.2)  # the ratio is clipped to 1.2


# ---- how a step is cut changes nothing


def after(mini_batch_size=4, accumulation=1, *, flat=None, **config):
    model = value_model("gpt2", **DOUBLE)
    trainer = make_trainer(
        model, value_model("gpt2", seed=1, **DOUBLE), options=sgd(model),
        mini_batch_size=mini_batch_size, gradient_accumulation_steps=accumulation, **config,
    )  # fmt: skip
    if flat is not None:
        assert trainer.scorer.packed != flat
        trainer.scorer.packed = flat
    return trainer.step(*batch()), weights(trainer)


def assert_same(found, expected, tolerance=1e-9):
    for name, weight in expected[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=tolerance, atol=tolerance, msg=name)
    for name, value in expected[0].items():
        if np.size(value) == 1 and not name.startswith("time/"):
            assert found[0][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("cut", [(2, 2), (1, 4)])
def test_minibatches_that_are_accumulated_make_the_same_step(cut):
    assert_same(after(*cut), after())


def test_trainers_of_one_process_accumulate_each_as_it_was_told():
    losses, weights = [], []
    for others in (0, 2):
        before = GradientState().plugin_kwargs
        trainer = make_trainer(mini_batch_size=2, gradient_accumulation_steps=2)
        assert GradientState().plugin_kwargs == before  # a transformers Trainer divides by what stands there
        for _ in range(others):
            make_trainer(gradient_accumulation_steps=1, mini_batch_size=4)
        losses.append(trainer.step(*batch())["ppo/loss/total"])
        weights.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
        assert GradientState().plugin_kwargs == before
    assert losses[0] == losses[1]
    assert all(torch.equal(x, y) for x, y in zip(*weights, strict=True))


def test_the_whole_distribution_does_not_depend_on_the_minibatches():
    whole = after(kl_penalty="full")
    assert whole[0]["objective/kl"] > 0
    assert_same(after(2, 2, kl_penalty="full"), whole)


@pytest.mark.slow
def test_two_processes_make_the_same_step(tmp_path):
    launch("tests.trainer.ppo_worker", str(tmp_path / "two.pt"))
    two = torch.load(tmp_path / "two.pt", weights_only=False)
    assert_same((two["stats"], two["weights"]), after(whiten_rewards=True, use_score_scaling=True, max_grad_norm=0.5))


def test_every_update_is_cut_to_the_longest_gradient():
    model = value_model()
    trainer = make_trainer(model, options=sgd(model, lr=1.0), max_grad_norm=0.05, ppo_epochs=3)
    moved, before = [], [weights(trainer)]
    own = trainer.optimizer.step

    def step(*args, **kwargs):
        own(*args, **kwargs)
        now = weights(trainer)
        moved.append(sum(float((now[n] - before[-1][n]).square().sum()) for n in now) ** 0.5)
        before.append(now)

    trainer.optimizer.step = step
    trainer.step(*batch())
    assert moved == pytest.approx([0.05] * 3, rel=1e-3)


def test_a_tools_text_is_no_step_of_the_policy():
    """Rewards and values of what stands between two of the policy's tokens are not read, and do not discount."""
    trainer = make_trainer(gamma=0.9, lam=0.8)
    rewards, values = (
        torch.tensor([[0.1, 5.0, 1.0], [0.3, -0.2, 0.0]]),
        torch.tensor([[0.2, 9.0, 0.4], [0.1, 0.3, 0.0]]),
    )
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    found = trainer.compute_advantages(values, rewards, mask)
    short = trainer.compute_advantages(
        torch.tensor([[0.2, 0.4], [0.1, 0.3]]), torch.tensor([[0.1, 1.0], [0.3, -0.2]]), torch.ones(2, 2)
    )
    for whole, without in zip(found, short, strict=True):
        torch.testing.assert_close(whole[mask != 0], without.flatten())


# ---- kinds of models and references


def test_adapters_are_their_own_reference_and_alone_train():
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=64, init_lora_weights=False)
    model = value_model(peft_config=config)
    trainer = make_trainer(model)
    assert trainer.ref_model is None
    assert trainer.config.is_peft_model
    before = weights(trainer)
    expected = []
    with model.pretrained_model.disable_adapter(), torch.no_grad():
        for logps, _ in responses_of(model, *batch()[:2]):
            expected.append(logps)
    stats = trainer.step(*batch())
    np.testing.assert_allclose(stats["objective/ref_logprobs"], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert abs(stats["objective/kl"]) > 0.1
    for name, weight in weights(trainer).items():
        assert torch.equal(weight, before[name]) == ("lora" not in name and "v_head" not in name), name


def test_shared_layers_are_frozen_in_both():
    model = value_model()
    trainer = make_trainer(model, options={"num_shared_layers": 1, "optimizer": None})
    before = weights(trainer)
    trainer.config.learning_rate = 0.1
    trainer.step(*batch())
    now = weights(trainer)
    for part, changes in (
        ("embed_tokens", False),
        ("layers.0.", False),
        ("layers.1.", True),
        ("v_head", True),
    ):
        names = [name for name in now if part in name]
        assert names
        assert all(torch.equal(now[name], before[name]) != changes for name in names), part
    reference = dict(trainer.ref_model.named_parameters())
    assert all(reference[name] is p for name, p in trainer.model.named_parameters() if "layers.0." in name)


# ---- what it does with its numbers


def test_scores_are_scaled_by_those_of_all_steps():
    trainer = make_trainer(use_score_scaling=True, use_score_norm=True, score_clip=1.0)
    trainer.step(*batch())
    queries, responses, _ = batch()
    stats = trainer.step(queries, responses, [4.0, 4.0, 4.0, -8.0])
    seen = torch.tensor([*SCORES, 4.0, 4.0, 4.0, -8.0])
    expected = ((torch.tensor([4.0, 4.0, 4.0, -8.0]) - seen.mean()) / seen.std()).clamp(-1, 1)
    assert stats["ppo/mean_scores"] == pytest.approx(float(expected.mean()), rel=1e-5)


def test_the_coefficient_follows_the_divergence():
    trainer = make_trainer(value_model(), value_model(seed=1), target=1.0, horizon=40, init_kl_coef=0.5)
    stats = trainer.step(*batch())
    error = min(max(stats["objective/kl"] / 1.0 - 1, -0.2), 0.2)
    assert stats["objective/kl_coef"] == 0.5
    assert trainer.kl_ctl.value == pytest.approx(0.5 * (1 + error * 4 / 40))


def test_the_schedule_moves_once_per_step():
    model = value_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = make_trainer(
        model, options={"optimizer": optimizer, "lr_scheduler": schedule}, learning_rate=1.0, ppo_epochs=2
    )
    assert [trainer.step(*batch())["ppo/learning_rate"] for _ in range(2)] == [1.0, 0.5]
    assert isinstance(trainer.lr_scheduler, AcceleratedScheduler)
    assert trainer.lr_scheduler.get_last_lr() == [0.25]


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_stay_after_a_step_and_do_not_reach_the_next(accumulated):
    def stepped(clears):
        model = value_model(**DOUBLE)
        trainer = make_trainer(model, options=sgd(model), mini_batch_size=2, gradient_accumulation_steps=accumulated)
        for _ in range(2):
            trainer.step(*batch())
            assert all(parameter.grad is not None for parameter in model.parameters())
            assert sum(float(parameter.grad.abs().sum()) for parameter in model.parameters()) > 0
            if clears:
                model.zero_grad()
        return weights(trainer)

    expected = stepped(clears=True)
    for name, value in stepped(clears=False).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("architecture", "side"), [("llama", "left"), ("llama", "right"), ("t5", "right")])
def test_prepared_model_inputs_score_as_responses_do(architecture, side):
    trainer = make_trainer(value_model(architecture, **DOUBLE))
    trainer.tokenizer.padding_side = side
    queries, responses, _ = batch()
    inputs = trainer.prepare_model_inputs(queries, responses)
    if architecture == "t5":
        assert inputs["input_ids"][0].tolist() == [
            5,
            6,
            7,
            trainer.tokenizer.pad_token_id,
            trainer.tokenizer.pad_token_id,
        ]
        assert inputs["decoder_input_ids"][0].tolist() == [20, 21, 22, 23, trainer.tokenizer.pad_token_id]
        assert inputs["decoder_attention_mask"].sum(dim=1).tolist() == [4, 2, 5, 3]
        return
    assert inputs["attention_mask"].sum(dim=1).tolist() == [7, 7, 8, 5]
    logits = trainer.model(**inputs)[0].log_softmax(-1)
    logps, *_ = trainer.batched_forward_pass(trainer.model, queries, responses)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        first = int(inputs["attention_mask"][row].argmax()) + len(query) - 1
        own = logits[row, first : first + len(response)].gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(logps[row, : len(response)], own.to(logps.dtype), rtol=1e-5, atol=1e-8)


def test_an_override_that_step_does_not_call_is_refused():
    class Padded(PPOTrainer):
        def prepare_model_inputs(self, queries, responses):
            return {}

    with pytest.raises(TypeError, match="Padded overrides prepare_model_inputs, which step does not call"):
        Padded(PPOConfig(batch_size=4, mini_batch_size=4), value_model(), None, tiny_tokenizer())


def test_early_stopping_ends_the_epochs():
    epochs = []
    for target in (1e6, 1e-3):
        trainer = make_trainer(ppo_epochs=8, early_stopping=True, target_kl=target)
        queries, _, scores = batch()
        responses = trainer.generate(queries, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=32)
        stats = trainer.step(queries, responses, scores)
        epochs.append(len(stats["ppo/policy/ratio"]) // sum(map(len, responses)))
    assert epochs[0] == 8
    assert 1 < epochs[1] < 8


def test_every_documented_statistic_is_there():
    stats = make_trainer().step(*batch())
    documented = """objective/kl objective/kl_dist objective/kl_coef objective/entropy objective/logprobs objective/ref_logprobs
        ppo/mean_non_score_reward ppo/mean_scores ppo/std_scores ppo/learning_rate ppo/policy/entropy ppo/policy/clipfrac
        ppo/policy/approxkl ppo/policy/policykl ppo/policy/ratio ppo/policy/advantages_mean ppo/policy/advantages
        ppo/returns/mean ppo/returns/var ppo/val/mean ppo/val/var ppo/val/var_explained ppo/val/clipfrac ppo/val/vpred
        ppo/val/error ppo/loss/policy ppo/loss/value ppo/loss/total tokens/queries_len_mean tokens/queries_len_std
        tokens/queries_dist tokens/responses_len_mean tokens/responses_len_std tokens/responses_dist time/ppo/total time/ppo/forward_pass time/ppo/compute_rewards
        time/ppo/compute_advantages time/ppo/optimize_step time/ppo/calc_stats"""
    assert not set(documented.split()) - set(stats)
    assert isinstance(stats["ppo/loss/total"], float)
    assert isinstance(stats["objective/kl_dist"], np.ndarray)
    assert stats["tokens/queries_dist"].tolist() == [len(query) for query in QUERIES]


def test_statistics_go_to_the_tracker(monkeypatch):
    trainer = make_trainer()
    stats, sent = trainer.step(*batch()), []
    monkeypatch.setattr(trainer.accelerator, "log", lambda values, step: sent.append((values, step)))
    trainer.log_stats(stats, {}, [1.0, 3.0])
    assert not sent  # no tracker is asked for
    trainer.config.log_with = "tensorboard"
    trainer.log_stats(stats, {}, [torch.tensor(1.0), torch.tensor(3.0)])
    values, step = sent[0]
    assert (values["env/reward_mean"], step) == (2.0, 1)
    assert values["env/reward_std"] == pytest.approx(2**0.5)
    assert all(isinstance(value, (int, float)) for value in values.values())
    with pytest.raises(ValueError, match="columns_to_log"):
        trainer.config.log_with = "wandb"
        trainer.log_stats(stats, {"query": ["a"]}, [1.0])


def test_the_best_policy_is_that_of_the_scores_as_they_were_given(monkeypatch):
    trainer = make_trainer(
        push_to_hub_if_best_kwargs={"repo_id": "me/best"},
        use_score_scaling=True,
        use_score_norm=True,
        score_clip=0.1,
    )
    pushed = []
    monkeypatch.setattr(trainer, "push_to_hub", lambda repo_id: pushed.append(trainer.current_step))
    queries, responses, _ = batch()
    for score in (1.0, 5.0, 3.0, 6.0, 5.5):  # the scaled and cut means rise in other steps
        trainer.step(queries, responses, [score, score, score, score + 1])
    assert pushed == [1, 2, 4]
    assert trainer.highest_reward == 6.25


def test_a_push_uploads_model_tokenizer_and_card(monkeypatch, tmp_path):
    sent = {}

    def upload(self, *, folder_path, repo_id, **options):
        sent.update(options, files={path.name for path in Path(folder_path).iterdir()}, repo_id=repo_id)
        return "https://hub/me/policy"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    trainer = make_trainer()
    assert trainer.push_to_hub("me/policy", private=True) == "https://hub/me/policy"
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= sent["files"]
    trainer.save_pretrained(tmp_path / "named", push_to_hub=True, commit_message="hello")
    assert (sent["repo_id"], sent["commit_message"]) == ("named", "hello")


def test_what_is_saved_loads_again(tmp_path):
    trainer = make_trainer()
    trainer.step(*batch())
    trainer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path), summary_dropout_prob=0.0)
    ids = torch.tensor([QUERIES[1]])
    for found, expected in zip(loaded(input_ids=ids)[::2], trainer.model(input_ids=ids)[::2], strict=True):
        torch.testing.assert_close(found, expected)
    card = (tmp_path / "README.md").read_text()
    assert "TRL Model" in card
    assert "reinforcement-learning" in card
    assert "1909.08593" in card
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_config_knows_its_older_names_and_what_divides():
    with pytest.warns(FutureWarning, match="mini_batch_size"):
        assert PPOConfig(forward_batch_size=16).mini_batch_size == 16
    with pytest.warns(FutureWarning, match="optimize_device_cache"):
        assert PPOConfig(optimize_cuda_cache=True).optimize_device_cache
    config = PPOConfig(batch_size=16, mini_batch_size=2, gradient_accumulation_steps=4)
    assert config.backward_batch_size == 8
    assert PPOConfig(tracker_kwargs={"wandb": {"name": "x"}}).to_dict()["tracker_kwargs/wandb/name"] == "x"
