"""Merging by mergekit: values of each method, what the callback merges and when, and that training does not notice."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.callbacks import runs
from trl import mergekit_utils
from trl.experimental.merge_model_callback import MergeConfig, MergeModelCallback
from trl.trainer.callbacks import merge_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that differ in every weight."""
    pytest.importorskip("mergekit")
    found = []
    for seed in (0, 1):
        found.append(str(tmp_path_factory.mktemp(f"model{seed}")))
        tiny_model("llama", seed=seed).save_pretrained(found[-1])
    return found


def config_of(method, policy, target, **settings):
    config = MergeConfig(method)
    config.policy_model_path, config.target_model_path, config.dtype = str(policy), str(target), "float32"
    for name, value in settings.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    return config


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def merged(config, folder):
    mergekit_utils.merge_models(config.create(), str(folder))
    return weights(folder)


def streams():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_linear(folders, tmp_path):
    policy, target = map(weights, folders)
    found = merged(config_of("linear", *folders, policy_model_weight=0.75, target_model_weight=0.25), tmp_path)
    for name, value in found.items():
        torch.testing.assert_close(value, 0.75 * policy[name] + 0.25 * target[name], rtol=1e-6, atol=1e-7)


def test_slerp(folders, tmp_path):
    policy, target = map(weights, folders)
    name = "model.layers.0.mlp.up_proj.weight"
    found = merged(config_of("slerp", *folders, t_values=0.25), tmp_path)[name]
    first, second = policy[name].double(), target[name].double()
    angle = torch.acos((first * second).sum() / first.norm() / second.norm())
    expected = (torch.sin(0.75 * angle) * first + torch.sin(0.25 * angle) * second) / torch.sin(angle)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_ties_add_changes_to_the_policy(folders, tmp_path, method):
    """At density 1 they are the target, at a half ties keeps the larger half of a tensor's changes."""
    policy, target = map(weights, folders)
    name = "model.layers.1.self_attn.q_proj.weight"
    found = merged(config_of(method, *folders), tmp_path / "whole")[name]
    torch.testing.assert_close(found, target[name], rtol=1e-5, atol=1e-6)
    before = streams()
    settings = {"policy_model_density": 1.0, "target_model_density": 0.5}
    found = merged(config_of(method, *folders, **settings), tmp_path / "half")[name]
    assert streams() == before
    change = (found - policy[name]).abs() > 1e-6
    expected = (target[name] - policy[name]).abs()
    if method == "ties":
        assert torch.equal(change, expected > expected.flatten().sort().values[expected.numel() // 2 - 1])
    else:
        assert 0.4 < change.float().mean() < 0.6
        again = merged(config_of(method, *folders, **settings), tmp_path / "again")[name]
        assert torch.equal(found, again)


def test_adapters_are_merged_into_their_base_first(folders, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folders[0])
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = copy.deepcopy(model).merge_and_unload().state_dict()[name]
    found = merged(config_of("linear", tmp_path / "adapter", folders[1]), tmp_path / "merged")[name]
    torch.testing.assert_close(found, (whole + weights(folders[1])[name]) / 2, rtol=1e-5, atol=1e-6)


def test_every_checkpoint_is_merged_and_training_does_not_notice(folders, tmp_path):
    callback = MergeModelCallback(config_of("dare_ties", "", folders[1]), merge_at_every_checkpoint=True)
    options = {"steps": 2, "save_strategy": "steps", "save_steps": 1}
    plain = runs.trainer(tmp_path / "plain", **options)
    plain.train()
    run = runs.trainer(tmp_path / "merging", callbacks=[callback], **options)
    run.train()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name])
    for step in (1, 2):
        folder = tmp_path / "merging" / f"checkpoint-{step}"
        assert (folder / "merged" / "tokenizer.json").is_file()
        name = "model.embed_tokens.weight"
        torch.testing.assert_close(weights(folder / "merged")[name], weights(folders[1])[name], rtol=1e-5, atol=1e-6)


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


@pytest.mark.parametrize("save_strategy", ["no", "epoch"])
def test_the_last_checkpoint_is_merged_with_what_the_policy_was(folders, tmp_path, save_strategy, monkeypatch):
    pushed = []
    monkeypatch.setattr(merge_model, "upload_model_to_hf", lambda *args, **kwargs: pushed.append((args, kwargs)))
    run = runs.trainer(tmp_path / "run", steps=2, save_strategy=save_strategy, hub_private_repo=True)
    run.model.name_or_path = folders[0]
    callback = MergeModelCallback(push_to_hub=True)
    run.add_callback(callback)
    run.train()
    folder = tmp_path / "run" / "checkpoint-2"
    start, end = weights(folders[0]), weights(folder)
    for name, value in weights(folder / "merged").items():  # float16
        torch.testing.assert_close(value, (start[name] + end[name]) / 2, rtol=1e-3, atol=1e-6)
    assert pushed == [((str(folder / "merged"), "run_checkpoint-2_merged"), {"private": True, "token": None})]
    assert callback.merge_config.policy_model_path is None


def test_a_run_that_stops_without_a_checkpoint(folders, tmp_path, caplog):
    callback = MergeModelCallback(config_of("linear", "", folders[1]))
    runs.trainer(tmp_path, callbacks=[callback, Stops()]).train()
    assert "nothing was merged" in caplog.text and not list(tmp_path.glob("**/merged"))


@pytest.mark.parametrize(
    ("fsdp", "zero", "target", "message"),
    [
        ("StateDictType.SHARDED_STATE_DICT", None, "a/b", "FULL_STATE_DICT"),
        (None, {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}, "a/b", "zero3_save_16bit_model"),
        (None, None, "./none", "target_model_path='./none' does not exist"),
        ("StateDictType.FULL_STATE_DICT", {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}, "a/b", "no dtype"),
    ],
    ids=["FSDP", "ZeRO-3", "no folder", "settings"],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_before_the_first_step(fsdp, zero, target, message, tmp_path, monkeypatch):
    state = SimpleNamespace(
        fsdp_plugin=fsdp and SimpleNamespace(state_dict_type=fsdp),
        deepspeed_plugin=zero and SimpleNamespace(deepspeed_config={"zero_optimization": zero}),
    )

    def refused(config):
        assert config.target_model_path == target
        raise ValueError("no dtype")

    monkeypatch.setattr(merge_model, "AcceleratorState", lambda: state)
    monkeypatch.setattr(merge_model, "is_mergekit_available", lambda: True)
    monkeypatch.setattr(MergeConfig, "create", refused)
    run = runs.trainer(tmp_path, callbacks=[MergeModelCallback(config_of("linear", "", target))])
    with pytest.raises(ValueError, match=message):
        run.train()


def test_bad_input(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="method"):
        MergeConfig("mean")
    with pytest.raises(ValueError, match="policy_model_path"):
        MergeConfig("linear").create()
    with pytest.raises(ValueError, match="whole model"):
        config_of("linear", tmp_path, "b").create()
    with monkeypatch.context() as patch:
        patch.setattr(merge_model, "is_mergekit_available", lambda: True)
        run = runs.trainer(tmp_path, callbacks=[MergeModelCallback()])
        for method, name, value, message in (
            ("linear", "dtype", "float17", "dtype"),
            ("linear", "target_model_weight", "half", "weight must be a number"),
            ("ties", "policy_model_density", [1.0, None], "density must be a number"),
            ("slerp", "t_values", [{"filter": "mlp", "value": ["x"]}], "t must be a number"),
        ):
            with pytest.raises(ValueError, match=message):
                config_of(method, "a/b", "a/b", **{name: value}).create()
    with pytest.raises(ValueError, match="target_model_path"):
        run.train()
    monkeypatch.setattr(merge_model, "is_mergekit_available", lambda: False)
    with pytest.raises(ImportError, match=r"trl\[merge\]"):
        MergeModelCallback()
    with pytest.raises(ImportError, match=r"trl\[merge\]"):
        config_of("linear", "a", "b").create()
