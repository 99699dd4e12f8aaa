"""DDPO and AlignProp: their steps, invariances, resuming, and what they refuse."""

import copy
import json
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from huggingface_hub import HfApi

from tests.checkpoints.made import forget_sums
from tests.tiny_diffusion import PROMPTS, tiny_flux, tiny_pipeline, tiny_sd3
from tests.trainer.diffusion_runs import (
    IN_ONE,
    KINDS,
    alignprop,
    brightness,
    ddpo,
    drawn,
    grpo,
    in_float64,
    pipeline,
    saved_in,
    weights,
)
from tests.two_processes import ending, launch
from trl import (
    AlignPropConfig,
    DDPOConfig,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
    TrlParser,
)
from trl.checkpoints.wholeness import CheckpointError
from trl.experimental.diffusion_grpo import FlowPipeline
from trl.reporting.run_events import RunEvents
from trl.reporting.run_lines import metric_cells
from trl.rewards import RewardError
from trl.scripts.pages.runs import Run
from trl.trainer.diffusion_setup import place_modules
from trl.trainer.utils import PerPromptStatTracker

SAME = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    "settings", [{}, {"train_cfg": False}, {"train_timestep_fraction": 0.5}, {"sample_guidance_scale": 1.0}]
)
def test_the_first_optimiser_step_has_ratio_one(settings, capsys):
    trainer = ddpo(train_gradient_accumulation_steps=2, train_num_inner_epochs=2, **settings)
    trainer.train(2)
    first, second = trainer.log_history[1], trainer.log_history[2]
    # The clipped share at a range of 1e-4; log-probs differ by no more than rounding.
    assert first["clipfrac"] == 0 and first["approx_kl"] < 1e-12 and first["inner_epoch"] == 0
    assert second["approx_kl"] > 0 and second["inner_epoch"] == 1
    assert [entry["step"] for entry in trainer.log_history] == [0, 1, 2, 2, 3, 4]
    first, second, *end = capsys.readouterr().out.splitlines()
    assert end[-1].startswith("time ") and "images 8 " in end[-1]  # two epochs of two batches of two
    assert first.startswith("1/2  ") and second.startswith("2/2  ") and second.endswith("  0s left")
    assert f"reward {trainer.log_history[3]['reward_mean']:>6.3f}" in second and " img/s " in second
    assert metric_cells({"loss": trainer.log_history[5]["loss"]})[0] in second and "KL" in second


def test_logs_as_dicts(capsys):
    ddpo(log_format="dict").train(1)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("{'") and "'loss': " in line and "'reward': " in line


def test_the_adapter_alone_is_trained():
    model = pipeline()
    before = {name: value.clone() for name, value in model.unet.state_dict().items()}
    trainer = ddpo(model)
    start = weights(trainer)
    trainer.train(1)
    after = {name.replace(".base_layer.", "."): value for name, value in model.unet.state_dict().items()}
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert any(not torch.equal(value, start[name]) for name, value in weights(trainer).items())
    assert all("lora_" in name for name in start)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_batch_size": 1, "train_gradient_accumulation_steps": 4},
        {"sample_batch_size": 4, "sample_num_batches_per_epoch": 1, "train_batch_size": 4, "train_gradient_accumulation_steps": 1},
    ],
)  # fmt: skip
def test_weights_do_not_depend_on_the_split(settings):
    """Compared after one optimiser step in float64."""
    found = []
    for own in ({"train_gradient_accumulation_steps": 2}, settings):
        trainer = ddpo(pipeline(dtype=torch.float64), train_clip_range=10.0, train_timestep_fraction=0.5, **own)
        trainer.train(1)
        found.append(weights(trainer))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], **SAME)


def test_alignprop_does_not_depend_on_the_split():
    found = []
    for size, count in ((2, 1), (1, 2)):
        trainer = alignprop(
            pipeline(dtype=torch.float64), truncated_backprop_rand=False, truncated_backprop_timestep=1,
            train_batch_size=size, train_gradient_accumulation_steps=count,
        )  # fmt: skip
        trainer.train(1)
        found.append(weights(trainer))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], **SAME)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", IN_ONE)
def test_two_processes_are_one(kind, tmp_path):
    launch("tests.trainer.diffusion_runs", kind, str(tmp_path))
    found = torch.load(tmp_path / "weights.pt")
    trainer = in_float64(kind, **IN_ONE[kind])
    trainer.train(1)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, found[name], **SAME)


@pytest.mark.distributed
def test_a_run_that_was_killed_while_saving(tmp_path):
    status, written = ending("tests.trainer.diffusion_runs", "killed", str(tmp_path / "run"))
    assert status == -9, written
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"checkpoint_1", "_saving-checkpoint_2"}
    resumed = saved_in(tmp_path / "run", resume_from=str(tmp_path / "run"))
    resumed.train(4)
    whole = saved_in(tmp_path / "whole")
    whole.train(4)
    assert resumed.first_epoch == 2
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize(("kind", "lora"), [("ddpo", True), ("ddpo", False), ("alignprop", True)])
def test_resuming_is_bit_exact(kind, lora, tmp_path):
    """With prompts drawn by a global generator, rewards remembered by prompt, and inner epochs."""
    more = {
        "per_prompt_stat_tracking": True,
        "per_prompt_stat_tracking_min_count": 2,
        "train_num_inner_epochs": 2,
        "sample_num_steps": 2,
    }
    settings = {
        "project_kwargs": {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True, "total_limit": 2},
        "save_freq": 1, **(more if kind == "ddpo" else {}),
    }  # fmt: skip

    def run(**own):
        trainer = KINDS[kind](pipeline(lora=lora), prompts=drawn, **settings, **own)
        trainer.train(4)
        return trainer

    whole = weights(run())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    resumed = run(resume_from=str(folder / "checkpoint_2"))
    assert resumed.first_epoch == 3
    assert all(torch.equal(value, whole[name]) for name, value in weights(resumed).items())
    page = Run(tmp_path, "run")
    assert page.has_ended and [step for step, _ in page.data["curves"]["reward"]] == [1, 2, 3, 4]
    assert None not in [value for _, value in page.data["curves"]["loss"]] and page.figures["resumed after step"] == "3"
    latest = KINDS[kind](pipeline(lora=lora), prompts=drawn, **settings, resume_from=str(tmp_path))
    assert latest.first_epoch == 4
    assert all(torch.equal(value, whole[name]) for name, value in weights(latest).items())


@pytest.mark.parametrize(("frequency", "saved"), [(3, ["checkpoint_0"]), (0, [])])
def test_a_run_of_one_epoch_is_saved(frequency, saved, tmp_path):
    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "sample_num_steps": 2, "save_freq": frequency}
    ddpo(**settings).train(1)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == saved


def test_an_error_is_the_last_event_of_a_run(tmp_path):
    def fails(*_):
        raise OSError("no judge\nat all")

    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "sample_num_steps": 2, "save_freq": 1}
    with pytest.raises(OSError, match="no judge"):
        ddpo(reward=fails, **settings).train(2)
    last = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["step"], last["reason"]) == ("stopped", 0, "OSError: no judge")


def test_checkpoints_that_cannot_be_resumed(tmp_path, caplog):
    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 2, "sample_num_steps": 2}
    ddpo(**settings).train(4)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    other = pipeline()
    other.sd_pipeline.unet = type(other.unet).from_config({**other.unet.config, "block_out_channels": (32, 64)})
    for trainer, model in ((ddpo, other), (alignprop, None), (ddpo, pipeline(lora=False))):
        with pytest.raises(CheckpointError):
            trainer(model, **settings, resume_from=str(tmp_path))
    with pytest.raises(ValueError, match="resume_from"):
        ddpo(resume_from=str(tmp_path / "nothing"))
    state = folder / "checkpoint_2" / "diffusion_state.json"
    forget_sums(shutil.copytree(state.parent, tmp_path / "two" / "checkpoint_2"))
    values = json.loads(state.read_text())
    for text, message in (
        (json.dumps(values | {"processes": 2}), "2 processes"),
        (None, "diffusion_state.json is missing"),
    ):
        other = tmp_path / "two" / "checkpoint_2" / state.name
        other.write_text(text) if text else other.unlink()
        with pytest.raises(ValueError, match=f"^[^ ]*checkpoint_2 .*{message}") as found:
            ddpo(resume_from=str(other.parent))
        assert isinstance(found.value, CheckpointError) == (text is None)
    next((folder / "checkpoint_3").glob("optimizer*")).unlink()
    with caplog.at_level(logging.WARNING):
        assert ddpo(**settings, resume_from=str(tmp_path)).first_epoch == 3
    assert "not whole" in caplog.text


def test_a_run_keeps_its_own_checkpoints(tmp_path, caplog):
    """Another run's do not count, also those after the one that a run resumes from."""
    folder = tmp_path / "checkpoints"
    project = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 1, "num_checkpoint_limit": 2}
    settings = {**project, "sample_num_steps": 2, "sample_num_batches_per_epoch": 1}
    others = [f"checkpoint_{number}" for number in (4, 5)]

    def names():
        return sorted(path.name for path in folder.iterdir())

    ddpo(**settings).train(3)
    assert names() == ["checkpoint_1", "checkpoint_2"] and "another run" not in caplog.text
    for name in others:
        shutil.copytree(folder / "checkpoint_1", folder / name)
    ddpo(**settings).train(4)
    assert names() == ["checkpoint_2", "checkpoint_3", *others] and "another run" in caplog.text
    ddpo(**settings, resume_from=str(folder / "checkpoint_2")).train(4)
    assert names() == ["checkpoint_2", "checkpoint_3", *others]


def test_a_pipeline_that_leaves_the_weights_to_the_trainer(tmp_path):
    """As those of older programs: the model is stored once."""

    class Own(DefaultDDPOStableDiffusionPipeline):
        def save_checkpoint(self, models, weights, output_dir):
            super().save_checkpoint(models, list(weights), output_dir)

        def load_checkpoint(self, models, input_dir):
            super().load_checkpoint(list(models), input_dir)

    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 1}
    trainer = ddpo(Own(tiny_pipeline(), use_lora=False), **settings)
    trainer.train(2)
    folder = tmp_path / "checkpoints" / "checkpoint_1"
    assert [path.parent.name for path in folder.rglob("*model*.*")] == ["unet"]
    resumed = ddpo(Own(tiny_pipeline(seed=1), use_lora=False), **settings, resume_from=str(folder))
    assert all(torch.equal(value, weights(trainer)[name]) for name, value in weights(resumed).items())


@pytest.mark.parametrize(("flow", "swaps"), [(False, False), (False, True), (True, False)])
def test_hooks_and_async_rewards_may_use_the_pipeline_at_any_time(flow, swaps):
    """They sample with two steps and by another scheduler, and the pipeline's is set to two before each call of the model.

    The lock keeps a thread from setting the scheduler by which another one samples.
    """
    from diffusers import DPMSolverMultistepScheduler

    ended, settings = (
        [],
        {
            "train_cfg": False,
            "async_reward_computation": True,
            "max_workers": 1,
            "resolution": 32,
            "sample_num_steps": 3,
        },
    )
    for uses in (False, True):
        model = FlowPipeline(tiny_sd3()) if flow else pipeline()
        inner, alone = model.sd_pipeline, threading.RLock()

        def interfere(*given, inner=inner, alone=alone):
            with alone:
                inner.scheduler.set_timesteps(2)

        def show(*given, inner=inner, uses=uses, alone=alone):
            if not uses:
                return
            with alone:
                if swaps:
                    inner.scheduler = DPMSolverMultistepScheduler.from_config(inner.scheduler.config)
                size = {"height": 32, "width": 32}
                inner("a dog", num_inference_steps=2, generator=torch.Generator(), output_type="pt", **size)

        def reward(images, prompts, metadata, show=show):
            show()
            return brightness(images, prompts, metadata)

        trainer = ddpo(model, reward=reward, hook=show, **settings)
        if uses:
            trainer.policy.model.register_forward_pre_hook(interfere)
        trainer.train(2)
        ended.append(weights(trainer))
    assert all(torch.equal(value, ended[0][name]) for name, value in ended[1].items())


def test_a_loss_of_the_users_own():
    """As older programs write it: with the pipeline's own step, also after a hook has sampled."""

    class Own(DDPOTrainer):
        def calculate_loss(self, latents, timesteps, next_latents, log_probs, advantages, embeds):
            without, within = self.sd_pipeline.unet(
                torch.cat([latents] * 2), torch.cat([timesteps] * 2), embeds
            ).sample.chunk(2)
            output = without + self.config.sample_guidance_scale * (within - without)
            found = self.sd_pipeline.scheduler_step(
                output, timesteps, latents, eta=self.config.sample_eta, prev_sample=next_latents
            )
            ratio = (found.log_probs - log_probs).exp()
            loss = self.loss(advantages, self.config.train_clip_range, ratio)
            return loss, (found.log_probs - log_probs).square().mean() / 2, ratio.mean()

    model = pipeline()
    own = ddpo(
        model,
        kind=Own,
        hook=lambda *given: model.sd_pipeline("a dog", num_inference_steps=2, output_type="pt"),
    )
    plain = ddpo()
    own.train(1)
    plain.train(1)
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(own).items())


def test_async_rewards_overlap_with_sampling():
    """The first batch's rewards wait until the second batch is sampled; both finish."""
    sampled, started = threading.Event(), []

    class Counting(DDPOTrainer):
        def generators(self, epoch, first, count):
            if first:  # of the second batch
                sampled.set()
            return super().generators(epoch, first, count)

    async def reward(images, prompts, metadata):
        started.append(sampled.wait(timeout=60))
        return images.mean(dim=(1, 2, 3)).tolist(), {"count": len(images)}

    seen = []
    trainer = ddpo(reward=reward, kind=Counting, async_reward_computation=True, hook=lambda *given: seen.append(given))
    trainer.train(1)
    (images, step, tracker), = seen  # fmt: skip
    assert started == [True, True] and step == 0 and tracker is None and len(images) == 2
    shown, prompts, metadata, rewards, reward_metadata = images[1]
    assert shown.shape == (2, 3, 32, 32) and prompts == tuple(PROMPTS[2:]) and reward_metadata == {"count": 2}
    assert metadata == ({}, {})
    torch.testing.assert_close(rewards, shown.mean(dim=(1, 2, 3)).double())
    pairs = [(shown, prompts, metadata)] * 2
    for each in (trainer, ddpo()):
        assert len(each.compute_rewards(pairs, is_async=True)[0]) == 2


def test_a_failed_async_reward_does_not_wait_for_the_others():
    release, threads = threading.Event(), []

    def reward(images, prompts, metadata):
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise OSError("no network")
        assert release.wait(60)
        return brightness(images, prompts, metadata)

    with pytest.raises(OSError, match="no network"):
        ddpo(reward=reward, async_reward_computation=True).train(1)
    assert all(thread.daemon for thread in threads)  # the program may end
    release.set()


@pytest.mark.parametrize(
    ("kind", "reward", "error"),
    [
        (ddpo, lambda i, p, m: ([1.0], {}), ValueError),
        (ddpo, lambda i, p, m: ([1.0, float("nan")], {}), ValueError),
        (ddpo, lambda i, p, m: ([1.0, None], {}), ValueError),
        (ddpo, lambda i, p, m: (["a", 1.0], {}), ValueError),
        (ddpo, lambda i, p, m: [1.0, 2.0], TypeError),
        (alignprop, lambda i, p, m: ([1.0, 2.0], {}), TypeError),
        (alignprop, lambda i, p, m: (i.detach().mean((1, 2, 3)), {}), TypeError),
        (alignprop, lambda i, p, m: (i.mean((1, 2, 3))[:1], {}), ValueError),
        (alignprop, lambda i, p, m: (i.mean((1, 2, 3)) / 0, {}), ValueError),
    ],
)
def test_refused_rewards(kind, reward, error):
    trainer = kind(reward=reward)
    start = weights(trainer)
    with pytest.raises(error):
        trainer.train(1)
    assert all(torch.equal(value, start[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (ddpo, {"sample_batch_size": 3}, "sample_batch_size to 4"),
        (ddpo, {"train_batch_size": 4}, "sample_batch_size"),
        (ddpo, {"train_gradient_accumulation_steps": 3}, "train_gradient_accumulation_steps to 1 or 2"),
        (ddpo, {"sample_eta": 0.0}, "sample_eta"),
        (ddpo, {"train_timestep_fraction": 0.1}, "train_timestep_fraction"),
        (ddpo, {"mixed_precision": "fp8"}, "mixed_precision"),
        (ddpo, {"accelerator_kwargs": {"gradient_accumulation_steps": 2}}, "train_gradient_accumulation"),
        (alignprop, {"truncated_rand_backprop_minmax": (4, 50)}, "truncated_rand_backprop_minmax"),
        (alignprop, {"truncated_rand_backprop_minmax": [3]}, "truncated_rand_backprop_minmax"),
        (alignprop, {"truncated_rand_backprop_minmax": 3}, "truncated_rand_backprop_minmax"),
        (alignprop, {"truncated_backprop_rand": False}, "truncated_backprop_timestep"),
    ],
)
def test_refused_settings(kind, settings, name):
    with pytest.raises(ValueError, match=name):
        kind(**settings)


def test_refused_prompts_and_configs():
    with pytest.raises(TypeError, match="prompt_function"):
        ddpo(prompts=lambda: "a prompt alone").train(1)
    for kind in (ddpo, alignprop):
        for name in ("reward", "prompts"):
            with pytest.raises(TypeError, match=f"{name[:6]}.*must be a function, got 'brightness'"):
                kind(**{name: "brightness"})
    with pytest.raises(TypeError, match="DDPOConfig"):
        DDPOTrainer(AlignPropConfig(), brightness, lambda: ("a", {}), pipeline())
    for kind, name in ((ddpo, "scheduler_step"), (alignprop, "rgb_with_grad")):
        with pytest.raises(TypeError, match=f"unet.*{name}"):
            kind(DDPOStableDiffusionPipeline())


@pytest.mark.parametrize("settings", [{"mixed_precision": "fp16"}, {"accelerator_kwargs": {"mixed_precision": "fp16"}}])
def test_half_precision_is_chosen_by_the_device(settings, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = ddpo(**settings)
    assert trainer.accelerator.mixed_precision == "no" and caplog.text.count("fp16") == 1
    trainer.train(1)


@pytest.mark.parametrize("make", [ddpo, alignprop, grpo])
@pytest.mark.parametrize("launched_with", [None, "bf16"])
def test_without_a_precision_that_of_the_launch_is_used(make, launched_with, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if launched_with:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched_with)
    assert make(mixed_precision=None).accelerator.mixed_precision == (launched_with or "no")


@pytest.mark.parametrize("make", [ddpo, alignprop, grpo])
def test_bfloat16(make):
    """Frozen weights are bfloat16, those of the adapter and images are not; the first ratio is 1 up to rounding."""
    seen = []

    def reward(images, prompts, metadata):
        seen.append(images.dtype)
        return brightness(images, prompts, metadata)

    trainer = make(mixed_precision="bf16", reward=reward)
    trainer.train(1)
    assert {each.dtype for each in weights(trainer).values()} == {torch.float32} == set(seen)
    frozen = [each for each in trainer.policy.model.parameters() if not each.requires_grad]
    assert {each.dtype for each in frozen} == {torch.bfloat16}
    assert make is alignprop or trainer.log_history[1]["approx_kl"] < 1e-5


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "no", "bf16"])
def test_pipelines_of_float16_weights(lora, precision):
    """Without mixed precision, and in place of float16 on a CPU, all weights are float32; trained ones are in any case."""
    trainer = ddpo(pipeline(lora=lora, dtype=torch.float16), mixed_precision=precision)
    trainer.train(1)
    every = [*trainer.policy.model.parameters(), *trainer.sd_pipeline.vae.parameters()]
    half = {torch.bfloat16} if precision == "bf16" else set()
    assert {each.dtype for each in every} == {torch.float32} | half
    assert {each.dtype for each in weights(trainer).values()} == {torch.float32}


def test_float16_leaves_out_what_the_model_keeps_in_float32(monkeypatch):
    trainer = ddpo()
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    encoder = copy.deepcopy(trainer.sd_pipeline.text_encoder)
    encoder._keep_in_fp32_modules = ["fc2"]
    place_modules([encoder], trainer.accelerator)
    found = {name: value.dtype for name, value in encoder.named_parameters()}
    assert {dtype for name, dtype in found.items() if "fc2" in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if "fc2" not in name} == {torch.float16}


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_are_not_finite_are_an_error_and_end_the_run(kind, monkeypatch):
    model, closed = pipeline(), []
    monkeypatch.setattr(RunEvents, "close", lambda events: closed.append(events))
    model.vae.decoder.conv_out.bias.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="images"):
        KINDS[kind](model).train(1)
    assert len(closed) == 1


def test_black_images_are_counted(caplog):
    model = pipeline()
    model.vae.decoder.conv_out.bias.data.fill_(-100.0)
    trainer = ddpo(model, reward=lambda images, prompts, metadata: (list(range(len(images))), {}))
    with caplog.at_level(logging.WARNING):
        trainer.train(1)
    assert trainer.blank_images == 4 and trainer.log_history[0]["blank_images"] == 4
    assert sum("black" in record.message for record in caplog.records) == 1


def test_a_pipeline_of_the_users_own():
    """It has the members that the interface names, steps by itself, and chooses the timesteps when it is called."""

    class Own(DDPOStableDiffusionPipeline):
        steps = 0

        def __init__(self, inner):
            self._inner = inner

        def __call__(self, *args, **kwargs):
            self.scheduler.register_to_config(timestep_spacing="trailing")
            return self._inner(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def scheduler_step(self, *args, **kwargs):
            self.steps += 1
            return self._inner.scheduler_step(*args, **kwargs)

        def get_trainable_layers(self):
            return [each for each in self._inner.get_trainable_layers().parameters() if each.requires_grad]

    own = Own(pipeline())
    dropouts = [each for each in own.unet.modules() if isinstance(each, torch.nn.Dropout)]
    for each in dropouts:
        each.p = 0.5
    found = ddpo(own), ddpo(pipeline(timestep_spacing="trailing"))
    for trainer in found:
        trainer.train(1)
    assert dropouts and own.steps == 2 * 4 and "sd_pipeline" not in vars(own)
    assert all(torch.equal(value, weights(found[0])[name]) for name, value in weights(found[1]).items())


def test_adam_in_8_bits(monkeypatch):
    kinds = []
    module = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=lambda *args, **given: kinds.append(given) or torch.optim.AdamW(*args, **given)))  # fmt: skip
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    monkeypatch.setattr("trl.options.diffusion.is_bitsandbytes_available", lambda: True)
    ddpo(train_use_8bit_adam=True, train_adam_beta1=0.8)
    assert kinds[0]["betas"] == (0.8, 0.999) and kinds[0]["lr"] == 1e-3
    monkeypatch.setattr("trl.options.diffusion.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="bitsandbytes"):
        ddpo(train_use_8bit_adam=True)


def test_steps_without_noise_are_not_trained():
    model = pipeline()
    model.scheduler.register_to_config(steps_offset=0)
    trainer = ddpo(model)
    assert trainer.num_train_timesteps == 3
    trainer.train(1)
    assert all(np.isfinite(entry["loss"]) for entry in trainer.log_history[1:])


def test_advantages_of_a_batch_and_of_prompts():
    tracker = PerPromptStatTracker(buffer_size=3, min_count=2)
    first = tracker.update(["a", "a", "b"], np.array([1.0, 3.0, 5.0]))
    rewards = np.array([1.0, 3.0, 5.0])
    assert first == pytest.approx([-1 / (1 + 1e-6), 1 / (1 + 1e-6), (5 - rewards.mean()) / (rewards.std() + 1e-6)])
    tracker.update(("a", "a"), [5.0, 7.0])
    assert tracker.get_stats()["a"] == {"mean": 5.0, "std": pytest.approx(np.std([3, 5, 7])), "count": 3}


def test_rewards_with_a_small_spread_keep_their_digits():
    rewards = [10 + 1e-3 * number for number in (0, 3, 1, 7)]
    trainer = ddpo(reward=lambda images, *_: (rewards, {}))
    (found,), _ = trainer.compute_rewards([(torch.zeros(4, 3, 8, 8), ("a",) * 4, ({},) * 4)])
    assert found.tolist() == rewards
    images = SimpleNamespace(log_probs=torch.zeros(4, 1, dtype=torch.float64))
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-8)
    assert trainer.advantages(images, found).numpy() == pytest.approx(expected, abs=1e-10)


def test_calculate_loss_by_hand():
    trainer = ddpo(train_clip_range=0.1)
    images = trainer.sample_images(0)
    embeds = trainer.policy.training_embeds(tuple(each[:2] for each in images.conditions))
    shift, advantages = torch.tensor([0.3, -0.3]), torch.tensor([1.0, 9.0])
    loss, approx_kl, clipfrac = trainer.calculate_loss(
        images.latents[:2, 1], images.timesteps[:2, 1], images.latents[:2, 2], images.log_probs[:2, 1] - shift,
        advantages, embeds,
    )  # fmt: skip
    ratio = shift.exp()
    assert float(loss) == pytest.approx(-(1.1 + 5 * float(ratio[1])) / 2, rel=1e-5)
    assert float(approx_kl) == pytest.approx(0.045, rel=1e-4) and float(clipfrac) == 1


def test_the_card_and_the_folder(tmp_path):
    trainer = ddpo(project_kwargs={"project_dir": str(tmp_path)})
    trainer.create_model_card("my-model", tags="pictures")
    card = (tmp_path / "README.md").read_text()
    assert "library_name: diffusers" in card and "- pictures" in card and "2305.13301" in card
    assert "from its initial weights" in card and 'from_pretrained(".")' in card
    assert "| train_clip_range | 0.0001 |" in card
    trainer.save_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "load_lora_weights" in card and "# model\n" in card
    assert (tmp_path / "model" / "pytorch_lora_weights.safetensors").exists()


def test_the_card_of_a_repository(tmp_path, monkeypatch):
    """It names the pipeline that was trained, also one that was loaded by diffusers, and loads the repository."""
    from diffusers import StableDiffusionPipeline

    cards = []

    def upload(self, folder_path, repo_id):
        cards.append((Path(folder_path) / "README.md").read_text())
        return f"https://hub/{repo_id}"

    monkeypatch.setattr(HfApi, "create_repo", lambda *args, **kwargs: SimpleNamespace(repo_id="me/bright"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    tiny_pipeline().save_pretrained(tmp_path)
    trainer = ddpo(StableDiffusionPipeline.from_pretrained(tmp_path))
    assert trainer.push_to_hub("bright") == "https://hub/me/bright"
    assert 'load_lora_weights("me/bright"' in cards[0] and "# bright\n" in cards[0] and f"`{tmp_path}`" in cards[0]


def test_trackers(tmp_path, monkeypatch):
    """The hook is called on the main process alone, which has the tracker."""
    trainer = ddpo(log_with="tensorboard", logdir=str(tmp_path))
    seen = []
    trainer.image_samples_callback = lambda images, step, tracker: seen.append(tracker.name)
    trainer.train(1)
    trainer.accelerator.end_training()
    monkeypatch.setattr(Accelerator, "is_main_process", False)
    trainer._show_images([], 1)
    assert seen == ["tensorboard"] and any("events" in path.name for path in tmp_path.rglob("*"))


def test_a_reward_may_change_the_working_directory_but_not_exit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def wandering(images, prompts, metadata):
        os.chdir(tmp_path / "elsewhere")
        return brightness(images, prompts, metadata)

    ddpo(reward=wandering, save_freq=1, logdir="logs", sample_num_steps=2).train(2)
    assert (tmp_path / "logs" / "checkpoints" / "checkpoint_1").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())

    async def leaving(images, prompts, metadata):
        sys.exit(3)

    for reward in (leaving, lambda *given: sys.exit(3)):
        with pytest.raises(RewardError, match=r"called sys.exit\(3\), which does not end a run"):
            ddpo(reward=reward, sample_num_steps=2).train(1)


def test_configs_as_plain_values():
    config = DDPOConfig(project_kwargs={"project_dir": "here"}, train_learning_rate="1e-4")  # type: ignore[arg-type]
    values = config.to_dict()
    assert (
        values["seed"] == 0 and values["project_kwargs/project_dir"] == "here" and values["train_learning_rate"] == 1e-4
    )
    assert json.loads(json.dumps(AlignPropConfig().to_dict()))["truncated_rand_backprop_minmax"] == [0, 50]
    options = ["--truncated_rand_backprop_minmax", "0", "20", "--project_kwargs", '{"project_dir": "there"}']
    (config,) = TrlParser([AlignPropConfig]).parse_args_and_config(options)
    assert config.truncated_rand_backprop_minmax == (0, 20)
    assert config.project_kwargs == {"project_dir": "there"}


def test_alignprop_steps_and_its_hook():
    seen = []
    trainer = alignprop(
        log_image_freq=2, hook=lambda *given: seen.append(given), train_gradient_accumulation_steps=2,
        reward=lambda images, prompts, metadata: (images.half().mean(dim=(1, 2, 3)), {}),
    )  # fmt: skip
    start = weights(trainer)
    trainer.train(2)
    ((images, step, _),) = seen
    assert step == 2 and set(images) == {"images", "prompts", "prompt_metadata", "rewards"}
    assert not images["images"].requires_grad and images["rewards"].shape == (2,)
    assert images["rewards"].dtype == torch.float32
    entry = trainer.log_history[0]
    assert entry["loss"] == pytest.approx(10 - entry["reward_mean"], rel=1e-6)
    assert any(not torch.equal(value, start[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("model", [tiny_sd3, tiny_flux])
def test_alignprop_of_a_flow(model):
    """Without noise and a late gradient; brightness rises."""
    settings = {"noise_level": 0.0, "resolution": 64, "train_learning_rate": 1e-2, "train_batch_size": 4}
    trainer = alignprop(FlowPipeline(model()), **settings, truncated_backprop_rand=False, truncated_backprop_timestep=2)
    trainer.train(3)
    rewards = [entry["reward_mean"] for entry in trainer.log_history]
    assert rewards[0] < rewards[1] < rewards[2]
