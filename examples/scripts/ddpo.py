"""DDPO on a Stable Diffusion pipeline, with an aesthetic score (default) or the size as JPEG as the reward.

    python examples/scripts/ddpo.py --ddpo_config.num_epochs=200 --ddpo_config.train_gradient_accumulation_steps=1 \\
        --ddpo_config.sample_num_steps=50 --ddpo_config.sample_batch_size=6 --ddpo_config.train_batch_size=3

Every field of `DDPOConfig` is an option `--ddpo_config.<field>`. `--tiny` trains a small pipeline of random weights.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).resolve().parents[1]))
from diffusion_options import Arguments, run

from trl import DDPOConfig, DDPOTrainer
from trl.rewards import jpeg_compressibility, jpeg_incompressibility

REWARDS = {"compressible": jpeg_compressibility, "incompressible": jpeg_incompressibility}


@dataclass
class DDPOArguments(Arguments):
    """What to train, and for which reward."""

    reward: Literal["aesthetic", "compressible", "incompressible"] = field(
        default="aesthetic", metadata={"help": "What is rewarded; with --tiny: compressible."}
    )


def reward_of(args: DDPOArguments) -> Any:
    """None for the aesthetic score."""
    return REWARDS.get("compressible" if args.tiny else args.reward)


if __name__ == "__main__":
    trainer = run("ddpo", DDPOTrainer, DDPOConfig, reward_of, lambda batches: batches[-1][:2], DDPOArguments)
