"""PAPO: GRPO on images that also learns to look at them."""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from trl.data.formats import has_images
from trl.experimental.papo.image_masks import masked_image
from trl.experimental.papo.papo_config import PAPOConfig
from trl.methods.grpo import GRPOMethod
from trl.methods.method import Batch, Step
from trl.models.packed.layout import ROLLOUT
from trl.models.scoring.causal import Scored
from trl.models.scoring.head import ScoreOptions
from trl.objectives.group_policy import PerceptionOptions, perception_loss
from trl.reporting.model_card import Paper
from trl.rollouts.experience import Experience
from trl.tensors.reduce import LossTerms
from trl.trainer.group_images import set_and_row
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.loaders import order_seed

_MASKS, _EVALUATION_MASKS = 0x9A90, 0x9A91  # random streams of their own


class PAPOMethod(GRPOMethod):
    """GRPO's terms and the perception loss; rows are scored twice, the second time with masked images."""

    args: PAPOConfig

    def __init__(self, args: PAPOConfig) -> None:
        super().__init__(args)
        self.perception = PerceptionOptions(args.perception_loss_weight, args.der_loss_weight1, args.der_loss_weight2)

    def wants(self, batch: Batch, step: Step) -> ScoreOptions:
        """Without a loss of tokens: of each, both log-probs count."""
        wants = super().wants(batch, replace(step, statistics=step.statistics or self.perception.needs_entropies))
        return replace(wants, loss_of=None)

    def objective(self, experience: Experience, scored: Scored, step: Step) -> list[LossTerms]:
        shown, masked = (_half(scored, number, len(experience.completions.values)) for number in (0, 1))
        perception = perception_loss(
            shown.logps, masked.logps, self.tokens(experience, step), self.perception,
            loss_type=self.args.loss_type, entropies=shown.entropies, masked_entropies=masked.entropies,
        )  # fmt: skip
        return [*super().objective(experience, shown, step), perception]


class PAPOTrainer(GRPOTrainer):
    """Trainer of perception-aware policy optimisation (Wang et al. 2025, arXiv:2507.06448).

    Takes what `GRPOTrainer` takes, and prompts with images. Every completion is scored a second time behind images of
    which a part is hidden; beside GRPO's loss the policy learns to answer otherwise there, with low entropy in both.
    Masks are drawn anew for each prompt at each optimiser step; those of an evaluation are the same every time.

    Example:
        >>> args = PAPOConfig("papo", mask_type="patch", mask_ratio=0.6, use_cpu=True)
        >>> trainer = PAPOTrainer("Qwen/Qwen2.5-VL-3B-Instruct", reward, args, dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "papo"]
    _name: ClassVar[str] = "PAPO"
    _paper = Paper("Perception-Aware Policy Optimization for Multimodal Reasoning", "2507.06448")
    args: PAPOConfig
    method_type = PAPOMethod
    config_type = PAPOConfig

    def begin_rollouts(self, *parts: Any, **settings: Any) -> None:
        """Raises ValueError for prompts without images."""
        if not has_images(self.train_dataset):
            raise ValueError(
                "train_dataset has no column of images ('images' or 'image'), expected one: PAPO hides parts of them. "
                "Add it, or use GRPOTrainer for prompts of text."
            )
        super().begin_rollouts(*parts, **settings)

    def micro_batch(self, experience: Experience) -> dict[str, Any]:
        """Some rows, and the same rows once more with masked images: one forward scores both."""
        assert self.images is not None
        count = len(experience)

        def masked(row: int, key: int, images: list[Any]) -> list[Any]:
            return images if row < count else self._masked(key, images)

        twice = experience.take(torch.arange(count).repeat(2))
        return {**self.images.batch(twice, masked), ROLLOUT: experience}

    def _masked(self, key: int, images: list[Any]) -> list[Any]:
        """A prompt's images with hidden parts, the same for all of its completions.

        In training they are drawn for each optimiser step, in an evaluation by the number of the row alone.
        """
        number, row = set_and_row(key)
        place = [_MASKS, self.state.global_step, row] if number == 0 else [_EVALUATION_MASKS, row]
        draws = np.random.default_rng([order_seed(self.args) % 2**63, *place])
        return [masked_image(image, self.args.mask_type, self.args.mask_ratio, draws) for image in images]


def _half(scored: Scored, number: int, count: int) -> Scored:
    """The first or second `count` tokens that were scored."""
    part = slice(number * count, (number + 1) * count)
    entropies = None if scored.entropies is None else scored.entropies[part]
    return scored._replace(logps=scored.logps[part], entropies=entropies)
