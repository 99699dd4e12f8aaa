"""Configuration of perception-aware policy optimisation."""

from dataclasses import dataclass

from trl.experimental.papo.image_masks import MASKS
from trl.options.groups import documented, option
from trl.trainer.grpo_config import GRPOConfig


@documented
@dataclass
class PAPOConfig(GRPOConfig):
    """Settings of `PAPOTrainer`: those of `GRPOConfig` and the ones below.

    Example:
        >>> from trl.experimental.papo import PAPOConfig
        >>> args = PAPOConfig("my-model", mask_type="patch", mask_ratio=0.6, use_cpu=True)
        >>> args.loss_type, args.perception_loss_weight, args.der_loss_weight1
        ('dapo', 0.1, 0.03)
    """

    perception_loss_weight: float = option(
        0.1,
        "Weight (gamma) of the divergence between the policy with the images and with masked ones, which is "
        "maximised; >= 0. The paper uses 0.01 and 0.02.",
    )
    mask_ratio: float = option(0.3, "Hidden share of an image (the paper uses 0.6); unused with 'blackout'.", "(0, 1]")
    mask_type: str = option(
        "random",
        "What is hidden: single pixels ('random'), squares of 14 x 14 pixels ('patch', the paper's), the same at "
        "regular places ('grid'), or everything ('blackout').",
        choices=tuple(MASKS),
    )
    der_loss_weight1: float = option(0.03, "Weight (eta 1) of the entropy with the images, which is minimised; >= 0.")
    der_loss_weight2: float = option(
        0.03, "Weight (eta 2) of the policy's entropy with masked images, which is minimised; >= 0."
    )
