"""Models saved in bfloat16 and loaded by name: every method moves their weights, and saves them in bfloat16."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers.trainer
from peft import LoraConfig
from safetensors.torch import load_file

from tests.contracts import methods
from tests.experimental import group_runs, ppo_runs
from tests.experimental.gold_runs import gold
from tests.tiny import tiny_classifier, tiny_model
from tests.trainer import cpo_runs, dpo_runs, grpo_runs, kto_runs, prm_runs, reward_runs
from tests.trainer import ppo_runs as step_runs
from tests.trainer.resume_worker import tokenizer
from trl import AutoModelForCausalLMWithValueHead, SFTTrainer
from trl.models.loading import cast_state, create_model_from_path
from trl.models.parts import causal_core
from trl.models.policy import share_moved
from trl.models.residuals import join
from trl.options.shared import RESIDUAL
from trl.trainer.callbacks import BEMACallback

STEPS = {
    "max_steps": 4, "learning_rate": 1e-6, "optim": "adamw_torch", "max_grad_norm": 1.0, "per_device_train_batch_size": 8,
}  # fmt: skip
VOCABULARY: dict[str, Any] = {"vocab_size": 64}  # nearly all of them are in the rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    """Folders of models in bfloat16 with a tokenizer: of language, another one, and classifiers of sequences and tokens."""
    half = {**VOCABULARY, "dtype": torch.bfloat16}
    models = {
        "policy": tiny_model("llama", **half),
        "tied": tiny_model("llama", tie_word_embeddings=True, **half),
        "other": tiny_model("llama", seed=1, **half),
        "large": tiny_model("llama", vocab_size=400, tie_word_embeddings=True, dtype=torch.bfloat16),
        "larger": tiny_model("llama", vocab_size=300, dtype=torch.bfloat16, seed=1),
        "reward": tiny_classifier("llama", num_labels=1, **half),
        "steps": tiny_classifier("llama", num_labels=2, of_tokens=True, **half),
    }
    folders = {}
    for name, model in models.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
        tokenizer().save_pretrained(folders[name])
    return folders


def of_rows(make: Callable[..., Any], model: str = "policy", **given: str) -> Callable[..., Any]:
    return lambda saved, out, **settings: make(
        out, model=saved[model], **{name: saved[value] for name, value in given.items()}, **{**STEPS, **settings}
    )


def of_groups(
    method: str, *, make: Any = grpo_runs.make, beta: float | None = None, **given: str
) -> Callable[..., Any]:
    def made(saved: dict[str, str], out: str, **settings: Any) -> Any:
        models = {"model": saved["policy"], **{name: saved[value] for name, value in given.items()}}
        own: dict[str, Any] = {"num_generations": 2} if method in grpo_runs.COMPARED else {}
        if beta is not None:
            own["beta"] = beta
        return make(method, folder=out, given=models, **{**STEPS, **own, **settings})[0]

    return made


def ppo(saved: dict[str, str], out: str, **settings: Any) -> Any:
    steps = {**STEPS, "per_device_train_batch_size": 4, **settings}
    return ppo_runs.make(saved["policy"], folder=out, value_model=saved["reward"], num_ppo_epochs=1, **steps)[0]


METHODS: dict[str, Callable[..., Any]] = {
    "sft": of_rows(methods.sft),
    "dpo": of_rows(dpo_runs.make, copied_reference="policy"),
    "dpo-other-reference": of_rows(dpo_runs.make, ref_model="other"),
    "kto": of_rows(kto_runs.make, ref_model="other"),
    "bco": of_rows(kto_runs.make_bco, ref_model="other"),
    "cpo": of_rows(cpo_runs.make),
    "orpo": of_rows(cpo_runs.make_orpo),
    "gkd": of_rows(methods.gkd, teacher_model="other"),
    "gold": of_rows(gold, "large", teacher_model="larger"),
    "reward": of_rows(reward_runs.make, "reward"),
    "prm": of_rows(prm_runs.make, "steps"),
    "grpo": of_groups("grpo"),
    "rloo": of_groups("rloo"),
    "online_dpo": of_groups("online_dpo", ref_model="other"),
    "nash_md": of_groups("nash_md", ref_model="other"),
    "xpo": of_groups("xpo", ref_model="other"),
    "distillation": of_groups("distillation", teacher_model="other"),
    "minillm": of_groups("minillm", beta=0.0, teacher_model="other"),
    "sdft": of_groups("sdft"),
    "sdpo": of_groups("sdpo", beta=0.0),
    "gfpo": of_groups("gfpo", make=group_runs.make),
    "ppo": ppo,
}


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def moved(before: dict[str, torch.Tensor], model: Any) -> float:
    """The share of weights that differ."""
    now = state(model)
    changed = sum(int((now[name] != weight).sum()) for name, weight in before.items())
    return changed / sum(weight.numel() for weight in before.values())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_the_weights_of_a_bfloat16_file(method, saved, tmp_path):
    trainer = METHODS[method](saved, str(tmp_path), max_steps=2)
    before = state(trainer.model)
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    trainer.train()
    assert trainer.state.global_step == 2
    assert moved(before, trainer.model) >= 0.9
    trainer.save_model()
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_bfloat16_weights_with_residuals(method, saved, tmp_path):
    """The weights that forwards see are bfloat16; the float32 ones, of which the optimiser has the rest, move and are resumed."""
    trainer = METHODS[method](saved, str(tmp_path), weights=RESIDUAL, max_steps=2)
    before = state(trainer.model)
    assert {weight.dtype for weight in before.values()} == {torch.bfloat16}
    trainer.train()
    kept = trainer.optimizer.state
    changed = [
        (join(weight.detach(), kept[weight]["residual"]) != before[name].float()).flatten()
        for name, weight in trainer.model.named_parameters()
        if weight in kept
    ]
    assert torch.cat(changed).sum() >= 0.9 * sum(weight.numel() for weight in before.values())
    trainer.save_model()
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


# ---- what stays in the files' dtype


def dtypes(model: Any) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters()}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16])
def test_an_explicit_dtype_is_obeyed(dtype, saved, tmp_path):
    trainer = METHODS["sft"](saved, str(tmp_path), model_init_kwargs={"dtype": dtype})
    assert dtypes(trainer.model) == {torch.bfloat16}


def test_what_is_frozen_keeps_the_dtype_of_its_files(saved, tmp_path):
    for number, method in enumerate(("gkd", "distillation", "dpo-other-reference")):
        trainer = METHODS[method](saved, str(tmp_path / str(number)))
        frozen = trainer.ref_model if "dpo" in method else trainer.teacher.reference.module
        assert dtypes(frozen) == {torch.bfloat16}
    made = of_groups("grpo")(saved, str(tmp_path / "judged"), reward_funcs=saved["reward"])
    assert dtypes(made.rewards.models[0].model) == {torch.bfloat16}


@pytest.mark.parametrize("kept", [None, ["lm_head"], ["embed_tokens"]])
@pytest.mark.parametrize("bf16", [False, True])
def test_an_adapter_trains_in_float32_over_a_base_in_bfloat16(kept, bf16, saved, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=kept)
    trainer = METHODS["sft"](saved, str(tmp_path), peft_config=adapter, bf16=bf16)
    kinds = {(weight.requires_grad, weight.dtype) for weight in trainer.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    before = {name: weight for name, weight in state(trainer.model).items() if "modules_to_save" in name}
    trainer.train()
    if kept == ["lm_head"]:
        assert moved(before, trainer.model) >= 0.9
    trainer.save_model()
    again: Any = SFTTrainer(str(tmp_path), trainer.args, train_dataset=trainer.train_dataset)
    assert {x.dtype for x in again.model.parameters() if x.requires_grad} == {torch.float32}
    for name, weight in state(trainer.model).items():
        torch.testing.assert_close(state(again.model)[name], weight, rtol=0, atol=0)


def test_a_reward_head_beside_an_adapter_trains_in_float32(saved, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    trainer = METHODS["reward"](saved, str(tmp_path), peft_config=adapter)
    trainer.train()
    assert {x.dtype for x in trainer.model.parameters() if x.requires_grad} == {torch.float32}


# ---- saved models, checkpoints, resuming


def test_save_dtype_and_objects_decide_how_models_are_saved(saved, tmp_path):
    for name, settings, expected in (
        ("wide", {"save_dtype": "float32"}, torch.float32),
        ("object", {"model": tiny_model("llama", **VOCABULARY)}, torch.float32),
        ("half object", {"model": tiny_model("llama", dtype=torch.bfloat16, **VOCABULARY)}, torch.bfloat16),
        ("narrow", {"model": tiny_model("llama", **VOCABULARY), "save_dtype": "float16"}, torch.float16),
        ("tied", {"model": saved["tied"]}, torch.bfloat16),
    ):
        trainer = methods.sft(str(tmp_path / name), **{"model": saved["policy"], **STEPS, **settings})
        trainer.train()
        trainer.save_model()
        assert {x.dtype for x in load_file(tmp_path / name / "model.safetensors").values()} == {expected}
        again = create_model_from_path(str(tmp_path / name))
        for key, weight in again.state_dict().items():
            assert torch.equal(weight, trainer.model.state_dict()[key].to(expected)), key
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")


def test_pushes_within_a_run_and_the_averaged_model_have_the_dtype_of_the_files(saved, tmp_path, monkeypatch):
    hub, pushed = Mock(), []
    hub.create_repo.return_value.repo_id = "me/x"

    def upload(*, folder_path, **_):
        file = Path(folder_path) / "model.safetensors"
        pushed.append({x.dtype for x in load_file(file).values()})
        return Mock()

    hub.upload_folder = upload
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    settings = {"save_strategy": "steps", "save_steps": 2, "push_to_hub": True, "hub_model_id": "me/x"}
    trainer = METHODS["sft"](saved, str(tmp_path), **settings)
    trainer.add_callback(BEMACallback(update_freq=1))
    trainer.train()
    assert pushed[:2] == [{torch.bfloat16}] * 2
    checkpoint = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert {x.dtype for x in checkpoint.values()} == {torch.float32}
    average = load_file(tmp_path / "bema" / "model.safetensors")
    assert {x.dtype for x in average.values()} == {torch.bfloat16}
    assert create_model_from_path(str(tmp_path / "bema")).dtype == torch.bfloat16


@pytest.mark.parametrize(("strategy", "places"), [("checkpoint", ["last-checkpoint"] * 2), ("all_checkpoints", None)])
def test_checkpoints_are_pushed_beside_a_model_in_the_dtype_of_the_files(
    saved, tmp_path, monkeypatch, strategy, places
):
    hub, pushed = Mock(), []
    hub.create_repo.return_value.repo_id = "me/x"

    def upload(*_, folder_path, path_in_repo=None, **__):
        file = Path(folder_path) / "model.safetensors"
        pushed.append((path_in_repo, {x.dtype for x in load_file(file).values()}))
        return Mock()

    hub.upload_folder = upload
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    settings = {"save_strategy": "steps", "save_steps": 2, "push_to_hub": True, "hub_model_id": "me/x"}
    METHODS["sft"](saved, str(tmp_path), hub_strategy=strategy, **settings).train()
    models = [dtypes for place, dtypes in pushed if place is None]
    checkpoints = [(place, dtypes) for place, dtypes in pushed if place is not None]
    assert models[:2] == [{torch.bfloat16}] * 2
    expected = places or ["checkpoint-2", "checkpoint-4"]
    assert checkpoints == [(place, {torch.float32}) for place in expected]


def test_files_that_are_being_pushed_stay_as_they_are(saved, tmp_path, monkeypatch):
    hub, pushed = Mock(), []
    hub.create_repo.return_value.repo_id = "me/x"

    def upload(*, folder_path, **_):
        pushed.append((Path(folder_path) / "model.safetensors").read_bytes())
        return Mock(done=lambda: False)

    hub.upload_folder = upload
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    settings = {"save_strategy": "steps", "save_steps": 1, "push_to_hub": True, "hub_model_id": "me/x"}
    trainer = METHODS["sft"](saved, str(tmp_path), **settings)
    trainer.args.learning_rate = 0.1
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
    trainer.train()
    assert (tmp_path / "checkpoint-4").is_dir()
    assert (tmp_path / "model.safetensors").read_bytes() == pushed[0] and len(pushed) == 1


def test_the_base_of_an_adapter_is_not_copied_to_be_saved(saved, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = METHODS["sft"](saved, str(tmp_path), peft_config=adapter, save_dtype="float16")
    weights = trainer.model.state_dict()
    for name, weight in cast_state(trainer.model, weights, torch.float16).items():
        assert weight.dtype == torch.float16 if "lora" in name else weight is weights[name], name
    trainer.save_model()
    assert {x.dtype for x in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize("method", ["sft", "grpo", "ppo", "reward"])
def test_a_resumed_run_ends_in_the_same_bits(method, saved, tmp_path):
    whole = METHODS[method](saved, str(tmp_path / "whole"))
    whole.train()
    saves = {"save_strategy": "steps", "save_steps": 2}
    METHODS[method](saved, str(tmp_path / "run"), **saves).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = METHODS[method](saved, str(tmp_path / "run"), **saves)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, weight in state(whole.model).items():
        assert torch.equal(state(resumed.model)[name], weight), name
    assert {x.dtype for x in load_file(checkpoint / "model.safetensors").values()} == {torch.float32}
    kind = type(causal_core(getattr(whole.model, "policy", whole.model)))
    assert kind.from_pretrained(checkpoint).dtype == torch.bfloat16
    assert create_model_from_path(str(checkpoint), trained=True).dtype == torch.float32


@pytest.mark.parametrize("bf16", [False, True])
def test_the_loss_curve_is_that_of_a_float32_file_with_equal_values(bf16, saved, tmp_path):
    wide = create_model_from_path(saved["policy"], dtype="float32")
    wide.save_pretrained(tmp_path / "wide")
    curves = []
    for folder in (saved["policy"], str(tmp_path / "wide")):
        settings = {**STEPS, "max_steps": 40, "learning_rate": 1e-4, "bf16": bf16}
        trainer = methods.sft(str(tmp_path / "run"), model=folder, processing_class=tokenizer(), **settings)
        trainer.train()
        curves.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert len(curves[0]) == 40 and curves[0][-1] < curves[0][0] - 0.1
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-6


# ---- step-level PPO


def test_step_level_ppo_moves_the_weights_of_a_bfloat16_file(saved, tmp_path):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(saved["policy"], summary_dropout_prob=0.0)
    trainer = step_runs.make_trainer(model, options={"optimizer": None}, tokenizer=tokenizer(), learning_rate=1e-6)
    before = state(model.pretrained_model)
    for _ in range(4):
        statistics = trainer.step(*step_runs.batch())
        if trainer.current_step == 1:
            assert statistics["objective/kl"] == 0.0
    assert moved(before, model.pretrained_model) >= 0.9
    trainer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {x.dtype for name, x in weights.items() if "v_head" not in name} == {torch.bfloat16}
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert again.pretrained_model.dtype == torch.float32
    assert torch.equal(again.v_head.summary.weight, model.v_head.summary.weight)


# ---- the first step: nothing has moved yet


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_divergence_begins_at_0(named, bf16, saved, tmp_path):
    given = {"ref_model": saved["policy"]} if named else {}
    trainer = dpo_runs.make(str(tmp_path), model=saved["policy"], bf16=bf16, copied_reference=True, **given, **STEPS)
    assert dtypes(trainer.ref_model) == {torch.float32}
    trainer.train()
    assert trainer.state.log_history[0]["rewards/chosen"] == 0.0
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("bf16", [False, True])
def test_ratios_of_the_first_step_are_1(bf16, saved, tmp_path):
    """Under autocast the sampler computes as the scoring forward does, whose log-probs are the old ones."""
    trainer = METHODS["grpo"](saved, str(tmp_path), bf16=bf16)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl"] == pytest.approx(0.0, abs=1e-9)
    assert log["clip_ratio/region_mean"] == 0.0


# ---- objects in 16 bits


def test_one_warning_says_how_many_weights_of_an_object_move(saved, tmp_path, caplog):
    model: Any = tiny_model("llama", dtype=torch.bfloat16, **VOCABULARY)
    model.model.embed_tokens.weight.data[0] = 1.0  # of padding: zeros, and it gets no gradient
    trainer = methods.sft(str(tmp_path), model=model, **{**STEPS, "max_steps": 1})
    (warning,) = [record.getMessage() for record in caplog.records if "rounding" in record.getMessage()]
    before, share = state(model), share_moved(list(model.parameters()), 1e-6)
    assert 0.001 < share < 0.05 and f"{100 * share:.2g} %" in warning and "dtype='float32'" in warning
    trainer.train()
    assert dtypes(model) == {torch.bfloat16}
    assert moved(before, model) == pytest.approx(share, rel=0.3)
    caplog.clear()
    methods.sft(str(tmp_path), model=model, **{**STEPS, "learning_rate": 0.5})
    METHODS["sft"](saved, str(tmp_path))
    assert "rounding" not in caplog.text
