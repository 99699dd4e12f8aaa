"""AlignProp on a Stable Diffusion pipeline, with an aesthetic score as the differentiable reward.

    python examples/scripts/alignprop.py --num_epochs 20 --train_gradient_accumulation_steps 4 \\
        --sample_num_steps 50 --train_batch_size 8

Every field of `AlignPropConfig` is an option, also as `--alignprop_config.<field>`.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trl import AlignPropConfig, AlignPropTrainer, DefaultDDPOStableDiffusionPipeline, TrlParser
from trl.models.auxiliary_modules import aesthetic_scorer
from trl.rewards.images import as_picture

ANIMALS = ("cat", "dog", "horse", "monkey", "rabbit", "zebra", "bird", "sheep", "deer", "cow", "lion", "frog")


@dataclass
class Arguments:
    """What to train, and for which reward."""

    pretrained_model: str = field(
        default="stable-diffusion-v1-5/stable-diffusion-v1-5",
        metadata={"help": "Name or folder of the pipeline."},
    )
    pretrained_revision: str = field(default="main", metadata={"help": "Revision of the pipeline."})
    reward: Literal["aesthetic", "brightness"] = field(default="aesthetic", metadata={"help": "What is rewarded."})
    hf_hub_model_id: str = field(
        default="alignprop-finetuned-stable-diffusion", metadata={"help": "Repository to push to."}
    )
    hf_hub_aesthetic_model_id: str = field(
        default="trl-lib/ddpo-aesthetic-predictor",
        metadata={"help": "Repository or folder of the scorer's head."},
    )
    hf_hub_aesthetic_model_filename: str = field(default="aesthetic-model.pth", metadata={"help": "Its file."})
    use_lora: bool = field(default=True, metadata={"help": "Train an adapter."})
    output_dir: str = field(default="runs/alignprop", metadata={"help": "Folder for model, checkpoints and pictures."})


def an_animal() -> tuple[str, dict[str, Any]]:
    """A prompt, and its metadata (none)."""
    return random.choice(ANIMALS), {}


def brightness(images: Any, prompts: Any, metadata: Any) -> tuple[Any, dict[str, Any]]:
    """The mean of the values of each image, 0 to 1, with gradient."""
    return images.mean(dim=(1, 2, 3)), {}


if __name__ == "__main__":
    parser = TrlParser((Arguments, AlignPropConfig))
    words = [word.replace("--alignprop_config.", "--", 1) for word in sys.argv[1:]]
    args, config = parser.parse_args_and_config(words)
    config.project_kwargs = {
        "project_dir": args.output_dir,
        "logging_dir": f"{args.output_dir}/logs",
        **config.project_kwargs,
    }
    reward = (
        brightness
        if args.reward == "brightness"
        else aesthetic_scorer(args.hf_hub_aesthetic_model_id, args.hf_hub_aesthetic_model_filename)
    )
    pipeline = DefaultDDPOStableDiffusionPipeline(
        args.pretrained_model, pretrained_model_revision=args.pretrained_revision, use_lora=args.use_lora
    )
    pictures = Path(args.output_dir) / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)

    def save_pictures(batch: Any, step: int, tracker: Any) -> None:
        """Write the images of a batch, `(B, 3, H, W)` from 0 to 1."""
        for number, image in enumerate(batch["images"]):
            as_picture(image).save(pictures / f"{step:06d}_{number}.png")

    trainer = AlignPropTrainer(config, reward, an_animal, pipeline, save_pictures)
    trainer.train()
    trainer.save_pretrained(args.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub(args.hf_hub_model_id)
