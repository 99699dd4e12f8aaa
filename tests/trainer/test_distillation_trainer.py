"""Distillation on the student's own completions: the exact divergence, the teacher as advantages, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import BitsAndBytesConfig

from tests.tiny import tiny_model
from tests.trainer.grpo_runs import logs, make, run
from trl import DistillationConfig, DistillationTrainer, GRPOConfig
from trl.experimental.minillm import MiniLLMConfig
from trl.objectives.distillation import discounted_advantages, divergence
from trl.rollouts.experience import ADVANTAGE, TRAINED, Experience

ONE = {"max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 4}


def of(method: str, **settings: Any) -> tuple[Any, Any]:
    return run(method, **{**ONE, "teacher": "llama", "beta": 0.0, **settings})


def batch_of(trainer: Any) -> Experience:
    return trainer._rollout_batch


def distributions(model: Any, experience: Experience, temperature: float) -> Tensor:
    """The logits that predict the completion tokens, row by row from the model's own forward."""
    found = []
    for prompt, completion in zip(experience.prompts.split(), experience.completions.split(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        found.append(logits[len(prompt) - 1 : -1] / temperature)
    return torch.cat(found)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_the_mean_divergence_at_the_completion_tokens(beta: float) -> None:
    student, teacher = (tiny_model(name, dtype=torch.float64) for name in ("gpt2", "llama"))
    trainer, _ = of("distillation", beta=beta, temperature=1.3)
    rows = batch_of(trainer)
    own, theirs = (distributions(model, rows, 1.3) for model in (student, teacher))
    (log,) = logs(trainer)
    assert log["loss"] == pytest.approx(divergence(own, theirs, beta=beta).mean().item(), rel=1e-6)
    logps = own.log_softmax(-1)
    assert log["entropy"] == pytest.approx(-(logps.exp() * logps).sum(-1).mean().item(), rel=1e-9)
    assert log["completions/mean_length"] == rows.completions.lengths.double().mean().item()
    assert not any(name.startswith("reward") for name in log)
    assert log["tokens/trained"] == len(rows.completions.values)


def test_a_student_like_its_teacher_learns_nothing() -> None:
    trainer, keep = of("distillation", architecture="llama", beta=0.5)
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-14
    assert max(gradient.abs().max() for gradient in keep.steps[0].values()) < 1e-12


@pytest.mark.parametrize("sizes", [(96, 80), (80, 96)])
@pytest.mark.parametrize(
    ("method", "settings"),
    [("distillation", {}), ("grpo", {"teacher_kl_coef": 0.5}), ("minillm", {"gamma": 1.0})],
)
def test_models_may_have_other_numbers_of_unused_embeddings(
    method: str, settings: Any, sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    student, teacher = (
        tiny_model(name, vocab_size=size, dtype=torch.float64)
        for name, size in zip(("gpt2", "llama"), sizes, strict=True)
    )
    given = {"model": student, "teacher_model": teacher}
    trainer, _ = run(method, **ONE, beta=0.0, **settings, given=dict(given))
    assert caplog.text.count(f"{sizes[0]} and {sizes[1]} tokens") == 1
    rows = batch_of(trainer)
    assert rows.completions.values.max() < 80
    assert trainer.sampler_is_exact == (sizes[0] == 80)  # others are drawn without the tokens that the teacher lacks
    assert all(math.isfinite(each["loss"]) for each in logs(trainer))
    if sizes[0] == 96:
        tokens = Dataset.from_list([{"input_ids": [5, 90]}] * 4)
        with pytest.raises(ValueError, match="90"):
            make(method, **ONE, **settings, data=tokens, given=dict(given))


def test_an_adapter_learns_from_its_base() -> None:
    from peft import LoraConfig

    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
    settings = {**ONE, "beta": 0.5, "architecture": "llama", "given": given}
    trainer, keep = run("distillation", **settings)
    rows = batch_of(trainer)
    base = distributions(tiny_model("llama", dtype=torch.float64), rows, 1.0)
    fresh, _ = make("distillation", **settings)
    own = distributions(fresh.model.eval(), rows, 1.0)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(
        divergence(own, base, beta=0.5).mean().item(), rel=1e-6
    )
    assert max(gradient.abs().max() for gradient in keep.steps[0].values()) > 1e-4


def test_an_evaluation_is_the_divergence_of_fresh_completions() -> None:
    trainer, _ = make("distillation", **{**ONE, "teacher": "llama", "beta": 1.0})
    found, again = (trainer.evaluate(trainer.train_dataset) for _ in range(2))
    assert found["eval_loss"] > 0.01 and found["eval_loss"] == again["eval_loss"]
    assert {"eval_entropy", "eval_completions/mean_length"} <= found.keys()


def test_a_teacher_beside_the_reward_adds_log_ratios_to_the_advantages() -> None:
    student, teacher = (tiny_model(name, dtype=torch.float64) for name in ("gpt2", "llama"))
    found = {coef: of("grpo", teacher_kl_coef=coef)[0] for coef in (0.5,)}
    plain = run("grpo", **ONE, beta=0.0)[0]
    rows = batch_of(found[0.5])
    logps = [
        distributions(model, rows, 1.0).log_softmax(-1).gather(1, rows.completions.values[:, None])[:, 0]
        for model in (student, teacher)
    ]
    gaps = logps[1] - logps[0]
    by_row = batch_of(plain).per_row[ADVANTAGE][rows.completions.row_index]
    assert torch.equal(rows.completions.values, batch_of(plain).completions.values)
    torch.testing.assert_close(rows.per_token[ADVANTAGE], by_row + 0.5 * gaps, rtol=1e-10, atol=1e-12)
    assert logs(found[0.5])[0]["teacher_kl"] == pytest.approx(-gaps.mean().item(), rel=1e-9)


def test_minillm_without_the_exact_part_is_grpo_with_a_teacher() -> None:
    same = {"teacher_kl_coef": 1.0, "loss_type": "dapo"}
    own, other = (
        of("minillm", single_step_decomposition=False, **same)[1],
        of("grpo", **same)[1],
    )
    assert own.steps[0].keys() == other.steps[0].keys()
    for name, gradient in own.steps[0].items():
        torch.testing.assert_close(gradient, other.steps[0][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_minillm_by_default_is_the_exact_reverse_kl_of_each_token(loss_type: str) -> None:
    """Without rewards and discount, whatever the policy loss is divided by: the gradient of distillation with beta = 1."""
    zero = {"reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids)}
    own = of("minillm", loss_type=loss_type, **zero)
    other = of("distillation", beta=1.0)
    for name, gradient in own[1].steps[0].items():
        torch.testing.assert_close(gradient, other[1].steps[0][name], rtol=1e-9, atol=1e-12)
    assert logs(own[0])[0]["teacher_kl"] == pytest.approx(logs(other[0])[0]["loss"], rel=1e-6)


def test_minillm_takes_the_discounted_log_ratios_of_later_tokens() -> None:
    trainer, _ = of("minillm", gamma=0.5, kd_temperature=2.0, scale_rewards="none")
    student, teacher = (tiny_model(name, dtype=torch.float64) for name in ("gpt2", "llama"))
    rows = batch_of(trainer)
    logps = [
        distributions(model, rows, 2.0).log_softmax(-1).gather(1, rows.completions.values[:, None])[:, 0]
        for model in (student, teacher)
    ]
    sums = discounted_advantages(
        logps[1] - logps[0], rows.completions.row_index, len(rows), gamma=0.5, normalize=True, skip=True
    )
    by_row = rows.per_row[ADVANTAGE][rows.completions.row_index]
    torch.testing.assert_close(rows.per_token[ADVANTAGE], by_row + sums, rtol=1e-9, atol=1e-12)
    assert rows.per_token[TRAINED].all()


def test_a_quantised_student_leaves_the_config_as_it_is(tmp_path: Any) -> None:
    args, rows = DistillationConfig(str(tmp_path), use_cpu=True), Dataset.from_dict({"prompt": ["a"]})
    with pytest.raises((OSError, ImportError)):  # without such a model, or without bitsandbytes
        DistillationTrainer(
            str(tmp_path / "nothing"), tiny_model("llama"), args, rows,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        )  # fmt: skip
    assert args.model_init_kwargs is None


def test_what_is_refused_before_the_first_step(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="teacher_model"):
        make("distillation", **ONE)
    several, address = dict.fromkeys("ab", tiny_model("llama")), "http://user:SECRET@127.0.0.1:9/v1"
    for method, settings in {"distillation": {}, "minillm": {}, "grpo": {"teacher_kl_coef": 1.0}}.items():
        for teacher in (several, json.dumps(dict.fromkeys("ab", address))):
            with pytest.raises(ValueError, match=r"several teachers, \['a', 'b'\], .*GKDTrainer"):
                make(method, **ONE, **settings, given={"teacher_model": teacher})
    with pytest.raises(ValueError, match=r'JSON object, got .{"a": "http://<REDACTED>@127'):
        make("distillation", **ONE, given={"teacher_model": f'{{"a": "{address}"'})
    for method, settings in {"minillm": {}, "grpo": {"teacher_kl_coef": 1.0}}.items():
        with pytest.raises(ValueError, match=r"^'http://<REDACTED>@127\.0\.0\.1:9/v1' is an address"):
            make(method, **ONE, **settings, given={"teacher_model": address})
    with pytest.raises(ValueError, match="teacher_kl_coef"):
        make("grpo", **ONE, teacher="llama")
    with pytest.raises(ValueError, match="beta"):
        DistillationConfig(str(tmp_path), beta=1.5, use_cpu=True)
    with pytest.raises(ValueError, match="num_generations"):
        GRPOConfig(str(tmp_path), num_generations=1, use_cpu=True)
    assert MiniLLMConfig(str(tmp_path), num_generations=1, use_cpu=True).scale_rewards == "none"


def test_minillm_logs_one_divergence() -> None:
    """The exact one, in the step that samples as in one that learns from the same rollouts again."""
    first, second = logs(of("minillm", gamma=1.0, num_iterations=2, max_steps=2, learning_rate=0.0)[0])
    assert first["teacher_kl"] == pytest.approx(second["teacher_kl"], rel=1e-9) and first["teacher_kl"] > 0
