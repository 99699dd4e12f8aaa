"""Diffusion models learn from rewards: brightness and size as JPEG, by DDPO, AlignProp and GRPO.

    python examples/diffusion_rewards.py --method ddpo --reward brightness --pictures runs/pictures
    python examples/diffusion_rewards.py --table

trains a small Stable Diffusion pipeline of random weights, and measures the reward on images of the same noise before and after.
"""

import argparse
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from PIL import Image
from small_diffusion import PROMPTS, small_pipeline

from trl import AlignPropConfig, AlignPropTrainer, DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.experimental.diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from trl.models.diffusion.policy import generator_of
from trl.rewards.images import as_picture, jpeg_compressibility, jpeg_kilobytes

SHARED: dict[str, Any] = {
    "sample_num_steps": 4, "sample_guidance_scale": 1.0, "mixed_precision": "no", "save_freq": 0, "train_batch_size": 16,
}  # fmt: skip
SAMPLED = {
    "sample_batch_size": 32, "sample_num_batches_per_epoch": 1, "train_clip_range": 0.05, "train_learning_rate": 1e-3,
    "train_num_inner_epochs": 2,
}  # fmt: skip
PIPELINES: dict[str, dict[str, Any]] = {"brightness": {"side": 4}, "jpeg": {"side": 8, "has_contrast": True}}
EPOCHS = {
    ("alignprop", "brightness"): 15, ("ddpo", "brightness"): 60, ("grpo", "brightness"): 80, ("ddpo", "jpeg"): 30, ("grpo", "jpeg"): 40,
}  # fmt: skip


def brightness(images: Any, prompts: Any = None, metadata: Any = None) -> tuple[Any, dict[str, Any]]:
    """The mean of the values of each image, 0 to 1, with gradient."""
    return images.mean(dim=(1, 2, 3)), {}


def prompts_in_turn() -> Any:
    """A prompt function that takes each prompt in turn."""
    drawn = iter(range(10**9))
    return lambda: (PROMPTS[next(drawn) % len(PROMPTS)], {})


def make_trainer(method: str, reward: str, seed: int, **settings: Any) -> Any:
    """A trainer of a new pipeline, whose weights are drawn with `seed`, too."""
    pipeline = DefaultDDPOStableDiffusionPipeline(
        small_pipeline(Path(mkdtemp()), seed=seed, **PIPELINES[reward]), use_lora=False
    )
    function = brightness if reward == "brightness" else jpeg_compressibility
    if method == "alignprop":
        own = {"truncated_rand_backprop_minmax": (0, 3), "train_learning_rate": 2e-3}
        config = AlignPropConfig(**{**SHARED, **own, "seed": seed, **settings})
        return AlignPropTrainer(config, function, prompts_in_turn(), pipeline)
    given = {**SHARED, **SAMPLED, "seed": seed, **settings}
    if method == "ddpo":
        return DDPOTrainer(DDPOConfig(**given), function, prompts_in_turn(), pipeline)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    return DiffusionGRPOTrainer(pipeline, function, DiffusionGRPOConfig(**given), rows)


def pictures_of(trainer: Any, count: int = 12) -> torch.Tensor:
    """Images of the same prompts and noise at every call, `(count, 3, 64, 64)`."""
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(count)]
    generators = [generator_of(1234, number) for number in range(count)]
    policy = trainer.policy
    return policy.sample(policy.embed(prompts), generators).images


def measured(images: torch.Tensor, reward: str) -> float:
    """The mean brightness, or the mean size as JPEG in kB."""
    return float(images.mean()) if reward == "brightness" else sum(jpeg_kilobytes(images)) / len(images)


def save_grid(images: torch.Tensor, file: Path) -> None:
    """The images in rows of six, twice as large."""
    rows = [torch.cat(list(row), dim=2) for row in images.split(6)]
    picture = as_picture(torch.cat(rows, dim=1))
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.NEAREST).save(file)


def run(
    method: str, reward: str, seed: int, *, epochs: int, folder: Path | None = None, **settings: Any
) -> tuple[float, float, float]:
    """What is measured before and after training, and the seconds of training."""
    trainer = make_trainer(method, reward, seed, **settings)
    before = pictures_of(trainer)
    start = time.perf_counter()
    trainer.train(epochs)
    seconds, after = time.perf_counter() - start, pictures_of(trainer)
    if folder is not None:
        save_grid(before, folder / f"{method}_{reward}_before.png")
        save_grid(after, folder / f"{method}_{reward}_after.png")
    return measured(before, reward), measured(after, reward), seconds


def main() -> None:
    """Train once, or fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["ddpo", "alignprop", "grpo"], help="default: ddpo; --table: all")
    parser.add_argument("--reward", choices=["brightness", "jpeg"], help="default: brightness; --table: both")
    parser.add_argument("--epochs", type=int, help="passes of sampling and training; default: 15 to 80")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="of each row of the table")
    parser.add_argument("--pictures", type=Path, help="folder for pictures before and after, of the first seed")
    parser.add_argument("--table", action="store_true", help="all methods and rewards, or those that are given")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    given = parser.parse_args()
    chosen, seeds = [(given.method or "ddpo", given.reward or "brightness")], [given.seed]
    if given.table:
        chosen = [row for row in EPOCHS if given.method in (None, row[0]) and given.reward in (None, row[1])]
        seeds = list(range(given.seeds))
    print(
        "| method | reward | seed | epochs | before | after | seconds |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for method, reward in chosen:
        for seed in seeds:
            epochs, folder = (
                given.epochs or EPOCHS.get((method, reward), 15),
                given.pictures if seed == seeds[0] else None,
            )
            before, after, seconds = run(method, reward, seed, epochs=epochs, folder=folder)
            row = f"| {method} | {reward} | {seed} | {epochs} | {before:.3f} | {after:.3f} | {seconds:.0f} |"
            print(row, flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(row + "\n")


if __name__ == "__main__":
    main()
