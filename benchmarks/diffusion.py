"""How an epoch of DDPO compares with a plain loop, and what truncation saves AlignProp: `python benchmarks/diffusion.py --help`.

Both sides sample the same images from the same noise. Each runs in a process of its own, on the pipeline of `examples/small_diffusion.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from benchmarks.memory import ROOT, Level
from benchmarks.tables import Result, table_row, write_figures
from diffusion_rewards import brightness, prompts_in_turn
from small_diffusion import small_pipeline
from torch import Tensor

from trl import AlignPropConfig, AlignPropTrainer, DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.rewards.images import jpeg_compressibility

SIDES = ("ours", "plain")
PHASES = ("sampling", "rewards", "training", "optimiser")
LEARNING_RATE, CLIP_RANGE, LARGEST_NORM = 3e-4, 1e-4, 1.0
COLUMNS = ["epoch of", *(f"{phase}, s" for phase in PHASES), "all, s", "/ plain", "growth, MB", "/ plain"]


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2, help="measured epochs, after one")
    parser.add_argument("--images", type=int, default=16, help="of an epoch, and of its optimiser step")
    parser.add_argument("--batch", type=int, default=8, help="images of a forward pass in training")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--side", type=int, default=16, help="of a latent; images have 64 x 64 pixels")
    parser.add_argument("--channels", type=int, nargs=2, default=[64, 128], help="of the UNet's two levels")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and one epoch, for the tests")
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    parser.add_argument("--only", help="internal: measure ours, plain, or AlignProp from this denoising step")
    args = parser.parse_args(arguments)
    if args.tiny:
        args.epochs, args.images, args.batch, args.steps, args.side, args.channels = 1, 4, 2, 3, 4, [32, 64]
    return args


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    args = parse(arguments)
    logging.getLogger("trl").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if args.only:
        found = measure(args, args.only) if args.only in SIDES else measure_alignprop(args, int(args.only))
        print(json.dumps(found))
        return [found]
    given = list(sys.argv[1:] if arguments is None else arguments)
    print(f"torch {torch.__version__}, fp32, 1 thread; CPU seconds, median of {args.epochs}; growth of memory\n")
    print(table_row(COLUMNS), table_row(["---"] * len(COLUMNS)), sep="\n")
    ours, plain = (in_own_process(given, side) for side in SIDES)
    check_same_work(ours, plain)
    for found in (plain, ours):
        seconds = [found["seconds"][phase] for phase in PHASES]
        all_of = sum(plain["seconds"].values())
        cells = [f"{each:.3f} ({each / sum(seconds):.0%})" for each in seconds]
        ratios = [f"{sum(seconds) / all_of:.3f}", f"{found['growth'] / plain['growth']:.2f}"]
        grown = f"{found['growth'] / 1e6:.0f}"
        print(table_row([found["side"], *cells, f"{sum(seconds):.2f}", ratios[0], grown, ratios[1]]))
    print(
        "\n" + table_row(["AlignProp, gradient from step", "s", "growth, MB"]),
        table_row(["---"] * 3),
        sep="\n",
    )
    results = [ours, plain]
    for first in (0, args.steps - 1):
        found = in_own_process(given, str(first))
        print(table_row([f"{first} of {args.steps}", f"{found['seconds']:.2f}", f"{found['growth'] / 1e6:.0f}"]))
        results.append(found)
    write_figures(results, args.out)
    return results


def in_own_process(given: list[str], only: str) -> Result:
    """What `measure` or `measure_alignprop` finds in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), *given, "--only", only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {only} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_same_work(ours: Result, plain: Result) -> None:
    """Raise ValueError unless rewards and gradient norms of the first two epochs agree to 1e-3."""
    for name in ("rewards", "norms"):
        pairs = zip(ours[name][:2], plain[name][:2], strict=True)
        if not all(math.isclose(mine, other, rel_tol=1e-3) for mine, other in pairs):
            raise ValueError(f"{name} of the first epochs must agree, got {ours[name]} and {plain[name]}.")


def pipeline_of(args: Namespace) -> Any:
    pipeline = small_pipeline(Path(mkdtemp()), side=args.side, channels=tuple(args.channels))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def settings_of(args: Namespace) -> dict[str, Any]:
    return {
        "sample_num_steps": args.steps, "sample_guidance_scale": 1.0, "mixed_precision": "no", "save_freq": 0,
        "train_learning_rate": LEARNING_RATE, "train_max_grad_norm": LARGEST_NORM, "train_batch_size": args.batch,
        "train_gradient_accumulation_steps": args.images // args.batch,
    }  # fmt: skip


class Ours:
    """`DDPOTrainer.step`, with the time of its phases."""

    def __init__(self, args: Namespace) -> None:
        config = DDPOConfig(
            **settings_of(args), sample_batch_size=args.images, sample_num_batches_per_epoch=1, train_clip_range=CLIP_RANGE
        )  # fmt: skip
        wrapped = DefaultDDPOStableDiffusionPipeline(pipeline_of(args), use_lora=False)
        self.trainer: Any = DDPOTrainer(config, jpeg_compressibility, prompts_in_turn(), wrapped)
        self.seconds, self.rewards, self.norms = dict.fromkeys(PHASES, 0.0), [], []
        trainer, update = self.trainer, self.trainer._update
        trainer.policy.embed = self.timed(trainer.policy.embed, "sampling")
        trainer.policy.sample = self.timed(trainer.policy.sample, "sampling")
        trainer.compute_rewards = self.timed(trainer.compute_rewards, "rewards")

        def step(number: int) -> None:
            self.norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in trainer._trained])))
            self.timed(update, "optimiser")(number)

        trainer._update = step

    def timed(self, function: Any, phase: str) -> Any:
        def call(*given: Any) -> Any:
            start = time.process_time()
            found = function(*given)
            self.seconds[phase] += time.process_time() - start
            return found

        return call

    def epoch(self, number: int) -> dict[str, float]:
        self.seconds, start = dict.fromkeys(PHASES, 0.0), time.process_time()
        self.trainer.step(number, number)
        self.seconds["training"] = time.process_time() - start - sum(self.seconds.values())
        self.rewards += [entry["reward_mean"] for entry in self.trainer.log_history[-2:] if "reward_mean" in entry]
        return self.seconds


class Plain:
    """The loop that a user writes: DDIM steps with log-probabilities, then loss and backward step by step."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.pipeline = args, pipeline_of(args)
        self.pipeline.vae.requires_grad_(False)
        self.pipeline.text_encoder.requires_grad_(False)
        self.pipeline.unet.train()
        self.optimizer = torch.optim.AdamW(self.pipeline.unet.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
        self.pipeline.scheduler.set_timesteps(args.steps)
        self.draw, self.rewards, self.norms = prompts_in_turn(), list[float](), list[float]()

    def gaussian(self, x: Tensor, output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the next latent, with eta 1."""
        alphas = self.pipeline.scheduler.alphas_cumprod
        now, after = alphas[t], alphas[(t - 1000 // self.args.steps).clamp(min=0)]
        variance = (1 - after) / (1 - now) * (1 - now / after)
        clean = (x - (1 - now).sqrt() * output) / now.sqrt()
        return after.sqrt() * clean + (1 - after - variance).sqrt() * output, variance.sqrt()

    @staticmethod
    def log_prob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        values = -((sample - mean) ** 2) / (2 * std**2) - std.log() - math.log(2 * math.pi) / 2
        return values.mean(dim=(1, 2, 3))

    def epoch(self, number: int) -> dict[str, float]:
        from trl.models.diffusion.policy import generator_of  # the noise of our images

        marks = [time.process_time()]
        pipeline, unet, args = self.pipeline, self.pipeline.unet, self.args
        prompts = [self.draw()[0] for _ in range(args.images)]
        generators = [generator_of(0, number, image) for image in range(args.images)]
        shape = (4, args.side, args.side)
        with torch.no_grad():
            embeds, _ = pipeline.encode_prompt(prompts, torch.device("cpu"), 1, False)
            latents, log_probs = [torch.stack([torch.randn(shape, generator=own) for own in generators])], []
            for t in pipeline.scheduler.timesteps:
                mean, std = self.gaussian(latents[-1], unet(latents[-1], t, embeds).sample, t)
                latents.append(mean + std * torch.stack([torch.randn(shape, generator=own) for own in generators]))
                log_probs.append(self.log_prob(latents[-1], mean, std))
            images = (pipeline.vae.decode(latents[-1]).sample / 2 + 0.5).clamp(0, 1)
        marks.append(time.process_time())
        rewards = torch.tensor(jpeg_compressibility(images)[0])
        marks.append(time.process_time())
        self.rewards.append(float(rewards.mean()))
        advantages = ((rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-8)).clamp(-5, 5)
        for rows in torch.arange(args.images).split(args.batch):
            for at, t in enumerate(pipeline.scheduler.timesteps):
                x, following = latents[at][rows], latents[at + 1][rows]
                mean, std = self.gaussian(x, unet(x, t, embeds[rows]).sample, t)
                ratio = (self.log_prob(following, mean, std) - log_probs[at][rows]).exp()
                clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
                loss = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * clipped).mean()
                (loss * len(rows) / args.images / args.steps).backward()
        marks.append(time.process_time())
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(unet.parameters(), LARGEST_NORM)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.process_time())
        return {phase: end - start for phase, start, end in zip(PHASES, marks, marks[1:], strict=False)}


def measure(args: Namespace, side: str) -> Result:
    """Median seconds of each phase, rewards and gradient norms, and the growth of memory over the level after one epoch."""
    run, level = Ours(args) if side == "ours" else Plain(args), Level()
    run.epoch(0)
    level.mark()
    epochs = [dict(run.epoch(number)) for number in range(1, args.epochs + 1)]
    seconds = {phase: median(epoch[phase] for epoch in epochs) for phase in PHASES}
    return {
        "side": side, "seconds": seconds, "growth": level.growth(), "rewards": run.rewards, "norms": run.norms
    }  # fmt: skip


def measure_alignprop(args: Namespace, first: int) -> Result:
    """Seconds and growth of an optimiser step of AlignProp whose gradients flow from denoising step `first`."""
    config = AlignPropConfig(**settings_of(args), truncated_backprop_rand=False, truncated_backprop_timestep=first)
    wrapped = DefaultDDPOStableDiffusionPipeline(pipeline_of(args), use_lora=False)
    trainer, level, seconds = AlignPropTrainer(config, brightness, prompts_in_turn(), wrapped), Level(), []
    trainer.step(0, 0)
    level.mark()
    for number in range(1, args.epochs + 1):
        start = time.process_time()
        trainer.step(number, number)
        seconds.append(time.process_time() - start)
    return {"side": "alignprop", "first": first, "seconds": median(seconds), "growth": level.growth()}


if __name__ == "__main__":
    main()
