"""The examples of diffusion models run with `--tiny`, and a small pipeline learns."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trl import AlignPropConfig, DDPOConfig
from trl.models.diffusion.stable_diffusion import DefaultDDPOStableDiffusionPipeline
from trl.rewards.images import jpeg_kilobytes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def run(monkeypatch):
    """Run a script of `examples/` in this process; returns its names."""
    before = set(sys.modules)

    def run_script(script, *options, name="__main__"):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [script, *options])
        return runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name=name)

    yield run_script
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(EXAMPLES)):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("script", "more"), [("ddpo", ["sample_num_batches_per_epoch", "3"]), ("alignprop", ["seed", "1"])]
)
def test_scripts_train_save_and_draw(script, more, run, tmp_path):
    options = [f"--{script}_config.{more[0]}", more[1], f"--{script}_config.train_max_grad_norm=0.5"]
    trainer = run(f"scripts/{script}", "--tiny", "--output_dir", str(tmp_path), *options)["trainer"]
    assert str(getattr(trainer.config, more[0])) == more[1] and trainer.config.train_max_grad_norm == 0.5
    assert len([entry for entry in trainer.log_history if "reward_mean" in entry]) == 3
    assert [*(tmp_path / "pictures").glob("*.png")] and (tmp_path / "README.md").exists()
    assert (tmp_path / "checkpoints" / "checkpoint_2").is_dir()
    assert DefaultDDPOStableDiffusionPipeline(str(tmp_path)).unet.peft_config


def test_a_small_pipeline_becomes_brighter(run):
    names = run("diffusion_rewards", name="diffusion_rewards")
    before, after, _ = names["run"]("alignprop", "brightness", 0, epochs=6)
    assert after > before + 0.02


def test_unknown_options_of_a_config_are_listed(run):
    with pytest.raises(SystemExit, match="train_batch_size"):
        run("scripts/ddpo", "--ddpo_config.batch_size=3")


def test_options_of_a_config_are_read_by_their_types(run, monkeypatch):
    shared = run("diffusion_options", name="diffusion_options")
    parse = shared["parse"]
    words = ["--a.train_batch_size=3", "--a.sample_batch_size", "6", "--tiny", "--a.per_prompt_stat_tracking"]
    monkeypatch.setattr(sys, "argv", ["ddpo", *words, '--a.project_kwargs={"total_limit": 2}'])
    arguments, ddpo = parse(shared["Arguments"], DDPOConfig, "a")
    assert arguments.tiny and (ddpo.train_batch_size, ddpo.sample_batch_size) == (3, 6)
    assert ddpo.mixed_precision == "no"  # of --tiny
    assert ddpo.per_prompt_stat_tracking and ddpo.project_kwargs == {"total_limit": 2}
    monkeypatch.setattr(
        sys, "argv", ["alignprop", "--a.truncated_rand_backprop_minmax", "1", "3", "--a.sample_num_steps=9"]
    )
    _, aligned = parse(shared["Arguments"], AlignPropConfig, "a")
    assert aligned.truncated_rand_backprop_minmax == (1, 3) and aligned.sample_num_steps == 9


@pytest.mark.parametrize(("name", "shape"), [("wandb", (1, 8, 6, 3)), ("tensorboard", (1, 3, 8, 6))])
def test_trackers_get_images_in_their_form(name, shape, run, tmp_path):
    seen = {}
    tracker = SimpleNamespace(name=name, log_images=lambda values, step: seen.update(values, step=step))
    images, prompts = torch.rand(2, 3, 8, 6), ("a cat", "a dog")
    run("diffusion_options", name="diffusion_options")["save_images"](images, prompts, 5, tracker, tmp_path)
    assert seen.pop("step") == 5 and list(seen) == ["0 a cat", "1 a dog"]
    assert all(value.shape == shape for value in seen.values())


@torch.no_grad()
def test_the_fourth_number_of_a_latent_is_its_contrast(run, tmp_path):
    pipeline = run("small_diffusion", name="small_diffusion")["small_pipeline"](
        tmp_path, side=8, has_contrast=True
    )
    latents = 5 * torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sizes = []
    for shift in (2.0, 0.0, -2.0):
        shifted = latents + shift * torch.tensor([0.0, 0.0, 0.0, 1.0]).view(4, 1, 1)
        images = pipeline.vae.decode(shifted).sample / 2 + 0.5
        sizes.append(sum(jpeg_kilobytes(images.clamp(0, 1))))
    assert sizes[2] < sizes[1] < sizes[0] and sizes[2] < 0.8 * sizes[0]
