"""PPO on prompts: what it takes, what it logs, what it saves, and how it refuses what cannot work."""

import logging

import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    TrainingArguments,
)

from tests.experimental.ppo_runs import SETTINGS, even_tokens, logs, make, prompts, run
from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from tests.trainer.resume_worker import tokenizer
from trl.checkpoints.wholeness import CheckpointError
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.rewards.result import RewardError

SHORT = {"dtype": "float32", "max_steps": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 4}
DOCUMENTED = {
    "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores",
    "policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg",
    "policy/entropy_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode",
}  # fmt: skip


def test_every_documented_metric_is_logged_with_every_loss():
    trainer, _ = run(**{**SHORT, "num_ppo_epochs": 2, "max_steps": 5})
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 5
    for entry in entries:
        assert set(entry) >= DOCUMENTED
    assert [entry["episode"] for entry in entries] == [8, 8, 8, 8, 16]
    assert not any("squared" in name for entry in entries for name in entry)


def test_sizes_follow_from_each_other():
    trainer, _ = make(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        num_mini_batches=2,
        max_steps=-1,
        total_episodes=25,
    )
    args = trainer.args
    found = args.micro_batch_size, args.mini_batch_size, args.local_batch_size, args.batch_size
    assert found == (2, 6, 12, 12)
    assert (args.world_size, args.num_total_batches, args.max_steps) == (1, 3, 3 * 2 * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 100}, "batch_size=100 .* make it 16"),
        ({"micro_batch_size": 4}, "micro_batch_size=4 .* make it 8"),
    ],
)
def test_sizes_that_do_not_follow_from_the_others(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_no_end_of_sequence():
    words = tokenizer()
    words.eos_token = None
    for settings in ({"stop_token": "eos"}, {"missing_eos_penalty": 1.0}):
        args = PPOConfig("unused", use_cpu=True, report_to="none", **settings)
        with pytest.raises(ValueError, match="needs an end-of-sequence token, and the tokenizer has none"):
            PPOTrainer(args, words, tiny_model("gpt2"), None, None, prompts(), None, reward_funcs=even_tokens)


def test_prompts_that_cannot_be_completed():
    with pytest.raises(ValueError, match="row 1, column 'input_ids': a prompt of 256 tokens, expected at most 255"):
        make(data=Dataset.from_dict({"input_ids": [[5], [5] * 256]}))
    with pytest.raises(ValueError, match="row 1, column 'input_ids': a prompt without tokens"):
        make(data=Dataset.from_dict({"input_ids": [[5], []]}))
    with pytest.raises(ValueError, match="token id 96, expected 0 to 95"):
        make(data=Dataset.from_dict({"input_ids": [[5, 96]]}))
    with pytest.raises(ValueError, match=r"expected 'prompt' or 'input_ids'\. .*--column_mapping"):
        make(data=Dataset.from_dict({"text": ["w3"]}))
    with pytest.raises(ValueError, match="row 1, column 'prompt': None"):
        make(data=Dataset.from_list([{"prompt": "w3"}, {"prompt": None}]))
    with pytest.raises(TypeError, match="train dataset is of type IterableDataset"):
        make(data=IterableDataset.from_generator(lambda: iter([{"input_ids": [3]}])))
    with pytest.raises(TypeError, match="train dataset is None"):
        PPOTrainer(
            PPOConfig("unused", use_cpu=True),
            tokenizer(),
            tiny_model("gpt2"),
            None,
            None,
            None,
            None,
            reward_funcs=even_tokens,
        )


def test_padded_prompts_and_sets_that_come_later():
    padded = Dataset.from_dict({"input_ids": [[0, 5, 6], [7, 8, 9]], "attention_mask": [[0, 1, 1], [1, 1, 1]]})
    trainer, _ = make(data=padded, eval_dataset={"one": padded})
    assert trainer.train_dataset["input_ids"][:] == [[5, 6], [7, 8, 9]]
    expected = trainer.evaluate()
    found = trainer.evaluate(padded)
    assert found["eval_objective/scores"] == expected["eval_one_objective/scores"]


def test_configs_and_models_of_another_kind():
    with pytest.raises(TypeError, match=r"args must be a trl.experimental.ppo.PPOConfig"):
        PPOTrainer(TrainingArguments("x", use_cpu=True), tokenizer(), tiny_model("gpt2"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an encoder-decoder"):
        make(tiny_seq2seq("t5"))


def test_models_that_do_not_fit():
    with pytest.raises(ValueError, match=r"num_labels=1 .*got 3"):
        make(reward_model=tiny_classifier("gpt2", num_labels=3))
    with pytest.raises(ValueError, match=r"num_labels=1 .*got 2"):
        make(value_model=tiny_classifier("gpt2", num_labels=2))
    one = tiny_classifier("gpt2", num_labels=1)
    with pytest.raises(ValueError, match="value_model is the reward model itself"):
        make(reward_model=one, value_model=one)
    with pytest.raises(ValueError, match="reward_model and reward_funcs are both None"):
        make(reward_funcs=None)
    shared = tiny_classifier("gpt2", num_labels=1)
    policy = tiny_model("gpt2")
    shared.transformer = policy.transformer
    with pytest.raises(ValueError, match="value_model shares weights with the policy"):
        make(policy, value_model=shared)


def raising(completions, **_):
    raise KeyError("no such answer")


def hanging(completions, **_):
    import time

    time.sleep(30)


@pytest.mark.parametrize(
    ("reward", "settings", "message"),
    [
        (raising, {}, "'raising' raised KeyError"),
        (hanging, {"reward_deadline": 1.0}, "'hanging' did not answer within 1 s"),
        (lambda completions, **_: [1.0], {}, "gave 1 values, expected 8"),
        (lambda completions, **_: [float("nan")] * 8, {}, "expected a finite number"),
    ],
)
def test_rewards_that_fail_leave_the_last_checkpoint(reward, settings, message, tmp_path):
    calls = []

    def fails_later(**given):
        calls.append(1)
        return even_tokens(**given) if len(calls) == 1 else reward(**given)

    fails_later.__name__ = getattr(reward, "__name__", "reward")
    trainer, _ = make(
        folder=tmp_path,
        reward_funcs=fails_later,
        save_strategy="steps",
        save_steps=1,
        **{**SHORT, **settings, "max_steps": 8},
    )
    with pytest.raises(RewardError, match=message):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / "value_model").is_dir()
    assert not list(tmp_path.glob("_run-*"))


def test_rows_without_a_score_are_left_out():
    """Half of the rows have no opinion: the gradient is that of the others alone."""

    def half(completion_ids, row, **_):
        return [None if number % 2 else value for number, value in zip(row, even_tokens(completion_ids), strict=True)]

    data = prompts().select(range(8)).add_column("row", list(range(8)))
    settings = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 1}
    trainer, keep = run(data=data, reward_funcs=half, **settings)
    window = trainer._rollout_batch
    trained = window.per_token["trained"]
    assert 0 < int(trained.sum()) < len(trained)
    assert not window.per_token["advantages"][~trained].any()
    assert window.per_token["advantages"][trained].mean().abs() < 1e-12
    rows = window.completions.row_index
    assert torch.equal(
        trained, torch.isin(rows, trained.new_tensor(rows[trained].unique().tolist(), dtype=torch.int64))
    )
    found = logs(trainer)[0]["objective/scores"]
    assert found == pytest.approx(window.per_row["scores"][rows[trained].unique()].mean().item(), rel=1e-12)
    assert any(gradient.any() for gradient in keep.steps[0].values())


def test_kl_that_explodes_stops_the_run(tmp_path):
    settings = {**SHORT, "max_steps": 40, "learning_rate": 30.0, "optim": "sgd", "max_kl_per_token": 2.0}
    trainer, _ = make(folder=tmp_path, save_strategy="steps", save_steps=1, **settings)
    with pytest.raises(
        FloatingPointError, match=r"max_kl_per_token=2.0, got .* Go on from one with a lower learning_rate"
    ):
        trainer.train()
    assert list(tmp_path.glob("checkpoint-*"))


def test_checkpoint_and_saved_model(tmp_path):
    trainer, _ = run(folder=tmp_path, save_strategy="steps", save_steps=1, **SHORT)
    trainer.save_model(str(tmp_path / "final"))
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    expected = trainer.model.policy.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())
    assert not (tmp_path / "final" / "value_model").exists()
    value = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2" / "value_model")
    expected = trainer.model.value_model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in value.state_dict().items())
    assert (tmp_path / "checkpoint-1" / "rollout_0.safetensors").is_file()
    assert not (tmp_path / "checkpoint-2" / "rollout_0.safetensors").exists()  # the batch is done with


def test_resuming_without_the_rollouts_is_asked_for_and_said(tmp_path, caplog):
    make(folder=tmp_path, save_strategy="steps", save_steps=1, **SHORT)[0].train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "rollout_0.safetensors").unlink()
    trainer, _ = make(folder=tmp_path, **SHORT)
    with pytest.raises(CheckpointError, match=r"rollout_0\.safetensors is missing"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    trainer, _ = make(folder=tmp_path, resume_without=["progress"], **SHORT)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step > 1
    assert "holds no rollouts that fit" in caplog.text


def test_value_model_of_the_policy_starts_at_zero():
    trainer, keep = run(value_model=None, **SHORT)
    assert trainer.model.value_model.config.num_labels == 1
    assert keep.steps[0]["value_model.score.weight"].any()
    assert trainer.model.value_model is not trainer.model.policy
    fresh, _ = make(value_model=None)
    window = fresh.make_rollout_batch(0)
    assert not window.per_token["values"].any()


def test_sample_table_and_evaluation(capsys, caplog):
    trainer, _ = make(eval_dataset=prompts(3), num_sample_generations=2, eval_strategy="steps", eval_steps=1, **SHORT)
    before = torch.random.get_rng_state()
    table = trainer.generate_completions()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert list(table.columns) == ["query", "model response", "score"] and len(table) == 6
    assert "model response" in capsys.readouterr().out
    assert len(trainer.generate_completions(sampling=True)) == 6  # one batch of eight holds all
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_objective/scores" in entry]
    assert len(evaluations) == 2
    assert {f"eval_objective/{name}" for name in ("kl", "entropy", "rlhf_reward", "non_score_reward")} <= set(
        evaluations[0]
    )


def test_text_and_messages(tmp_path):
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    words.chat_template = (
        "{% for m in messages %}{{ 'w3 ' + m['content'] }}{% endfor %}{% if add_generation_prompt %} w4{% endif %}"
    )
    seen = {}

    def look(prompts, completions, answer, trainer_state, **_):
        seen.setdefault("rows", []).extend(zip(prompts, completions, answer, strict=True))
        return [0.0] * len(prompts)

    args = PPOConfig(str(tmp_path), **{**SETTINGS, **{k: v for k, v in SHORT.items() if k != "dtype"}, "missing_eos_penalty": None, "stop_token": None})  # fmt: skip
    chat = Dataset.from_list([{"prompt": [{"role": "user", "content": f"w{n}"}], "answer": n} for n in (7, 8)])
    trainer = PPOTrainer(args, words, tiny_model("gpt2"), None, None, chat, None, reward_funcs=look, eval_dataset=None)
    trainer.train()
    assert trainer.train_dataset["input_ids"][:] == [[3, 7, 4], [3, 8, 4]]
    prompt, completion, answer = seen["rows"][0]
    assert prompt[0]["content"] == f"w{answer}" and completion[0]["role"] == "assistant"
    assert len({row[1][0]["content"] for row in seen["rows"]}) > 4
    text = Dataset.from_dict({"prompt": ["w5 w6", "w7"], "answer": [1, 2]})
    trainer = PPOTrainer(args, words, tiny_model("gpt2"), None, None, text, None, reward_funcs=look)
    assert trainer.train_dataset["input_ids"][:] == [[5, 6], [7]]


def test_a_reward_model_with_another_tokenizer_reads_the_text(caplog, tmp_path):
    other = tokenizer()
    other.add_tokens(["w99"])
    args = PPOConfig(str(tmp_path), **{**SETTINGS, **{k: v for k, v in SHORT.items() if k != "dtype"}})
    trainer = PPOTrainer(
        args, tokenizer(), tiny_model("gpt2"), None, tiny_classifier("gpt2", num_labels=1), prompts(), None,
        reward_processing_classes=other, data_collator=DataCollatorWithPadding(tokenizer()),
    )  # fmt: skip
    trainer.train()
    assert caplog.text.count("has another tokenizer than the policy") == 1


def test_without_a_stop_token_responses_have_their_full_length():
    trainer, _ = make(stop_token=None, missing_eos_penalty=1.0)
    window = trainer.make_rollout_batch(0)
    assert window.completions.lengths.unique().tolist() == [7]
    plain, _ = make(stop_token=None, missing_eos_penalty=None)
    end = trainer.processing_class.eos_token_id
    has = torch.tensor([end in row.tolist() for row in window.completions.split()])
    assert has.any() and not has.all()
    assert torch.allclose(plain.make_rollout_batch(0).per_row["scores"] - window.per_row["scores"], 1.0 - has.double())
