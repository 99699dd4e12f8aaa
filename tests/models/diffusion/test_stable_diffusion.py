"""DDIM steps and Stable Diffusion pipelines as policies."""

import copy
import logging

import pytest
import torch

from tests.tiny_diffusion import PROMPTS, tiny_flux, tiny_pipeline, tiny_sd3
from trl.models.diffusion.ddim import deviations, scheduler_step
from trl.models.diffusion.flow import FlowPipeline, FlowPolicy
from trl.models.diffusion.policy import generator_of
from trl.models.diffusion.stable_diffusion import (
    DDIMPolicy,
    DefaultDDPOStableDiffusionPipeline,
    pipeline_step,
    pipeline_step_with_grad,
)
from trl.models.diffusion.trained import LORA_FILE


def policy(pipeline=None, **settings):
    wrapped = DefaultDDPOStableDiffusionPipeline(pipeline or tiny_pipeline(), use_lora=False)
    wrapped.set_progress_bar_config(disable=True)
    return DDIMPolicy(wrapped, **{"num_steps": 4, "noise": 1.0, "guidance_scale": 3.0, **settings})


def streams(count, seed=0):
    return [generator_of(seed, number) for number in range(count)]


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_a_step_is_that_of_diffusers_with_the_density_of_its_gaussian(prediction):
    scheduler = tiny_pipeline(prediction_type=prediction).scheduler
    scheduler.set_timesteps(4)
    x, output = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    for timestep in scheduler.timesteps.tolist():
        found = scheduler_step(scheduler, output, timestep, x, eta=0.7, generator=torch.Generator().manual_seed(1))
        theirs = scheduler.step(output, timestep, x, eta=0.7, generator=torch.Generator().manual_seed(1))
        # The tables are float32, and 1 - alpha is small at the last step.
        torch.testing.assert_close(found.latents, theirs.prev_sample, rtol=1e-4, atol=2e-5)
        normal = torch.distributions.Normal(found.mean, found.std.expand_as(found.mean))
        expected = normal.log_prob(found.latents).mean(dim=(1, 2, 3))
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-12, atol=0)
        given = scheduler_step(scheduler, output, torch.full((2,), timestep), x, eta=0.7, prev_sample=found.latents)
        assert torch.equal(given.log_probs, found.log_probs)


def test_a_step_without_noise_has_no_density():
    scheduler = tiny_pipeline().scheduler
    scheduler.register_to_config(steps_offset=0)  # diffusers' pipeline sets 1
    scheduler.set_timesteps(4)
    assert scheduler.timesteps[-1] == 0 and (deviations(scheduler, scheduler.timesteps, 1.0) > 0).tolist() == [True] * 3 + [False]  # fmt: skip
    output = torch.randn(2, 4, 8, 8, requires_grad=True)
    found = scheduler_step(scheduler, output, 0, torch.randn(2, 4, 8, 8), eta=1.0)
    found.log_probs.sum().backward()
    assert found.log_probs.tolist() == [0, 0] and torch.count_nonzero(output.grad) == 0


@pytest.mark.parametrize(("given", "message"), [
    ({"generator": torch.Generator(), "prev_sample": torch.zeros(1, 4, 8, 8)}, "generator and prev_sample"),
    ({}, "set_timesteps"),
])  # fmt: skip
def test_refused_steps(given, message):
    scheduler = tiny_pipeline().scheduler
    if given:
        scheduler.set_timesteps(4)
    x = torch.zeros(1, 4, 8, 8)
    with pytest.raises(ValueError, match=message):
        scheduler_step(scheduler, x, 1, x, **given)


def test_a_deterministic_trajectory_is_that_of_diffusers():
    pipeline = tiny_pipeline(dtype=torch.float64)
    pipeline.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 4, "guidance_scale": 3.0, "eta": 0.0, "negative_prompt": ["a cat"] * 2}
    own = pipeline_step(pipeline, PROMPTS[:2], generator=streams(2), output_type="np", **settings)
    theirs = pipeline(PROMPTS[:2], generator=streams(2), output_type="np", **settings)
    assert abs(own.images - theirs.images).max() < 1e-6  # the scheduler's table is float32
    assert len(own.latents) == 5 and len(own.log_probs) == 4 and own.images.shape == (2, 32, 32, 3)
    sampler = policy(pipeline, noise=0.0, negative_prompt="a cat")
    sampled = sampler.sample(sampler.embed(PROMPTS[:2]), streams(2)).images
    torch.testing.assert_close(sampled.permute(0, 2, 3, 1), torch.from_numpy(own.images).to(sampled), rtol=0, atol=1e-6)


def test_images_depend_on_their_own_stream_alone():
    own = policy(tiny_pipeline(dtype=torch.float64))
    whole = own.sample(own.embed(PROMPTS), streams(4))
    part = own.sample(own.embed(PROMPTS[2:3]), streams(4)[2:3])
    torch.testing.assert_close(whole.images[2:3], part.images, rtol=1e-10, atol=1e-10)
    assert whole.latents.shape == (4, 5, 4, 8, 8) and whole.timesteps[0].tolist() == [751, 501, 251, 1]
    torch.testing.assert_close(own.decode(whole.latents[:, -1]), whole.images)
    assert own.random_steps().all()


@pytest.mark.parametrize("trains_guidance", [True, False])
def test_steps_scored_again_have_the_sampled_log_probs(trains_guidance):
    own = policy(trains_guidance=trains_guidance)
    conditions = own.embed(PROMPTS)
    found = own.sample(conditions, streams(4))
    for number in range(4):
        rows = slice(1, 3)
        embeds = own.training_embeds(tuple(each[rows] for each in conditions))
        step = own.step(
            found.latents[rows, number],
            found.timesteps[rows, number],
            found.latents[rows, number + 1],
            embeds,
        )
        ratio = (step.log_probs - found.log_probs[rows, number]).exp()
        assert (ratio - 1).abs().max() < 1e-6


def flow_policy(make):
    return FlowPolicy(
        FlowPipeline(make(dtype=torch.float64), use_lora=False), num_steps=4, noise=0.7, guidance_scale=3.0, resolution=32
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (tiny_pipeline, 0),
        (tiny_pipeline, 2),
        (tiny_pipeline, 3),
        (tiny_sd3, 0),
        (tiny_sd3, 2),
        (tiny_flux, 3),
    ],
)
def test_the_gradient_through_the_sampler_is_that_of_finite_differences(make, first):
    """Of the truncated gradient: outputs of earlier steps are held at those of the unchanged weights."""
    own = policy(make(dtype=torch.float64)) if make is tiny_pipeline else flow_policy(make)
    model, conditions = own.model, own.embed(PROMPTS[:1])
    weight = (model.conv_out if make is tiny_pipeline else model.proj_out).weight
    direction = torch.randn_like(weight)
    frozen, forward, calls = copy.deepcopy(model), model.forward, []

    def held(*args, **kwargs):
        """The model, with the first weights for calls before `first`."""
        calls.append(0)
        return (frozen if len(calls) <= first else forward)(*args, **kwargs)

    def brightness(shift):
        calls.clear()
        with torch.no_grad():
            weight.add_(shift * direction)
        model.forward = held
        value = own.sample(conditions, streams(1)).images.mean()
        model.forward = forward
        with torch.no_grad():
            weight.sub_(shift * direction)
        return value

    found = own.sample(conditions, streams(1), first)
    (gradient,) = torch.autograd.grad(found.images.mean(), weight)
    size = 1e-5
    expected = (brightness(size) - brightness(-size)) / (2 * size)
    assert float((gradient * direction).sum()) == pytest.approx(float(expected), rel=1e-5)


def test_recomputing_changes_no_gradient():
    pipeline, gradients = tiny_pipeline(), []
    pipeline.set_progress_bar_config(disable=True)
    for recomputes in (True, False):
        images = pipeline_step_with_grad(
            pipeline, PROMPTS[:1], generator=streams(1), num_inference_steps=3, gradient_checkpoint=recomputes,
            truncated_backprop=False, output_type="pt",
        ).images  # fmt: skip
        gradients += torch.autograd.grad(images.mean(), pipeline.unet.conv_out.weight)
    torch.testing.assert_close(*gradients)


def test_a_trajectory_has_one_step_from_which_gradients_flow():
    pipeline = tiny_pipeline()
    pipeline.set_progress_bar_config(disable=True)
    settings = {"prompt": PROMPTS[:1], "num_inference_steps": 4, "output_type": "pt"}
    found = pipeline_step_with_grad(pipeline, truncated_rand_backprop_minmax=(3, 50), **settings)
    assert found.images.requires_grad  # drawn as the last step
    with pytest.raises(ValueError, match="truncated_backprop_timestep"):
        pipeline_step_with_grad(pipeline, truncated_backprop_rand=False, **settings)


def test_long_prompts_are_cut_and_counted(caplog):
    own = policy()
    with caplog.at_level(logging.WARNING):
        own.embed(["a dog", "a very long prompt of many letters"])
        own.embed(["another very long prompt of many letters"])
    assert own.cut_prompts == 2 and sum("are cut" in record.message for record in caplog.records) == 1


def test_refused_policies():
    with pytest.raises(ValueError, match="sample_eta"):
        policy(noise=0.0).random_steps()
    from diffusers import PNDMScheduler

    own = DefaultDDPOStableDiffusionPipeline(tiny_pipeline())
    own.sd_pipeline.scheduler = PNDMScheduler.from_config(own.scheduler.config)
    with pytest.raises(ValueError, match="DDIMScheduler"):
        DDIMPolicy(own, num_steps=4, noise=1.0, guidance_scale=1.0).random_steps()
    with pytest.raises(TypeError, match="StableDiffusionPipeline"):
        DefaultDDPOStableDiffusionPipeline(tiny_sd3())


def test_a_folder_without_an_adapter_is_told(tmp_path, caplog):
    tiny_pipeline().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not DefaultDDPOStableDiffusionPipeline(str(tmp_path), use_lora=False).use_lora
        assert LORA_FILE not in caplog.text
        assert DefaultDDPOStableDiffusionPipeline(str(tmp_path)).use_lora
    assert f"{tmp_path} has no {LORA_FILE}" in caplog.text


def test_a_saved_pipeline_has_its_adapter_and_its_own_base(tmp_path):
    """diffusers alone loads base and adapter; so does the pipeline's class."""
    from diffusers import StableDiffusionPipeline

    base = tiny_pipeline()
    kept = {name: value.clone() for name, value in base.unet.state_dict().items()}
    own = DefaultDDPOStableDiffusionPipeline(base)
    own.set_progress_bar_config(disable=True)
    for name, parameter in own.get_trainable_layers().named_parameters():
        if parameter.requires_grad:
            assert "lora_" in name
            parameter.data = torch.randn_like(parameter) / 10
    settings = {"num_inference_steps": 2, "output_type": "pt"}
    images = own(PROMPTS[:1], generator=streams(1), **settings).images
    own.save_pretrained(tmp_path)
    plain = StableDiffusionPipeline.from_pretrained(tmp_path)
    assert all(torch.equal(value, kept[name]) for name, value in plain.unet.state_dict().items())
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline"))
    again = DefaultDDPOStableDiffusionPipeline(str(tmp_path), use_lora=False)
    again.set_progress_bar_config(disable=True)
    assert again.use_lora and (tmp_path / LORA_FILE).exists()
    torch.testing.assert_close(again(PROMPTS[:1], generator=streams(1), **settings).images, images)
    names = [name for name, each in again.get_trainable_layers().named_parameters() if each.requires_grad]
    assert names and all("lora_" in name for name in names)
