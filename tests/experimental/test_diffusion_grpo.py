"""GRPO for diffusion models, and rectified flows as policies."""

import dataclasses
import logging

import numpy as np
import pytest
import torch

from tests.tiny_diffusion import PROMPTS, tiny_flux, tiny_pipeline, tiny_sd3
from tests.trainer.diffusion_runs import weights
from trl import DDPOConfig
from trl.experimental.diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, FlowPipeline
from trl.models.diffusion.flow import FlowPolicy, flow_step
from trl.models.diffusion.policy import generator_of
from trl.models.diffusion.stable_diffusion import DefaultDDPOStableDiffusionPipeline
from trl.rewards import jpeg_compressibility
from trl.rewards.images import image_sources
from trl.rewards.judges import BasePairwiseJudge
from trl.rewards.result import RewardError, RewardInputs

MODELS = {"ddim": tiny_pipeline, "sd3": tiny_sd3, "flux": tiny_flux}
ROWS = [{"prompt": prompt, "target": number / 4} for number, prompt in enumerate(PROMPTS)]

SMALL = {"num_steps": 4, "noise": 0.7, "guidance_scale": 4.5, "resolution": 32}


def streams(count):
    return [generator_of(0, number) for number in range(count)]


def near_target(images, target, **_):
    return [-abs(float(image.mean()) - each) for image, each in zip(images, target, strict=True)]


def wrapped(kind, *, lora=True, **more):
    pipeline = MODELS[kind](**more)
    return (DefaultDDPOStableDiffusionPipeline if kind == "ddim" else FlowPipeline)(pipeline, use_lora=lora)


def make(kind="sd3", reward=near_target, *, lora=True, model=None, **settings):
    config = {
        "sample_num_steps": 4, "mixed_precision": "no", "save_freq": 0, "sample_guidance_scale": 2.0, "sample_batch_size": 4,
        "sample_num_batches_per_epoch": 2, "num_generations": 4, "train_batch_size": 4, "train_learning_rate": 1e-3,
        "resolution": None if kind == "ddim" else 32,
    }  # fmt: skip
    args = DiffusionGRPOConfig(**{**config, **settings})
    return DiffusionGRPOTrainer(model or wrapped(kind, lora=lora), reward, args, ROWS)


def test_a_step_of_the_stochastic_equation_by_hand():
    x, v = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    sigma, after, level = 0.6, 0.4, 0.7
    now, then = torch.full((2,), sigma, dtype=torch.float64), torch.full((2,), after, dtype=torch.float64)
    found = flow_step(v, x, now, then, noise_level=level, first_sigma=0.9, generators=streams(2))
    square, dt = level**2 * sigma / (1 - sigma), after - sigma
    mean = x + (v + square / (2 * sigma) * (x + (1 - sigma) * v)) * dt
    torch.testing.assert_close(found.mean, mean, rtol=1e-12, atol=1e-12)
    expected = torch.distributions.Normal(mean, (square * -dt) ** 0.5).log_prob(found.latents).mean(dim=1)
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-12, atol=1e-12)
    plain = flow_step(v, x, now, then, noise_level=0.0, first_sigma=0.9)
    torch.testing.assert_close(plain.latents, x + v * dt, rtol=1e-12, atol=1e-12)
    first = flow_step(v, x, torch.ones(2), now, noise_level=level, first_sigma=0.9)
    assert first.std.flatten().tolist() == pytest.approx([level * (1 / 0.1 * 0.4) ** 0.5] * 2)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_without_noise_a_flow_is_that_of_diffusers(kind):
    pipeline = MODELS[kind]()
    policy = FlowPolicy(
        FlowPipeline(pipeline),
        num_steps=4,
        noise=0.0,
        guidance_scale=3.0,
        resolution=32,
        negative_prompt="a cat",
    )
    pipeline.set_progress_bar_config(disable=True)
    images = policy.sample(policy.embed(PROMPTS[:2]), streams(2)).images
    given = {"num_inference_steps": 4, "guidance_scale": 3.0, "height": 32, "width": 32, "output_type": "pt"}
    more = {"negative_prompt": ["a cat"] * 2} if kind == "sd3" else {}
    theirs = pipeline(PROMPTS[:2], generator=streams(2), **given, **more).images
    torch.testing.assert_close(images, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("settings", [{}, {"train_cfg": False}])
def test_the_first_optimiser_step_has_ratio_one(kind, settings):
    trainer = make(kind, train_gradient_accumulation_steps=2, train_num_inner_epochs=2, **settings)
    start = weights(trainer)
    trainer.train(1)
    rewards, first, second = trainer.log_history
    assert first["clipfrac"] == 0 and first["approx_kl"] < 1e-12 and second["approx_kl"] > 0
    assert rewards["tokens/trained"] == 2 * 4 * 4 and rewards["rewards/near_target/mean"] == pytest.approx(
        rewards["reward"]
    )
    assert any(not torch.equal(value, start[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize(("kind", "lora"), [("ddim", True), ("sd3", True), ("sd3", False)])
def test_the_penalty_is_the_divergence_from_the_model_before_training(kind, lora):
    trainer = make(kind, lora=lora, beta=0.1, train_learning_rate=1e-2)
    trainer.train(1)
    _, first, second = trainer.log_history
    assert first["kl"] == pytest.approx(0, abs=1e-12) and second["kl"] > 0
    images = trainer.sample_images(1)
    embeds = trainer.policy.training_embeds(tuple(each[:1] for each in images.conditions))
    given = (images.latents[:1, 1], images.timesteps[:1, 1], images.latents[:1, 2], embeds)
    found = trainer.policy.step(*given)
    with trainer.reference() as model:
        known = trainer.policy.step(*given, model)
    expected = ((found.mean - known.mean) ** 2 / (2 * found.std**2)).mean()
    assert trainer.penalty(found, *given).item() == pytest.approx(0.1 * expected.item(), rel=1e-5)
    assert trainer.policy.step(*given).log_probs == found.log_probs


@pytest.mark.parametrize(("kind", "dtype"), [("sd3", torch.float32), ("flux", torch.bfloat16)])
def test_half_precision_has_the_timesteps_of_diffusers(kind, dtype):
    policy, seen = FlowPolicy(wrapped(kind, lora=False, dtype=torch.bfloat16), **SMALL), []
    policy.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["timestep"].dtype), with_kwargs=True
    )
    policy.sample(policy.embed(PROMPTS[:1]), streams(1))
    assert set(seen) == {dtype}


@pytest.mark.parametrize(("kind", "count"), [("sd3", 2), ("flux", 0)])
def test_long_prompts_are_counted(kind, count, caplog):
    """Flux's T5 takes 512 tokens. Pipelines are told by their base class."""
    model = wrapped(kind)
    inner = model.sd_pipeline
    inner.__class__ = type("Own", (type(inner),), {})
    policy = FlowPolicy(model, **SMALL)
    filters = list(logging.getLogger(inner.encode_prompt.__module__).filters)
    assert FlowPolicy(model, **SMALL).is_flux == (kind == "flux")
    assert logging.getLogger(inner.encode_prompt.__module__).filters == filters
    diffusers_logger = logging.getLogger("diffusers")
    diffusers_logger.addHandler(caplog.handler)
    try:
        policy.embed(["a very long prompt of many letters", "a dog"])
        policy.embed(["another very long prompt of many letters"])
    finally:
        diffusers_logger.removeHandler(caplog.handler)
    assert policy.cut_prompts == count
    names = [record.name.partition(".")[0] for record in caplog.records]
    assert names.count("trl") == bool(count) and "diffusers" not in names


def test_modules_and_functions_of_ddpo_as_rewards():
    """A module scores float32 images in evaluation mode; a function of DDPO's form gets one dict for each image."""
    seen = []

    class Score(torch.nn.Module):
        def forward(self, images):
            assert not self.training and images.dtype == torch.float32 and torch.is_inference_mode_enabled()
            return images.mean(dim=(1, 2, 3))

    def of_ddpo(images, prompts, metadata):
        seen.append(metadata)
        return [0.0] * len(images), {}

    module, both = image_sources([Score(), of_ddpo])
    inputs = RewardInputs(["a", "b"], list(torch.ones(2, 3, 8, 8).half()), columns={"target": [1, 2]})
    assert module.name == "Score" and module.score(inputs).tolist() == [1, 1]
    both.score(inputs)
    both.score(dataclasses.replace(inputs, columns={}))
    assert seen == [({"target": 1}, {"target": 2}), ({}, {})]


def test_weights_do_not_depend_on_the_split():
    found = []
    for own in (
        {"train_gradient_accumulation_steps": 2},
        {"sample_batch_size": 8, "sample_num_batches_per_epoch": 1, "train_batch_size": 2, "train_gradient_accumulation_steps": 4},
    ):  # fmt: skip
        trainer = make(model=wrapped("sd3", dtype=torch.float64), beta=0.1, **own)
        trainer.train(1)
        found.append(weights(trainer))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-10, atol=1e-10)


def test_resuming_is_bit_exact(tmp_path):
    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 1, "beta": 0.1}
    whole = make(**settings)
    whole.train(3)
    resumed = make(**settings, resume_from=str(tmp_path / "checkpoints" / "checkpoint_1"))
    resumed.train(3)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())
    assert resumed.log_history == whole.log_history[-3:]
    whole.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "pytorch_lora_weights.safetensors").exists()


def test_a_saved_pipeline_is_loaded_with_its_adapter(tmp_path):
    own = wrapped("flux")

    def adapter(pipeline):
        parameters = pipeline.get_trainable_layers().named_parameters()
        return {name.replace("default_0", "default"): each for name, each in parameters if each.requires_grad}

    for parameter in adapter(own).values():
        parameter.data = torch.randn_like(parameter)
    own.save_pretrained(tmp_path)
    again = FlowPipeline(str(tmp_path), use_lora=False)
    found = adapter(again)
    assert again.use_lora and found.keys() == adapter(own).keys()
    assert all(torch.equal(found[name], value) for name, value in adapter(own).items())


def test_sources_and_images_without_a_reward():
    """An async function, one of DDPO's form, a judge of images, and a function without an opinion on a group."""

    class Brighter(BasePairwiseJudge):
        def judge(self, prompts, completions, shuffle_order=True):
            return [int(np.mean(second) > np.mean(first)) for first, second in completions]

    async def slow(images, **_):
        return [float(value) for value in images.mean(dim=(1, 2, 3))]

    def silent(prompts, **_):
        return [None if prompt == PROMPTS[0] else 1.0 for prompt in prompts]

    trainer = make(
        reward=[slow, jpeg_compressibility, Brighter(), silent],
        reward_weights=[1.0, 0.1, 1.0, 1.0],
        async_reward_computation=True,
    )
    trainer.train(1)
    entry = trainer.log_history[0]
    assert {"rewards/slow/mean", "rewards/jpeg_compressibility/mean", "rewards/Brighter/mean"} <= set(entry)
    assert entry["rewards/Brighter/mean"] == pytest.approx(0.5)
    alone = make(reward=silent)
    start = weights(alone)
    alone.train(2)  # every prompt once
    counts = alone.log_history[-3]
    assert counts["tokens/reward_failed"] == 4 * 4 and counts["tokens/zero_advantage"] == 3 * 4 * 4
    assert counts["frac_reward_zero_std"] == 1 and np.isfinite(counts["reward"])
    for name, value in weights(alone).items():  # AdamW's decay of 1e-4 alone, of the weights that are not 0
        torch.testing.assert_close(value, start[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("reward", "settings", "error", "message"), [
    (near_target, {"num_generations": 3}, ValueError, "sample_batch_size to 6"),
    (near_target, {"sample_num_steps": 1}, ValueError, "sample_num_steps >= 2"),
    (near_target, {"noise_level": 0.0}, ValueError, "noise_level"),
    (near_target, {"resolution": 60}, ValueError, "resolution .* Set 64"),
    ("a-model", {}, TypeError, "reward_funcs"),
    (lambda images, colour: [], {}, ValueError, "colour"),
    (near_target, {"model": torch.nn.Linear(1, 1)}, TypeError, "FlowPipeline"),
])  # fmt: skip
def test_refused(reward, settings, error, message):
    with pytest.raises(error, match=message):
        make(reward=reward, **settings)


def test_a_failing_reward_is_an_error_or_skipped():
    def broken(images, **_):
        raise OSError("no network")

    with pytest.raises(RewardError, match="no network"):
        make(reward=broken).train(1)
    trainer = make(reward=broken, reward_failure="skip")
    trainer.train(1)
    assert trainer.log_history[0]["tokens/reward_failed"] == 32
    for args, row in (
        (DiffusionGRPOConfig(), {"text": "a"}),
        (DiffusionGRPOConfig(), "a"),
        (DDPOConfig(), ROWS[0]),
    ):
        with pytest.raises((ValueError, TypeError), match="prompt" if row != ROWS[0] else "DiffusionGRPOConfig"):
            DiffusionGRPOTrainer(wrapped("sd3"), near_target, args, [row])
