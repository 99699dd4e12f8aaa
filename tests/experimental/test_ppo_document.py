"""The dataset-level PPO as its document (003) shows it, and what can go wrong around it without a word."""

import copy
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM

from tests.experimental.ppo_runs import END, make, prompts, run, run_with_models
from tests.experimental.ppo_sharded import KINDS, SETTINGS
from tests.tiny import tiny_classifier, tiny_model
from tests.trainer.resume_worker import tokenizer
from tests.two_processes import launch, need_deepspeed

SHORT = {"dtype": "float32", "max_steps": 2, "num_ppo_epochs": 1, "per_device_train_batch_size": 4}


def words(**special):
    """A tokenizer of words; `special` are its end and padding tokens."""
    found = tokenizer()
    found.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    for name, token in {"eos_token": END, **special}.items():
        setattr(found, name, token)
    return found


def test_the_quick_test_of_the_document(tmp_path, monkeypatch, capsys):
    """Its command line, word for word but for names and sizes."""
    for name, model in {"policy": tiny_model("gpt_neox"), "reward": tiny_classifier("gpt_neox", num_labels=1)}.items():  # fmt: skip
        model.save_pretrained(tmp_path / name)
        words().save_pretrained(tmp_path / name)
    rows = [{"prompt": f"w{n % 9 + 3} w{n % 7 + 20}", "chosen": [{"role": "user", "content": "w3"}]} for n in range(30)]  # fmt: skip
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = (
        f"ppo.py --dataset_name {tmp_path}/data --dataset_train_split train --learning_rate 3e-6 --num_ppo_epochs 1 "
        f"--num_mini_batches 1 --output_dir {tmp_path}/out --per_device_train_batch_size 8 --gradient_accumulation_steps 1 "
        f"--total_episodes 16 --model_name_or_path {tmp_path}/policy --sft_model_path {tmp_path}/policy "
        f"--reward_model_path {tmp_path}/reward --missing_eos_penalty 1.0 --use_cpu --report_to none --response_length 5"
    )
    monkeypatch.setattr(sys, "argv", line.split())
    runpy.run_path("examples/scripts/ppo/ppo.py", run_name="__main__")
    shown = capsys.readouterr().out
    assert "query" in shown and "model response" in shown and "score" in shown and "w3 w26" in shown
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_reward_model_scores_the_last_token_though_padding_is_the_end_token(kind):
    reward_model = tiny_classifier(kind, dtype=torch.float64, num_labels=1, seed=8)
    trainer, _ = make(
        architecture=kind, reward_model=reward_model, reward_funcs=None, missing_eos_penalty=None, local_rollout_forward_batch_size=3,
    )  # fmt: skip
    end = trainer.processing_class.eos_token_id
    reward_model.config.pad_token_id = trainer.processing_class.pad_token_id = end
    window = trainer.make_rollout_batch(0)
    assert window.completions.lengths.unique().numel() > 1
    scores = zip(window.prompts.split(), window.completions.split(), window.per_row["scores"], strict=True)
    for prompt, completion, score in scores:
        with torch.no_grad():
            hidden = reward_model.base_model(torch.cat([prompt, completion])[None]).last_hidden_state[0, -1]
            assert reward_model.score(hidden).item() == pytest.approx(score.item(), abs=1e-6)


def test_a_push_leaves_the_value_model_at_home(tmp_path, monkeypatch):
    pushed = {}
    trainer, _ = run(folder=tmp_path, save_strategy="steps", save_steps=2, **SHORT)
    hub = SimpleNamespace(upload_folder=lambda **given: pushed.update(given))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: hub)
    monkeypatch.setattr(trainer, "init_hf_repo", lambda *_, **__: setattr(trainer, "hub_model_id", "me/it"))
    trainer.push_to_hub()
    assert pushed["folder_path"] == str(tmp_path)
    assert (tmp_path / "model.safetensors").is_file() and not (tmp_path / "value_model").exists()
    assert (tmp_path / "checkpoint-2" / "value_model").is_dir()


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["c_attn", "wte"]),
        LoraConfig(r=2, target_modules=["c_fc"], modules_to_save=["ln_f"]),
        IA3Config(target_modules=["c_attn"], feedforward_modules=[]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=["lora", "lora-and-whole-layers", "ia3", "prompt"],
)
def test_a_value_model_is_made_of_a_policy_with_any_adapter(config):
    base = tiny_model("gpt2")
    trainer, _ = make(copy.deepcopy(base), value_model=None, dtype="float32", peft_config=config)
    found, expected = trainer.model.value_model.base_model.state_dict(), base.base_model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_value_models_that_cannot_read_the_responses():
    with pytest.raises(ValueError, match=r"value_model knows 40 tokens, the policy's tokenizer 6[0-9]"):
        make(value_model=tiny_classifier("gpt2", num_labels=1, vocab_size=40))
    with pytest.raises(TypeError, match="model is a GPT2LMHeadModel, expected a value model"):
        make(value_model=tiny_model("gpt2"))


def test_models_with_a_shorter_window_than_the_rollouts():
    """The longest prompt has 8 tokens, a response 7."""
    with pytest.raises(ValueError, match=r"value_model has positions for 14 tokens, .* may have 15"):
        make(value_model=tiny_classifier("gpt2", num_labels=1, max_position_embeddings=14))
    with pytest.raises(ValueError, match=r"ref_model has positions for 14 tokens, .*response_length is 7\)"):
        make(ref_model=tiny_model("llama", max_position_embeddings=14))
    long = Dataset.from_dict({"input_ids": [[5] * 12]})
    with pytest.raises(ValueError, match="may have 19 "):
        make(
            value_model=tiny_classifier("llama", num_labels=1, max_position_embeddings=18),
            eval_dataset={"long": long},
        )
    short = tiny_model("gpt2", max_position_embeddings=14)  # whose responses end there
    make(short, value_model=tiny_classifier("gpt2", num_labels=1, max_position_embeddings=14))


def test_each_source_has_a_mean_of_its_own():
    """Over the rows on which it has an opinion; the score is their weighted sum."""

    def length(completion_ids, **_):
        return [float(len(ids)) for ids in completion_ids]

    def first_rows(completion_ids, **_):
        return [1.0 if row < 2 else None for row in range(len(completion_ids))]

    trainer, _ = make(reward_funcs=[length, first_rows], reward_weights=[2.0, 3.0], missing_eos_penalty=None, **SHORT)
    trainer.train()
    entry = trainer.state.log_history[0]
    lengths = trainer._rollout_batch.completions.lengths.double()
    assert trainer.state.global_step == 2
    assert entry["rewards/first_rows/mean"] == 1
    assert entry["rewards/length/mean"] == pytest.approx(float(lengths.mean()))
    expected = 2 * float(lengths.mean()) + 3 * 2 / len(lengths)
    assert entry["objective/scores"] == pytest.approx(expected)
    assert "eval_rewards/length/mean" in trainer.evaluate(prompts(2))


def test_columns_that_a_function_lacks_are_named_before_the_first_rollout():
    def wants(completions, answer, **_):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"'wants' needs .*answer.*the data set has the columns \[\]"):
        make(reward_funcs=wants)
    answered = prompts().add_column("answer", list(range(len(prompts()))))
    with pytest.raises(ValueError, match=r"'wants' needs .*answer"):
        make(data=answered, reward_funcs=wants, eval_dataset={"with": answered, "without": prompts(2)})
    make(data=answered, reward_funcs=wants, eval_dataset=answered)


def test_a_batch_of_which_one_row_has_a_score_trains_that_row_alone():
    """Micro-batches of one row, seven of them without a trained token: the gradient is that of one larger micro-batch."""

    def one(completion_ids, **_):
        return [None, 1.0, *[None] * (len(completion_ids) - 2)]

    settings = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 1, "reward_funcs": one}
    ones = run(per_device_train_batch_size=1, gradient_accumulation_steps=8, **settings)[1].steps[0]
    whole = run(per_device_train_batch_size=8, **settings)[1].steps[0]
    size = max(gradient.abs().max() for gradient in whole.values())
    assert size > 0
    assert all((ones[name] - gradient).abs().max() <= 1e-12 * size for name, gradient in whole.items())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", KINDS)
def test_sharded_runs_equal_that_of_one_process(how, tmp_path):
    """Three optimiser steps over two batches of rollouts, with a function and a reward model, on two processes."""
    need_deepspeed(how)
    launch("tests.experimental.ppo_sharded", str(tmp_path), how)
    single, _ = run_with_models(**SETTINGS)
    expected = single.model.policy.state_dict()
    found = load_file(tmp_path / "model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5, msg=name)
    first = tiny_model("llama").state_dict()
    assert max((weight - first[name]).abs().max() for name, weight in found.items()) > 1e-3
    history = json.loads((tmp_path / "log.json").read_text())
    for one, other in zip(history[:-1], single.state.log_history[:-1], strict=True):
        assert one.keys() == other.keys()
        for name in other.keys() - {"eps"}:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-4), name


def test_the_best_policy_is_loaded_at_the_end(tmp_path):
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_objective/scores", "greater_is_better": True}
    trainer, _ = make(folder=tmp_path, eval_dataset=prompts(5), **steps, **best)
    trainer.train()
    saved = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    policy = trainer.model.policy.state_dict()
    assert all(torch.equal(policy[name], weight) for name, weight in saved.items())
