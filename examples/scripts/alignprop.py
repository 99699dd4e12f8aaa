"""AlignProp on a Stable Diffusion pipeline, with an aesthetic score as the differentiable reward.

    python examples/scripts/alignprop.py --alignprop_config.num_epochs=20 --alignprop_config.train_gradient_accumulation_steps=4 \\
        --alignprop_config.sample_num_steps=50 --alignprop_config.train_batch_size=8

Every field of `AlignPropConfig` is an option `--alignprop_config.<field>`. `--tiny` trains a small pipeline of random weights for
brightness.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from diffusion_options import an_animal, brightness, parse, save_images, tiny_settings

from trl import AlignPropConfig, AlignPropTrainer, DefaultDDPOStableDiffusionPipeline
from trl.models.auxiliary_modules import aesthetic_scorer


@dataclass
class Arguments:
    """What to train."""

    pretrained_model: str = field(
        default="stable-diffusion-v1-5/stable-diffusion-v1-5",
        metadata={"help": "Name or folder of the pipeline."},
    )
    pretrained_revision: str = field(default="main", metadata={"help": "Revision of the pipeline."})
    hf_hub_model_id: str = field(
        default="alignprop-finetuned-stable-diffusion",
        metadata={"help": "Repository for --alignprop_config.push_to_hub."},
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
        default="runs/alignprop", metadata={"help": "Folder for model, checkpoints and pictures."}
    )
    tiny: bool = field(default=False, metadata={"help": "Train a small pipeline of random weights."})


if __name__ == "__main__":
    args, config = parse(Arguments, AlignPropConfig, "alignprop_config")
    reward = brightness
    if args.tiny:
        args.pretrained_model = tiny_settings(config, args.output_dir)
    else:
        reward = aesthetic_scorer(args.hf_hub_aesthetic_model_id, args.hf_hub_aesthetic_model_filename)
    config.project_kwargs = {
        "project_dir": args.output_dir,
        "logging_dir": f"{args.output_dir}/logs",
        **config.project_kwargs,
    }
    pipeline = DefaultDDPOStableDiffusionPipeline(
        args.pretrained_model, pretrained_model_revision=args.pretrained_revision, use_lora=args.use_lora
    )
    trainer = AlignPropTrainer(
        config,
        reward,
        an_animal,
        pipeline,
        lambda batch, step, tracker: save_images(
            batch["images"], batch["prompts"], step, tracker, args.output_dir
        ),
    )
    trainer.train()
    trainer.save_pretrained(args.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub(args.hf_hub_model_id)
