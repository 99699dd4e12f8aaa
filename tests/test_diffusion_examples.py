"""The examples of diffusion models run on a small pipeline, which learns."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

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
    options = [f"--{script}_config.{more[0]}", more[1], "--train_max_grad_norm=0.5"]
    tiny = run("tiny", name="tiny")
    trainer = tiny["run"](script, ["--output_dir", str(tmp_path), *options])["trainer"]
    assert str(getattr(trainer.config, more[0])) == more[1] and trainer.config.train_max_grad_norm == 0.5
    assert len([entry for entry in trainer.log_history if "reward_mean" in entry]) == 3
    assert [*(tmp_path / "pictures").glob("*.png")] and (tmp_path / "README.md").exists()
    assert (tmp_path / "checkpoints" / "checkpoint_2").is_dir()
    assert DefaultDDPOStableDiffusionPipeline(str(tmp_path)).unet.peft_config


def test_a_small_pipeline_becomes_brighter(run):
    names = run("diffusion_rewards", name="diffusion_rewards")
    before, after, _ = names["run"]("alignprop", "brightness", 0, epochs=6)
    assert after > before + 0.02


@torch.no_grad()
def test_the_fourth_number_of_a_latent_is_its_contrast(run, tmp_path):
    pipeline = run("small_diffusion", name="small_diffusion")["small_pipeline"](tmp_path, side=8, has_contrast=True)
    latents = 5 * torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sizes = []
    for shift in (2.0, 0.0, -2.0):
        shifted = latents + shift * torch.tensor([0.0, 0.0, 0.0, 1.0]).view(4, 1, 1)
        images = pipeline.vae.decode(shifted).sample / 2 + 0.5
        sizes.append(sum(jpeg_kilobytes(images.clamp(0, 1))))
    assert sizes[2] < sizes[1] < sizes[0] and sizes[2] < 0.8 * sizes[0]
