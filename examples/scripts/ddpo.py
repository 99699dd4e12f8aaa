"""DDPO on a Stable Diffusion pipeline, with an aesthetic score (default) or the size as JPEG as the reward.

    python examples/scripts/ddpo.py --ddpo_config.num_epochs=200 --ddpo_config.train_gradient_accumulation_steps=1 \\
        --ddpo_config.sample_num_steps=50 --ddpo_config.sample_batch_size=6 --ddpo_config.train_batch_size=3

Every field of `DDPOConfig` is an option `--ddpo_config.<field>`. `--tiny` trains a small pipeline of random weights.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))
from diffusion_options import an_animal, parse, save_images, tiny_settings

from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.models.auxiliary_modules import aesthetic_scorer
from trl.rewards import jpeg_compressibility, jpeg_incompressibility


@dataclass
class Arguments:
    """What to train."""

    pretrained_model: str = field(
        default="stable-diffusion-v1-5/stable-diffusion-v1-5",
        metadata={"help": "Name or folder of the pipeline."},
    )
    pretrained_revision: str = field(default="main", metadata={"help": "Revision of the pipeline."})
    reward: Literal["aesthetic", "compressible", "incompressible"] = field(
        default="aesthetic", metadata={"help": "What is rewarded."}
    )
    hf_hub_model_id: str = field(
        default="ddpo-finetuned-stable-diffusion",
        metadata={"help": "Repository for --ddpo_config.push_to_hub."},
    )
    hf_hub_aesthetic_model_id: str = field(
        default="trl-lib/ddpo-aesthetic-predictor",
        metadata={"help": "Repository or folder of the scorer's head."},
    )
    hf_hub_aesthetic_model_filename: str = field(
        default="aesthetic-model.pth", metadata={"help": "Its file."}
    )
    use_lora: bool = field(default=True, metadata={"help": "Train an adapter."})
    output_dir: str = field(
        default="runs/ddpo", metadata={"help": "Folder for model, checkpoints and pictures."}
    )
    tiny: bool = field(default=False, metadata={"help": "Train a small pipeline of random weights."})


if __name__ == "__main__":
    args, config = parse(Arguments, DDPOConfig, "ddpo_config")
    if args.tiny:
        args.pretrained_model, args.reward = tiny_settings(config, args.output_dir), "compressible"
    config.project_kwargs = {
        "project_dir": args.output_dir,
        "logging_dir": f"{args.output_dir}/logs",
        **config.project_kwargs,
    }
    rewards = {"compressible": jpeg_compressibility, "incompressible": jpeg_incompressibility}
    reward = rewards.get(args.reward) or aesthetic_scorer(
        args.hf_hub_aesthetic_model_id, args.hf_hub_aesthetic_model_filename
    )
    pipeline = DefaultDDPOStableDiffusionPipeline(
        args.pretrained_model, pretrained_model_revision=args.pretrained_revision, use_lora=args.use_lora
    )
    trainer = DDPOTrainer(
        config,
        reward,
        an_animal,
        pipeline,
        lambda batches, step, tracker: save_images(*batches[-1][:2], step, tracker, args.output_dir),
    )
    trainer.train()
    trainer.save_pretrained(args.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub(args.hf_hub_model_id)
