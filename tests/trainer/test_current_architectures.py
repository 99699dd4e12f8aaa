"""SFT, DPO, GRPO and RLOO on a tiny model of each of the current families, as a user runs them."""

import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from tests.agents.tool_words import call_tokenizer
from tests.architectures import CURRENT, model_of
from tests.trainer import grpo_agent_runs
from tests.trainer.dpo_runs import pairs
from tests.trainer.grpo_runs import even_tokens, prompts
from tests.trainer.one_step import KeepGradients
from tests.trainer.resume_worker import ending, rows, tokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)  # fmt: skip
from trl.models.parts import CACHE

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "gradient_checkpointing": False, "seed": 11,
}  # fmt: skip
VOCABULARY = 64  # tokens of the tokenizer
# Biases of routers are float32 in the published files, too; from transformers 5.24 on their weights are.
IN_FLOAT32 = ("e_score_correction_bias", *((".gate.weight",) if CACHE == "cache" else ()))


def tiny(model_type: str, **settings: Any) -> Any:
    return model_of(model_type, vocab_size=VOCABULARY, **settings)


def trained(trainer: Any, **settings: Any) -> Any:
    trainer.train(**settings)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def sft(model: Any, folder: Any, data: list[dict[str, Any]], **settings: Any) -> Any:
    """A trainer whose callback `keep` holds the gradients of every step."""
    args = SFTConfig(str(folder), **{**SETTINGS, **settings})
    keep = KeepGradients()
    trainer: Any = SFTTrainer(
        model, args, train_dataset=Dataset.from_list(data), processing_class=tokenizer(), callbacks=[keep]
    )
    trainer.keep = keep
    return trainer


@pytest.mark.parametrize("model_type", CURRENT)
def test_sft_learns_and_resumes_to_the_same_bits(model_type, tmp_path):
    """Two epochs of five packed rows in batches of two; resumed in the second epoch, by a model with other weights."""
    settings = {
        "packing": True, "max_length": 24, "per_device_train_batch_size": 2, "num_train_epochs": 2,
        "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    whole = trained(sft(tiny(model_type), tmp_path, rows(14), **settings))
    losses = logged(whole, "loss")
    assert len(whole.train_dataset) == 5 and len(losses) == 6
    assert sum(losses[3:]) < sum(losses[:3]) - 0.5
    resumed = sft(tiny(model_type, seed=1), tmp_path, rows(14), **settings)
    trained(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert ending(resumed) == ending(whole)


def plain_loss(model: Any, ids: torch.Tensor) -> float:
    """The sum over the tokens of one row."""
    return cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="sum").item()


@pytest.mark.parametrize("model_type", CURRENT)
def test_rows_that_came_padded_are_trained_without_their_padding(model_type, tmp_path):
    """Two batches, the last one not full, and one of packed rows, have the mean loss of plain forwards of single rows."""
    model, data = tiny(model_type), rows(5)
    with torch.no_grad():
        losses = [plain_loss(model, torch.tensor(row["input_ids"])) for row in data]
    lengths = [len(row["input_ids"]) for row in data]

    def mean(begin: int, end: int) -> float:
        return sum(losses[begin:end]) / (sum(lengths[begin:end]) - (end - begin))

    def padded(ids: list[int]) -> dict[str, list[int]]:
        left, right = 2, 12 - len(ids)
        mask = [0] * left + [1] * len(ids) + [0] * right
        return {"input_ids": [5] * left + ids + [5] * right, "attention_mask": mask}

    padded_rows = [padded(row["input_ids"]) for row in data]
    settings = {"learning_rate": 0.0, "num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    batches = trained(sft(model, tmp_path, padded_rows, per_device_train_batch_size=3, **settings))
    assert logged(batches, "loss") == pytest.approx([mean(0, 3), mean(3, 5)], abs=1e-4)
    packed = trained(sft(model, tmp_path, padded_rows, packing=True, max_length=24, **settings))
    assert len(packed.train_dataset) < 5
    assert logged(packed, "loss") == pytest.approx([mean(0, 5)], abs=1e-4)


@pytest.mark.parametrize("model_type", CURRENT)
def test_a_bfloat16_model_loaded_by_name_moves_every_weight_that_has_a_gradient(model_type, tmp_path):
    tiny(model_type, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    trainer = sft(str(tmp_path / "saved"), tmp_path / "run", rows(8), learning_rate=1e-6, max_steps=1)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    trained(trainer)
    gradients, after = trainer.keep.steps[0], dict(trainer.model.named_parameters())
    assert sum(int((gradient != 0).sum()) for gradient in gradients.values()) > 10_000
    for name, gradient in gradients.items():
        stuck = (gradient.abs() > 1e-6) & (after[name] == before[name])
        assert not stuck.any(), name
    trainer.save_model()
    weights = load_file(tmp_path / "run" / "model.safetensors")
    wide = {name for name, part in weights.items() if part.dtype != torch.bfloat16}
    assert all(name.endswith(IN_FLOAT32) for name in wide)


@pytest.mark.parametrize("model_type", CURRENT)
def test_dpo_learns_and_resumes_to_the_same_bits(model_type, tmp_path):
    """Two epochs of eight pairs in batches of three; resumed in the second epoch, by a model with other weights."""

    def dpo(seed: int) -> Any:
        saves = {"save_strategy": "steps", "save_steps": 4}
        args = DPOConfig(str(tmp_path), per_device_train_batch_size=3, num_train_epochs=2, **{**SETTINGS, **saves})
        data, reference = Dataset.from_list(pairs()), tiny(model_type)
        return DPOTrainer(
            tiny(model_type, seed=seed), reference, args, train_dataset=data, processing_class=tokenizer()
        )

    whole = trained(dpo(0))
    losses = logged(whole, "loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert sum(losses[3:]) < 0.5 * sum(losses[:3])
    assert ending(trained(dpo(1), resume_from_checkpoint=str(tmp_path / "checkpoint-4"))) == ending(whole)


def group(method: str, model: Any, folder: Any, **settings: Any) -> Any:
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[method]
    data, reward = settings.pop("data", None), settings.pop("reward", even_tokens)
    defaults = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 3}
    args = config_class(str(folder), **{**SETTINGS, **defaults, **settings})
    return trainer_class(
        model, reward_funcs=reward, args=args, train_dataset=prompts() if data is None else data,
        processing_class=tokenizer(),
    )  # fmt: skip


@pytest.mark.parametrize(("method", "model_type"), [*(("grpo", each) for each in CURRENT), ("rloo", CURRENT[0])])
def test_grpo_and_rloo_run(method, model_type, tmp_path):
    """Rollouts and scoring are the same of both. Resumed from the second step, too, by a model with other weights (and without a reference, which would have them)."""
    settings = {"save_strategy": "steps", "save_steps": 2, "beta": 0.0}
    whole = trained(group(method, tiny(model_type), tmp_path, **settings))
    assert all(math.isfinite(loss) for loss in logged(whole, "loss"))
    assert all(norm > 0 for norm in logged(whole, "grad_norm"))
    resumed = group(method, tiny(model_type, seed=1), tmp_path, **settings)
    assert ending(trained(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))) == ending(whole)


@pytest.mark.parametrize("model_type", CURRENT)
def test_online_dpo_runs(model_type, tmp_path):
    settings = {"per_device_train_batch_size": 6, "max_new_tokens": 6, "max_steps": 2, "num_generations": 2}
    args = OnlineDPOConfig(str(tmp_path), **{**SETTINGS, **settings, "learning_rate": 0.0})
    trainer: Any = OnlineDPOTrainer(
        tiny(model_type), reward_funcs=even_tokens, args=args, train_dataset=prompts(), processing_class=tokenizer()
    )
    for loss in logged(trained(trainer), "loss"):  # the mean of log(2) over the three pairs, 0 for those that are alike
        assert min(abs(loss - math.log(2) * pairs / 3) for pairs in (1, 2, 3)) < 1e-4
    assert all(norm > 0 for norm in logged(trainer, "grad_norm"))


@pytest.mark.parametrize("model_type", CURRENT)
def test_agents_run(model_type):
    """Sessions of two rounds with calls of tools."""
    words = call_tokenizer()
    model = model_of(model_type, vocab_size=len(words))
    model.generation_config.eos_token_id = words.convert_tokens_to_ids(["</s>", "yes", "no", "hi", "?", "3"])
    trainer, keep = grpo_agent_runs.trained(dtype="float32", given={"model": model}, max_steps=1)
    assert logged(trainer, "completions/mean_length")[0] > 2  # two rounds of at least one token
    assert logged(trainer, "reward_std")[0] > 0
    sizes = [gradient.abs().sum().item() for gradient in keep.steps[0].values()]
    assert all(map(math.isfinite, sizes)) and sum(sizes) > 0


def is_sum(prompt_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """1 for the token of the sum of the prompt's digits; digits are the tokens from 3."""
    return [float(ids[0] - 3 == sum(prompt) - 6) for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]


@pytest.mark.parametrize("model_type", ["gpt_oss", "lfm2", "nemotron_h"])
def test_grpo_learns_sums(model_type, tmp_path):
    """From a model that was fine-tuned on answers of which 3 in 7 are right, in 12 steps to nearly always."""
    sums = [(3 + a, 3 + b) for a in range(3) for b in range(3)]
    answers = [
        {"input_ids": [a, b, digit], "completion_mask": [0, 0, 1]}
        for a, b in sums
        for digit in (*range(3, 8), a + b - 3, a + b - 3)
    ]
    model = tiny(model_type)
    trained(sft(model, tmp_path / "sft", answers, per_device_train_batch_size=63, max_steps=15))
    trainer = group(
        "grpo", model, tmp_path / "grpo", data=Dataset.from_list([{"input_ids": list(pair)} for pair in sums]),
        reward=is_sum, per_device_train_batch_size=72, num_generations=8, max_completion_length=1, max_steps=12,
    )  # fmt: skip
    rewards = logged(trained(trainer), "reward")
    assert rewards[0] < 0.6
    assert sum(rewards[-3:]) / 3 > 0.85
