"""GRPO for diffusion models, DDIM and rectified flows: advantages within groups of images of one prompt."""

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trl.experimental.diffusion_grpo.diffusion_grpo_config import DiffusionGRPOConfig
from trl.models.diffusion.ddim import DDPOSchedulerOutput
from trl.models.diffusion.policy import generator_of
from trl.objectives.diffusion import gaussian_kl
from trl.objectives.group_advantages import group_relative, reward_statistics
from trl.options.training import wrong_config
from trl.reporting.model_card import Paper
from trl.rewards.images import image_sources
from trl.rewards.result import RewardInputs, reward_metrics
from trl.rewards.source import RewardFunc, RewardSources
from trl.rollouts.token_counts import BUCKETS, METRIC, token_ledger
from trl.trainer.ddpo_trainer import Batch, DDPOTrainer, Images
from trl.trainer.diffusion_trainer import TAGS, ImageHook


class DiffusionGRPOTrainer(DDPOTrainer):
    """Trains a diffusion model by GRPO on groups of `num_generations` images; each denoising step is a token.

    Args:
        model: a `FlowPipeline` (Stable Diffusion 3, Flux), a `DDPOStableDiffusionPipeline`, or a pipeline of diffusers,
            of which an adapter is then trained.
        reward_funcs: functions of `images` `(B, 3, H, W)` in 0..1, `prompts` and columns of the data set, plain or
            async, that return a number or None for each image; modules that score images; judges, which are shown
            images in place of completions. Functions of DDPO's form are accepted.
        args: settings.
        train_dataset: rows with a `prompt` (text); other columns are given to reward functions.
        image_samples_hook: as in `DDPOTrainer`.

    Example:
        >>> trainer = DiffusionGRPOTrainer(FlowPipeline("model"), reward, config, dataset)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _name = "diffusion GRPO"
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", *TAGS]
    _paper = Paper("Flow-GRPO: Training Flow Matching Models via Online RL", "2505.05470")
    _config_class = DiffusionGRPOConfig

    def __init__(
        self, model: Any, reward_funcs: RewardFunc | Sequence[RewardFunc], args: DiffusionGRPOConfig | None = None,
        train_dataset: Any = None, image_samples_hook: ImageHook | None = None,
    ) -> None:  # fmt: skip
        config = DiffusionGRPOConfig() if args is None else args
        if not isinstance(config, self._config_class):
            raise wrong_config(config, self._config_class)
        self.rows = list(train_dataset or ())
        if not self.rows or not all(isinstance(r, Mapping) and isinstance(r.get("prompt"), str) for r in self.rows):
            raise ValueError("train_dataset must have rows with a text as 'prompt'. Give at least one.")
        self.rewards = RewardSources(
            image_sources(reward_funcs),
            weights=config.reward_weights,
            deadline=config.reward_deadline,
            on_failure=config.reward_failure,
        )
        self.rewards.check_columns(set(self.rows[0]) - {"prompt"})
        self.rewards.check_groups(config.num_generations, rows=config.sample_batch_size)
        for source in self.rewards.sources:
            if hasattr(source, "group_size"):  # of a judge
                source.group_size = config.num_generations  # type: ignore[attr-defined]
        self._scoring, self._kls = threading.Lock(), list[Tensor]()
        self._counts = Counter[str]()
        super().__init__(config, None, None, model, image_samples_hook)

    def set_up(self) -> None:
        """Keep the model before training, too, where it is whole."""
        super().set_up()
        self._reference = None
        if self.config.beta and not getattr(self.policy.pipeline, "use_lora", False):
            self._reference = copy.deepcopy(self.policy.model).requires_grad_(False)

    # ---- rollouts

    def draw_prompts(self, epoch: int, batch: int) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Each row's prompt `num_generations` times; rows come in an order drawn anew for each pass over them."""
        config, size = self.config, self.config.sample_batch_size
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        first = ((epoch * config.sample_num_batches_per_epoch + batch) * processes + index) * size
        chosen = []
        for group in range(first // config.num_generations, (first + size) // config.num_generations):
            number, place = divmod(group, len(self.rows))
            order = torch.randperm(len(self.rows), generator=generator_of(config.seed, number))
            chosen += [self.rows[int(order[place])]] * config.num_generations
        columns = tuple({name: value for name, value in row.items() if name != "prompt"} for row in chosen)
        return tuple(row["prompt"] for row in chosen), columns

    def compute_rewards(
        self, prompt_image_pairs: Sequence[Batch], is_async: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Weighted sums `(B,)` of the rewards of batches (NaN for none), and the scores by source `(B, S)`."""
        scored, device = [], self.accelerator.device
        for images, prompts, rows in prompt_image_pairs:
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            with self._scoring:  # also of several threads
                result = self.rewards.score(RewardInputs(prompts, list(images), columns=columns))
            scored.append((result.rewards.to(device), result.scores.to(device)))
        rewards, scores = zip(*scored, strict=True)
        return rewards, scores

    def advantages(self, images: Images, rewards: Tensor) -> Tensor:
        """Rewards of a group's images less their mean, by `scale_rewards`; 0 for images without a reward."""
        advantages = group_relative(rewards, self.config.num_generations, scale=self.config.scale_rewards)
        self._count(advantages, rewards.isnan(), images.log_probs.shape[1])
        return self._own(advantages).to(images.log_probs)

    def _count(self, advantages: Tensor, unscored: Tensor, steps: int) -> None:
        """Count the denoising steps of the images of all processes by what becomes of them."""
        masked = torch.arange(steps, device=advantages.device) >= self.num_train_timesteps
        failed = unscored.repeat_interleave(steps)
        claims = {"reward_failed": failed, "masked": masked.repeat(len(advantages))}
        counts = token_ledger(advantages.repeat_interleave(steps), claims).tolist()
        self._counts.update(dict(zip(BUCKETS, counts, strict=True)))

    def reward_statistics(self, images: Images, rewards: Tensor) -> dict[str, float]:
        """The statistics of the reward and of each source, and what became of the denoising steps."""
        statistics = reward_statistics(rewards, self.config.num_generations, scale=self.config.scale_rewards)
        scores: Any = self.accelerator.gather(torch.cat(images.reward_metadata))
        counts = {f"{METRIC}{name}": self._counts[name] for name in BUCKETS if self._counts[name] or name == "trained"}
        means = {name: float(statistic.mean) for name, statistic in statistics.items()}
        return means | reward_metrics(self.rewards.names, scores) | counts

    # ---- the penalty

    @contextlib.contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The model before training: a frozen copy, or the model without its adapter."""
        model = self.policy.model
        if self._reference is not None:
            yield self._reference
            return
        model.disable_adapters()
        try:
            yield model
        finally:
            model.enable_adapters()

    def penalty(self, output: DDPOSchedulerOutput, *step: Any) -> Tensor | float:
        """`beta` times the KL divergence of a step from the reference's."""
        if not self.config.beta:
            return 0.0
        with torch.no_grad(), self.autocast(), self.reference() as model:
            reference = self.policy.step(*step, model=model)
        if output.mean is None or output.std is None or reference.mean is None:
            raise ValueError("beta needs a pipeline whose scheduler_step returns mean and std of a step. Set beta=0.")
        kl = gaussian_kl(output.mean, reference.mean, output.std).mean()
        self._kls.append(kl.detach())
        return self.config.beta * kl

    def loss_statistics(self) -> dict[str, float]:
        """The mean `kl` of an optimiser step."""
        kls, self._kls = self._kls, []
        return {"kl": self._mean(kls)} if kls else {}

    # ---- checkpoints

    def carried(self) -> dict[str, int]:
        """The counts of denoising steps."""
        return self._counts

    def load_carried(self, state: dict[str, int]) -> None:
        """Restore `carried`."""
        self._counts = Counter(state)
