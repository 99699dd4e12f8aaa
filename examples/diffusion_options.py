"""What the scripts of diffusion models share: options `--<config>.<field>`, prompts, saved pictures, and `--tiny`."""

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any, TypeVar

from small_diffusion import small_pipeline
from transformers import HfArgumentParser

from trl.rewards.images import as_picture

Arguments = TypeVar("Arguments")
Config = TypeVar("Config")

NAMES = (
    "cat",
    "dog",
    "horse",
    "monkey",
    "rabbit",
    "zebra",
    "spider",
    "bird",
    "sheep",
    "deer",
    "cow",
    "goat",
    "lion",
    "frog",
)


def an_animal() -> tuple[str, dict[str, Any]]:
    """A prompt function: an animal's name, without metadata."""
    return random.choice(NAMES), {}


def brightness(images: Any, prompts: Any, metadata: Any) -> tuple[Any, dict[str, Any]]:
    """The mean of an image's values, 0 to 1, with gradient."""
    return images.mean(dim=(1, 2, 3)), {}


def parse(arguments: type[Arguments], config: type[Config], prefix: str) -> tuple[Arguments, Config]:
    """The command line's arguments, and a config from its options `--prefix.field=value` or `--prefix.field value`."""
    names = {item.name for item in dataclasses.fields(config)}  # type: ignore[arg-type]
    own, of_config, given = [], [], set[str]()
    words = own
    for word in sys.argv[1:]:
        if word.startswith("--"):
            name = word.removeprefix(f"--{prefix}.").partition("=")[0]
            words = of_config if word.startswith(f"--{prefix}.") else own
            if words is of_config and name not in names:
                raise SystemExit(
                    f"--{prefix}.{name} is no option. The fields are {', '.join(sorted(names))}."
                )
            given |= {name} if words is of_config else set()
        words.append(word.replace(f"--{prefix}.", "--", 1) if words is of_config else word)
    (found,) = HfArgumentParser(arguments).parse_args_into_dataclasses(own)  # type: ignore[arg-type]
    settings = HfArgumentParser(config).parse_args(of_config)  # type: ignore[arg-type]
    return found, config(**{name: getattr(settings, name) for name in given})


def tiny_settings(config: Any, folder: str) -> str:
    """Settle a config for a small pipeline on a CPU; returns the pipeline's folder."""
    small = {
        "mixed_precision": "no", "sample_num_steps": 4, "sample_guidance_scale": 1.0, "num_epochs": 3, "train_batch_size": 4,
        "train_learning_rate": 1e-2, "sample_batch_size": 4, "truncated_rand_backprop_minmax": (0, 3),
    }  # fmt: skip
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    place = Path(folder) / "tiny"
    small_pipeline(place / "tokenizer").save_pretrained(place)
    return str(place)


def save_images(images: Any, prompts: Any, step: int, tracker: Any, folder: str) -> None:
    """Write the images to `folder/pictures`, and show them to the tracker if it takes images."""
    place = Path(folder) / "pictures"
    place.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        as_picture(image).save(place / f"{step:06d}_{number}.png")
    if hasattr(tracker, "log_images"):
        shown = {
            f"{number} {prompt}": image.detach().float().cpu().unsqueeze(0).numpy()
            for number, (prompt, image) in enumerate(zip(prompts, images, strict=True))
        }
        tracker.log_images(
            {name: value.transpose(0, 2, 3, 1) for name, value in shown.items()}
            if tracker.name == "wandb"
            else shown,
            step=step,
        )
