"""Runs of DDPO, AlignProp and GRPO on tiny pipelines; as a program, one of two processes."""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from tests.tiny_diffusion import PROMPTS, tiny_pipeline, tiny_sd3
from trl import AlignPropConfig, AlignPropTrainer, DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.experimental.diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, FlowPipeline
from trl.models import step_state


def brightness(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3)), {}


def in_turn(count=4):
    """A prompt function that takes the first prompts in turn; a process of two takes its own of them."""
    drawn = iter(range(10**9))
    return lambda: (PROMPTS[next(drawn) % count], {})


def drawn():
    """A prompt, drawn by Python's and numpy's generators."""
    return PROMPTS[random.randrange(2) + 2 * int(np.random.randint(2))], {}


def pipeline(*, lora=True, dtype=torch.float32, seed=0, **more):
    """With `lora`, an adapter whose weights are not 0."""
    return DefaultDDPOStableDiffusionPipeline(tiny_pipeline(seed, dtype=dtype, **more), use_lora=lora)


SHARED = {"sample_num_steps": 4, "mixed_precision": "no", "save_freq": 0, "sample_guidance_scale": 2.0}
DDPO = {
    "sample_batch_size": 2,
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 2,
    "train_learning_rate": 1e-3,
}


def ddpo(model=None, *, reward=brightness, prompts=None, hook=None, kind=DDPOTrainer, **settings):
    config = DDPOConfig(**{**SHARED, **DDPO, **settings})
    return kind(config, reward, prompts or in_turn(), model or pipeline(), hook)


def alignprop(model=None, *, reward=brightness, prompts=None, hook=None, **settings):
    own = {"truncated_rand_backprop_minmax": (0, 3), "train_batch_size": 2}
    config = AlignPropConfig(**{**SHARED, **own, **settings})
    return AlignPropTrainer(config, reward, prompts or in_turn(), model or pipeline(), hook)


def grpo(model=None, *, reward=brightness, prompts=None, **settings):
    """Of a flow model."""
    own = {"num_generations": 2, "beta": 0.1, "train_timestep_fraction": 0.5, "resolution": 32}
    config = DiffusionGRPOConfig(**{**SHARED, **DDPO, **own, **settings})
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    return DiffusionGRPOTrainer(model or FlowPipeline(tiny_sd3()), reward, config, rows)


KINDS = {"ddpo": ddpo, "alignprop": alignprop}


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters() if p.requires_grad}


def in_float64(kind, **settings):
    model = FlowPipeline(tiny_sd3(dtype=torch.float64)) if kind == "grpo" else pipeline(dtype=torch.float64)
    return {**KINDS, "grpo": grpo}[kind](model, **{"prompts": lambda: (PROMPTS[0], {}), **settings})


# The same images and optimiser steps in two processes and in one.
IN_TWO = {
    "ddpo": {"sample_batch_size": 1, "train_batch_size": 1, "train_gradient_accumulation_steps": 2},
    "alignprop": {"train_batch_size": 1},
    "grpo": {"train_gradient_accumulation_steps": 2},
}
IN_ONE = {
    "ddpo": {"train_gradient_accumulation_steps": 2},
    "alignprop": {},
    "grpo": {"sample_batch_size": 4, "train_batch_size": 4, "train_gradient_accumulation_steps": 2},
}


def of_two(kind: str, folder: str) -> None:
    """One epoch in float64; then a run that is resumed and one that is not end with the same bits."""
    own = IN_TWO[kind]
    trainer = in_float64(kind, **own)
    trainer.train(1)
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer), Path(folder) / "weights.pt")
    saved = {"project_kwargs": {"project_dir": folder}, "save_freq": 1, "prompts": drawn, **own}
    if kind != "alignprop":  # whose gradient begins at the third step at the latest
        saved["sample_num_steps"] = 2
    whole = in_float64(kind, **saved)
    whole.train(3)
    resumed = in_float64(kind, **saved, resume_from=f"{folder}/checkpoints/checkpoint_1")
    resumed.train(3)
    assert resumed.first_epoch == 2
    ended = weights(resumed)
    assert all(torch.equal(value, ended[name]) for name, value in weights(whole).items())


def saved_in(folder, **settings):
    project = {"project_dir": folder}
    own = {"sample_num_steps": 2, "prompts": drawn, "per_prompt_stat_tracking": True}
    return ddpo(project_kwargs=project, save_freq=1, **own, **settings)


def killed(kind: str, folder: str) -> None:
    """A run that is killed while it writes its second checkpoint."""
    publish, published = step_state.publish, []

    def publish_or_die(*args, **kwargs):
        if published:
            os.kill(os.getpid(), signal.SIGKILL)
        published.append(publish(*args, **kwargs))

    step_state.publish = publish_or_die
    saved_in(folder).train(4)


if __name__ == "__main__":
    (killed if sys.argv[1] == "killed" else of_two)(*sys.argv[1:])
