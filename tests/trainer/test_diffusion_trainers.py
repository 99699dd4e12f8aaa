"""DDPO and AlignProp: their steps, invariances, resuming, and what they refuse."""

import copy
import json
import logging
import shutil
import threading

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from tests.tiny_diffusion import PROMPTS, tiny_pipeline
from tests.trainer.diffusion_runs import (
    KINDS,
    alignprop,
    brightness,
    ddpo,
    drawn,
    pipeline,
    weights,
)
from tests.two_processes import launch
from trl import AlignPropConfig, DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline, TrlParser
from trl.checkpoints.wholeness import CheckpointError
from trl.rewards.result import RewardError
from trl.trainer.utils import PerPromptStatTracker

SAME = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    "settings", [{}, {"train_cfg": False}, {"train_timestep_fraction": 0.5}, {"sample_guidance_scale": 1.0}]
)
def test_the_first_optimiser_step_has_ratio_one(settings):
    trainer = ddpo(train_gradient_accumulation_steps=2, train_num_inner_epochs=2, **settings)
    trainer.train(2)
    first, second = trainer.log_history[1], trainer.log_history[2]
    # The clipped share at a range of 1e-4; log-probs differ by no more than rounding.
    assert first["clipfrac"] == 0 and first["approx_kl"] < 1e-12 and first["inner_epoch"] == 0
    assert second["approx_kl"] > 0 and second["inner_epoch"] == 1
    assert [entry["step"] for entry in trainer.log_history] == [0, 1, 2, 2, 3, 4]


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
        trainer = ddpo(
            pipeline(dtype=torch.float64), train_clip_range=10.0, train_timestep_fraction=0.5, **own
        )
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
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(kind, tmp_path):
    launch("tests.trainer.diffusion_runs", kind, str(tmp_path))
    found = torch.load(tmp_path / "weights.pt")
    own = {"train_gradient_accumulation_steps": 2} if kind == "ddpo" else {}
    trainer = KINDS[kind](pipeline(dtype=torch.float64), prompts=lambda: (PROMPTS[0], {}), **own)
    trainer.train(1)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, found[name], **SAME)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [True, False])
def test_resuming_is_bit_exact(kind, lora, tmp_path):
    """With prompts drawn by a global generator, rewards remembered by prompt, and inner epochs."""
    more = {
        "per_prompt_stat_tracking": True,
        "per_prompt_stat_tracking_min_count": 2,
        "train_num_inner_epochs": 2,
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
    latest = KINDS[kind](pipeline(lora=lora), prompts=drawn, **settings, resume_from=str(tmp_path))
    assert latest.first_epoch == 4
    assert all(torch.equal(value, whole[name]) for name, value in weights(latest).items())


def test_checkpoints_that_cannot_be_resumed(tmp_path, caplog):
    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 2}
    ddpo(**settings).train(4)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_2", "checkpoint_3"]
    other = pipeline()
    other.sd_pipeline.unet = type(other.unet).from_config(
        {**other.unet.config, "block_out_channels": (32, 32)}
    )
    for trainer, model in ((ddpo, other), (alignprop, None), (ddpo, pipeline(lora=False))):
        with pytest.raises(CheckpointError):
            trainer(model, **settings, resume_from=str(tmp_path))
    with pytest.raises(ValueError, match="resume_from"):
        ddpo(resume_from=str(tmp_path / "nothing"))
    next((folder / "checkpoint_3").glob("optimizer*")).unlink()
    with caplog.at_level(logging.WARNING):
        assert ddpo(**settings, resume_from=str(tmp_path)).first_epoch == 3
    assert "not whole" in caplog.text


def test_a_run_keeps_its_own_checkpoints(tmp_path, caplog):
    """Another run's do not count, also those after the one that a run resumes from."""
    folder = tmp_path / "checkpoints"
    settings = {"project_kwargs": {"project_dir": str(tmp_path)}, "save_freq": 1, "num_checkpoint_limit": 2}
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


def test_a_hook_that_samples_images_changes_nothing():
    ended = []
    for steps in (0, 2):
        trainer = ddpo(hook=lambda *given, steps=steps: steps and show(steps))

        def show(steps, pipeline=trainer.sd_pipeline):
            pipeline("a dog", num_inference_steps=steps, generator=torch.Generator(), output_type="pt")

        trainer.train(1)
        ended.append(weights(trainer))
    assert all(torch.equal(value, ended[0][name]) for name, value in ended[1].items())


def test_async_rewards_overlap_with_sampling():
    """The first batch's rewards wait until the second batch is sampled; both finish."""
    sampled, started = threading.Event(), []

    class Counting(DDPOTrainer):
        def draw_prompts(self, epoch, batch):
            if batch == 1:
                sampled.set()
            return super().draw_prompts(epoch, batch)

    async def reward(images, prompts, metadata):
        started.append(sampled.wait(timeout=60))
        return images.mean(dim=(1, 2, 3)).tolist(), {"count": len(images)}

    seen = []
    trainer = ddpo(
        reward=reward, kind=Counting, async_reward_computation=True, hook=lambda *given: seen.append(given)
    )
    trainer.train(1)
    (images, step, tracker), = seen  # fmt: skip
    assert started == [True, True] and step == 0 and tracker is None and len(images) == 2
    shown, prompts, metadata, rewards, reward_metadata = images[1]
    assert shown.shape == (2, 3, 64, 64) and prompts == tuple(PROMPTS[2:]) and reward_metadata == {"count": 2}
    assert metadata == ({}, {})
    torch.testing.assert_close(rewards, shown.mean(dim=(1, 2, 3)))
    pairs = [(shown, prompts, metadata)] * 2
    assert len(trainer.compute_rewards(pairs, is_async=True)[0]) == 2


@pytest.mark.parametrize(
    ("kind", "reward", "error"),
    [
        (ddpo, lambda i, p, m: ([1.0], {}), RewardError),
        (ddpo, lambda i, p, m: ([1.0, float("nan")], {}), RewardError),
        (ddpo, lambda i, p, m: ([1.0, None], {}), RewardError),
        (ddpo, lambda i, p, m: (["a", 1.0], {}), RewardError),
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
        (alignprop, {"truncated_backprop_rand": False}, "truncated_backprop_timestep"),
    ],
)
def test_refused_settings(kind, settings, name):
    with pytest.raises(ValueError, match=name):
        kind(**settings)


def test_refused_prompts_and_configs():
    with pytest.raises(TypeError, match="prompt_function"):
        ddpo(prompts=lambda: "a prompt alone").train(1)
    with pytest.raises(TypeError, match="DDPOConfig"):
        DDPOTrainer(AlignPropConfig(), brightness, lambda: ("a", {}), pipeline())


def test_half_precision_is_chosen_by_the_device(caplog):
    with caplog.at_level(logging.WARNING):
        trainer = ddpo(mixed_precision="fp16")
    assert trainer.accelerator.mixed_precision == "no" and "fp16" in caplog.text
    trainer.train(1)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind):
    """Frozen weights are bfloat16, those of the adapter and images are not; the first ratio is 1 up to rounding."""
    seen = []

    def reward(images, prompts, metadata):
        seen.append(images.dtype)
        return brightness(images, prompts, metadata)

    trainer = KINDS[kind](mixed_precision="bf16", reward=reward)
    trainer.train(1)
    assert {each.dtype for each in weights(trainer).values()} == {torch.float32} == set(seen)
    assert trainer.policy.model.conv_in.weight.dtype == torch.bfloat16
    assert kind != "ddpo" or trainer.log_history[1]["approx_kl"] < 1e-5


def test_float16_leaves_out_what_the_model_keeps_in_float32(monkeypatch):
    trainer = ddpo()
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    encoder = copy.deepcopy(trainer.sd_pipeline.text_encoder)
    encoder._keep_in_fp32_modules = ["fc2"]
    trainer._place([encoder], trainer.sd_pipeline)
    found = {name: value.dtype for name, value in encoder.named_parameters()}
    assert {dtype for name, dtype in found.items() if "fc2" in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if "fc2" not in name} == {torch.float16}


@pytest.mark.parametrize("kind", KINDS)
def test_images_that_are_not_finite_are_an_error(kind):
    model = pipeline()
    model.vae.decoder.conv_out.bias.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="images"):
        KINDS[kind](model).train(1)


def test_black_images_are_counted(caplog):
    model = pipeline()
    model.vae.decoder.conv_out.bias.data.fill_(-100.0)
    trainer = ddpo(model, reward=lambda images, prompts, metadata: (list(range(len(images))), {}))
    with caplog.at_level(logging.WARNING):
        trainer.train(1)
    assert trainer.blank_images == 4 and trainer.log_history[0]["blank_images"] == 4
    assert sum("black" in record.message for record in caplog.records) == 1


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
    assert first == pytest.approx(
        [-1 / (1 + 1e-6), 1 / (1 + 1e-6), (5 - rewards.mean()) / (rewards.std() + 1e-6)]
    )
    tracker.update(("a", "a"), [5.0, 7.0])
    assert tracker.get_stats()["a"] == {"mean": 5.0, "std": pytest.approx(np.std([3, 5, 7])), "count": 3}


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
    trainer.save_pretrained(tmp_path / "model")
    assert "load_lora_weights" in (tmp_path / "model" / "README.md").read_text()
    assert (tmp_path / "model" / "pytorch_lora_weights.safetensors").exists()


def test_trackers(tmp_path):
    trainer = ddpo(log_with="tensorboard", logdir=str(tmp_path))
    seen = []
    trainer.image_samples_callback = lambda images, step, tracker: seen.append(tracker.name)
    trainer.train(1)
    trainer.accelerator.end_training()
    assert seen == ["tensorboard"] and any("events" in path.name for path in tmp_path.rglob("*"))


def test_what_trackers_are_told(monkeypatch):
    """The run's name beside other settings of wandb's; no key of an account among the hyperparameters."""
    told = {}
    monkeypatch.setattr(
        Accelerator,
        "init_trackers",
        lambda self, name, config, init_kwargs: told.update(config, kwargs=init_kwargs),
    )
    monkeypatch.setattr("accelerate.accelerator.filter_trackers", lambda *given: [])
    ddpo(log_with="wandb", run_name="first", tracker_kwargs={"wandb": {"api_key": "s3cret"}})
    assert told.pop("kwargs") == {"wandb": {"name": "first", "api_key": "s3cret"}}
    assert told["run_name"] == "first" and "s3cret" not in str(told)


def test_configs_as_plain_values():
    config = DDPOConfig(project_kwargs={"project_dir": "here"}, train_learning_rate="1e-4")  # type: ignore[arg-type]
    values = config.to_dict()
    assert (
        values["seed"] == 0
        and values["project_kwargs/project_dir"] == "here"
        and values["train_learning_rate"] == 1e-4
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
