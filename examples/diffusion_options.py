"""What the scripts of diffusion models share: arguments, options `--<config>.<field>`, prompts, saved pictures, and `--tiny`."""

import dataclasses
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from small_diffusion import small_pipeline
from transformers import HfArgumentParser

from trl import DefaultDDPOStableDiffusionPipeline
from trl.models.auxiliary_modules import aesthetic_scorer
from trl.rewards.images import as_picture

Given = TypeVar("Given", bound="Arguments")
Config = TypeVar("Config")


@dataclass
class Arguments:
    """What to train."""

    pretrained_model: str = field(
        default="stable-diffusion-v1-5/stable-diffusion-v1-5",
        metadata={"help": "Name or folder of the pipeline."},
    )
    pretrained_revision: str = field(default="main", metadata={"help": "Revision of the pipeline."})
    hf_hub_model_id: str | None = field(
        default=None,
        metadata={"help": "Repository to push to. Default: <method>-finetuned-stable-diffusion."},
    )
    hf_hub_aesthetic_model_id: str = field(
        default="trl-lib/ddpo-aesthetic-predictor",
        metadata={"help": "Repository or folder of the scorer's head."},
    )
    hf_hub_aesthetic_model_filename: str = field(
        default="aesthetic-model.pth", metadata={"help": "Its file."}
    )
    use_lora: bool = field(default=True, metadata={"help": "Train an adapter."})
    output_dir: str | None = field(
        default=None,
        metadata={"help": "Folder for model, checkpoints and pictures. Default: runs/<method>."},
    )
    tiny: bool = field(default=False, metadata={"help": "Train a small pipeline of random weights."})


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


TINY = {  # for a small pipeline on a CPU
    "mixed_precision": "no", "sample_num_steps": 4, "sample_guidance_scale": 1.0, "num_epochs": 3, "train_batch_size": 4,
    "train_learning_rate": 1e-2, "sample_batch_size": 4, "truncated_rand_backprop_minmax": (0, 3),
}  # fmt: skip


def an_animal() -> tuple[str, dict[str, Any]]:
    """A prompt function: an animal's name, without metadata."""
    return random.choice(NAMES), {}


def brightness(images: Any, prompts: Any = None, metadata: Any = None) -> tuple[Any, dict[str, Any]]:
    """The mean of an image's values, 0 to 1, with gradient."""
    return images.mean(dim=(1, 2, 3)), {}


def parse(arguments: type[Given], config: type[Config], prefix: str) -> tuple[Given, Config]:
    """The command line's arguments, and a config from its options `--prefix.field=value` or `--prefix.field value`.

    `--tiny` sets those of `TINY` that are not given.
    """
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
    more = f"Every field of {config.__name__} is an option, too: --{prefix}.<field>"
    (found,) = HfArgumentParser(arguments, epilog=more).parse_args_into_dataclasses(own)  # type: ignore[arg-type]
    settings = HfArgumentParser(config).parse_args(of_config)  # type: ignore[arg-type]
    small = {name: value for name, value in TINY.items() if found.tiny and name in names}
    return found, config(**small | {name: getattr(settings, name) for name in given})


def run(
    method: str,
    trainer_class: Any,
    config_class: Any,
    reward_of: Callable[[Any], Any],
    batch_of: Callable[[Any], tuple[Any, Any]],
    arguments: type[Arguments] = Arguments,
) -> Any:
    """Train and save as the command line says; returns the trainer.

    `reward_of(arguments)` is the reward function, or None for the aesthetic score; `batch_of` finds images and prompts in what
    the trainer's image hook gets.
    """
    args, config = parse(arguments, config_class, f"{method}_config")
    folder = args.output_dir or f"runs/{method}"
    if args.tiny:
        place = Path(folder) / "tiny"
        small_pipeline(place / "tokenizer").save_pretrained(place)
        args.pretrained_model = str(place)
    config.project_kwargs = {"project_dir": folder, "logging_dir": f"{folder}/logs", **config.project_kwargs}
    reward = reward_of(args) or aesthetic_scorer(
        args.hf_hub_aesthetic_model_id, args.hf_hub_aesthetic_model_filename
    )
    pipeline = DefaultDDPOStableDiffusionPipeline(
        args.pretrained_model, pretrained_model_revision=args.pretrained_revision, use_lora=args.use_lora
    )

    def show(given: Any, step: int, tracker: Any) -> None:
        save_images(*batch_of(given), step, tracker, folder)

    trainer = trainer_class(config, reward, an_animal, pipeline, show)
    trainer.train()
    trainer.save_pretrained(folder)
    if config.push_to_hub:
        trainer.push_to_hub(args.hf_hub_model_id or f"{method}-finetuned-stable-diffusion")
    return trainer


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
