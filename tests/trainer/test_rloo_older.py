"""RLOO as programs of 0.9-0.21 call it: settings, defaults, order of arguments, and the numbers of that version."""

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser

from tests.tiny import tiny_classifier, tiny_model
from tests.trainer.grpo_runs import END, prompts
from tests.trainer.one_step import KeepGradients
from tests.trainer.resume_worker import tokenizer
from trl import RLOOConfig, RLOOTrainer, TrlParser
from trl.rewards import ModelSource
from trl.rollouts.experience import ADVANTAGE, REWARD, SCORES

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

RUN = {
    "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False, "seed": 11, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
}  # fmt: skip
OLDER = {
    **RUN, "rloo_k": 4, "num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.3, "cliprange": 0.1, "response_length": 7,
    "total_episodes": 20, "stop_token": "eos", "missing_eos_penalty": 0.5, "learning_rate": 0.01,
}  # fmt: skip


def config(folder: Any = "out", **settings: Any) -> RLOOConfig:
    return RLOOConfig(str(folder), **{**OLDER, **settings})


def parts(*, double: bool = True) -> dict[str, Any]:
    """The arguments of an older program, by name: its reference is another model than the policy."""
    dtype, words = torch.float64 if double else torch.float32, tokenizer()
    words.eos_token = END
    return {
        "processing_class": words,
        "policy": tiny_model("gpt2", dtype=dtype),
        "ref_policy": tiny_model("gpt2", dtype=dtype, seed=1),
        "reward_model": tiny_classifier("gpt2", dtype=dtype, num_labels=1, seed=2),
        "train_dataset": prompts(),
    }


def built(args: RLOOConfig, **changes: Any) -> Any:
    return RLOOTrainer(config=args, **{**parts(), **changes})


# ---- settings


def test_the_defaults_of_that_time():
    """With one setting of 0.21, those that are left out have its defaults; what a program sets is kept, also if it is today's
    default."""
    with pytest.warns(FutureWarning) as caught:
        args = RLOOConfig("out", use_cpu=True, rloo_k=2)
    text = " ".join(str(each.message) for each in caught)
    names = (
        "num_iterations",
        "max_completion_length",
        "temperature",
        "learning_rate",
        "max_prompt_length",
        "disable_dropout",
    )
    assert [getattr(args, name) for name in names] == [4, 53, 0.7, 5e-5, None, True]
    assert (args.num_generations, args.beta, args.epsilon, args.normalize_advantages) == (2, 0.05, 0.2, False)
    assert (args.num_sample_generations, args.local_rollout_forward_batch_size) == (10, 64)
    assert all(words in text for words in ("temperature=0.7", "learning_rate=5e-05", "max_completion_length=53"))
    kept = RLOOConfig(
        "out",
        use_cpu=True,
        rloo_k=2,
        temperature=1.0,
        learning_rate=1e-6,
        num_ppo_epochs=1,
        response_length=256,
    )
    assert [getattr(kept, name) for name in names[:4]] == [1, 256, 1.0, 1e-6]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        today = RLOOConfig("out", use_cpu=True)
    assert [getattr(today, name) for name in names] == [1, 256, 1.0, 1e-6, 512, False] and not today.is_older


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_command_line_of_an_older_script(parser, tmp_path):
    words = (
        f"--output_dir {tmp_path} --use_cpu true --num_ppo_epochs 1 --total_episodes 10000 --missing_eos_penalty 1.0"
    )
    words += " --learning_rate 3e-6 --sft_model_path mine --local_rollout_forward_batch_size 16"
    (args,) = parser((RLOOConfig,)).parse_args_into_dataclasses(words.split())
    assert (args.num_iterations, args.temperature, args.learning_rate, args.max_completion_length) == (
        1,
        0.7,
        3e-6,
        53,
    )
    assert (args.sft_model_path, args.reward_model_path) == ("mine", "EleutherAI/pythia-160m")
    (args,) = parser((RLOOConfig,)).parse_args_into_dataclasses([*words.split(), "--temperature", "1.0"])
    assert args.temperature == 1.0


def test_sizes_and_episodes(tmp_path):
    """Episodes are completions; a batch of them is learned from in `num_mini_batches` steps, `num_ppo_epochs` times."""
    trainer = built(config(tmp_path))
    names = (
        "batch_size",
        "local_batch_size",
        "mini_batch_size",
        "local_mini_batch_size",
        "micro_batch_size",
        "num_total_batches",
    )
    assert [getattr(trainer.args, name) for name in names] == [
        16,
        16,
        8,
        8,
        4,
        2,
    ]  # 20 episodes in batches of 16
    assert (trainer.args.total_episodes, trainer.args.max_steps) == (20, 2 * 2 * 2)
    assert trainer.sizes.rows == 16 and trainer.sizes.prompts == 4
    whole = built(config(tmp_path, total_episodes=None, num_train_epochs=2))
    assert (whole.args.total_episodes, whole.args.num_total_batches) == (28, 2)  # of 14 prompts
    limited = built(config(tmp_path, total_episodes=None, max_steps=5))
    assert (limited.args.max_steps, limited.args.num_total_batches) == (5, 2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"whiten_rewards": True}, "whiten_rewards must be False"),
        ({"stop_token_id": 5}, "cannot be combined"),
        ({"stop_token": "newline"}, "stop_token"),
        ({"total_episodes": 0}, "total_episodes"),
    ],
)
def test_settings_that_are_refused(settings, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        config(tmp_path, **settings)


def test_calls_that_are_refused(tmp_path):
    given = parts()
    with pytest.raises(ValueError, match="share weights that train"):
        built(config(tmp_path), policy=given["policy"], ref_policy=given["policy"])
    with pytest.raises(TypeError, match="each once"):
        RLOOTrainer(config(tmp_path), *given.values(), train_dataset=prompts())
    with pytest.raises(TypeError, match="batch_size"):
        config(tmp_path, batch_size=16)


# ---- the run


def steps(trainer: Any) -> tuple[list[Any], list[float]]:
    keep = KeepGradients()
    trainer.add_callback(keep)
    trainer.train()
    return keep.steps, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def today(folder: Any, **changes: Any) -> Any:
    """The same run in the words of today."""
    given = parts()
    words = given["processing_class"]
    args = RLOOConfig(
        str(folder), **RUN, num_generations=4, num_iterations=2, steps_per_generation=4, beta=0.3, epsilon=0.1, learning_rate=0.01,
        max_completion_length=7, max_steps=8, temperature=0.7, max_prompt_length=None, disable_dropout=True,
    )  # fmt: skip
    source = ModelSource(given["reward_model"], read="ids", policy_tokenizer=words)

    def missing_end(completion_ids, **_):
        return [-0.5 * (words.eos_token_id not in ids) for ids in completion_ids]

    return RLOOTrainer(
        given["policy"], [source, missing_end], args, given["train_dataset"], processing_class=words,
        ref_model=given["ref_policy"], **changes,
    )  # fmt: skip


def test_every_way_to_call_it_makes_the_same_run(tmp_path):
    args = config(tmp_path)
    expected = steps(today(tmp_path))
    calls = {
        "by name": lambda given: RLOOTrainer(config=args, **given),
        "tokenizer": lambda given: RLOOTrainer(args=args, tokenizer=given.pop("processing_class"), **given),
        "in order": lambda given: RLOOTrainer(args, *given.values(), None, None, (None, None), None),
        "both": lambda given: RLOOTrainer(args, *list(given.values())[:4], train_dataset=given["train_dataset"]),
    }
    for name, call in calls.items():
        given = parts()
        gradients, losses = steps(call(given))
        assert len(gradients) == 8 and losses == pytest.approx(expected[1], abs=1e-9), name
        for found, other in zip(gradients, expected[0], strict=True):
            torch.testing.assert_close(found, other, rtol=1e-9, atol=1e-9, msg=name)


def logps(model: Any, prompt: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


@pytest.mark.parametrize("stop", [{}, {"stop_token": None}, {"stop_token": None, "stop_token_id": 5}])
def test_advantages_have_the_kl_penalty_in_the_reward(stop, tmp_path):
    """score - penalty without an end token - kl_coef * sum(log p - log p_ref), less the mean of the other completions of the prompt;
    log-probs at the temperature of sampling."""
    trainer = built(config(tmp_path, **stop))
    policy, reference, model = (
        copy.deepcopy(trainer.model),
        trainer.ref_model,
        trainer.rewards.models[0].model,
    )
    batch = trainer.make_rollout_batch(0)
    end, rewards, scores = trainer._tokenizer.eos_token_id, [], []
    stops = {5} if "stop_token_id" in stop else {end} if not stop else set()
    with torch.no_grad():
        for prompt, ids in zip(batch.prompts.split(), batch.completions.split(), strict=True):
            hidden = model.transformer(torch.cat([prompt, ids])[None]).last_hidden_state[0, -1]
            ended = end in ids.tolist() or (bool(stops) and int(ids[-1]) in stops)
            scores.append(float(model.score(hidden)) - 0.5 * (not ended))
            kl = (logps(policy, prompt, ids, 0.7) - logps(reference, prompt, ids, 0.7)).sum()
            rewards.append(scores[-1] - 0.3 * float(kl))
            assert len(ids) == 7 or int(ids[-1]) in stops
            assert not stops & set(ids[:-1].tolist())
    rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, 4)
    expected = rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / 3
    torch.testing.assert_close(batch.per_row[SCORES].double(), torch.tensor(scores).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.per_row[REWARD].double(), rewards.flatten(), rtol=0, atol=1e-6)
    torch.testing.assert_close(batch.per_row[ADVANTAGE].double(), expected.flatten(), rtol=0, atol=1e-6)


def test_a_reward_function_reads_whole_texts(tmp_path):
    texts: list[str] = []

    def even(rows):
        texts.extend(rows)
        return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / len(text.split()) for text in rows]

    trainer = built(config(tmp_path, missing_eos_penalty=None), reward_model=even)
    batch = trainer.make_rollout_batch(0)
    words = trainer._tokenizer
    rows = [torch.cat(pair).tolist() for pair in zip(batch.prompts.split(), batch.completions.split(), strict=True)]
    assert texts == words.batch_decode(rows, skip_special_tokens=True)
    torch.testing.assert_close(
        batch.per_row[SCORES].double(), torch.tensor(even(list(texts))).double(), rtol=0, atol=1e-6
    )
    assert list(trainer.rewards.names) == ["even"]


def test_without_a_penalty_the_reference_has_no_effect(tmp_path):
    args = config(tmp_path, kl_coef=0.0)
    with pytest.warns(FutureWarning, match="ref_policy -> the argument ref_model") as caught:
        trainer = RLOOTrainer(config=args, **parts())
    assert trainer.reference is None
    assert [each.filename for each in caught if "ref_policy" in str(each.message)] == [__file__]


def test_samples_of_evaluation_prompts(tmp_path, capsys):
    """A table of greedy responses, `num_sample_generations` times over the run, and whole on request: each prompt once."""
    trainer = built(config(tmp_path, num_sample_generations=2, total_episodes=64), eval_dataset=prompts(3))
    shown: list[bool] = []
    whole, trainer.generate_completions = (
        trainer.generate_completions,
        lambda sampling=False: shown.append(sampling),
    )
    trainer.train()
    assert shown == [True, True]  # of four batches
    table = whole()
    assert list(table.columns) == ["query", "model response", "score"] and len(table) == 6
    assert "model response" in capsys.readouterr().out


def test_settings_of_a_plain_config_are_those_of_that_time_in_an_older_call(tmp_path):
    args = RLOOConfig(str(tmp_path), **RUN, num_generations=4)
    assert not args.is_older
    trainer = built(args)
    assert (trainer.args.num_iterations, trainer.args.max_completion_length, trainer.args.temperature) == (
        4,
        53,
        0.7,
    )
    assert trainer.sampling.stop_token_ids == () and trainer.args.learning_rate == 5e-5
    assert args == dataclasses.replace(args)  # the program's own config stays as it is


@pytest.mark.slow
def test_it_learns(tmp_path):
    """A text reward for even words: the mean of the last batches exceeds that of the first ones."""

    def even(rows):
        return [sum(int(word[1:]) % 2 == 0 for word in text.split()[-6:]) / 6 for text in rows]

    settings = {
        "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "total_episodes": 16 * 40, "optim": "adamw_torch",
        "learning_rate": 5e-3, "kl_coef": 0.01, "stop_token": None, "missing_eos_penalty": None, "response_length": 6,
        "num_mini_batches": 1, "max_grad_norm": 1.0,
    }  # fmt: skip
    given = {
        **parts(double=False),
        "reward_model": even,
        "train_dataset": Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4}),
    }
    trainer = built(config(tmp_path, **settings), **given)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.25
