"""AlignProp on a Stable Diffusion pipeline, with an aesthetic score as the differentiable reward.

    python examples/scripts/alignprop.py --alignprop_config.num_epochs=20 --alignprop_config.train_gradient_accumulation_steps=4 \\
        --alignprop_config.sample_num_steps=50 --alignprop_config.train_batch_size=8

Every field of `AlignPropConfig` is an option `--alignprop_config.<field>`. `--tiny` trains a small pipeline of random weights for
brightness.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from diffusion_options import brightness, run

from trl import AlignPropConfig, AlignPropTrainer

if __name__ == "__main__":
    trainer = run(
        "alignprop",
        AlignPropTrainer,
        AlignPropConfig,
        lambda args: brightness if args.tiny else None,
        lambda batch: (batch["images"], batch["prompts"]),
    )
