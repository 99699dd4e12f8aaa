"""PPO on a data set of prompts: policy, reference, rewards and a value model."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, PreTrainedModel, TrainerCallback

from trl._lazy import attach
from trl.data.prompts import PromptPreparation, PromptSets
from trl.experimental.ppo.ppo_config import PPOConfig
from trl.experimental.ppo.ppo_method import PPOMethod
from trl.experimental.ppo.setup import all_rewards, check_sizes, check_windows, end_token, own_copy, value_and_policy
from trl.generation.engine import Sampling
from trl.generation.transformers.engine import TransformersEngine, context_length_of
from trl.legacy import move_arguments
from trl.legacy.interface import LegacyGroups, NotCalled, View
from trl.models.parts import embedded_tokens
from trl.models.peft import AdapterConfig
from trl.models.reference import make_reference
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.values import POLICY, VALUE, PolicyAndValue, PolicyValueScorer
from trl.models.switches import holding
from trl.objectives.kl import k1
from trl.reporting.metrics import Processes
from trl.reporting.model_card import Paper
from trl.rewards.result import scores_by_source
from trl.rewards.source import ProcessingClasses
from trl.rollouts.experience import OLD, REF, Experience
from trl.rollouts.measures import local_rows
from trl.rollouts.schedule import fill_in_sizes
from trl.tensors.reduce import Weighted, weighted
from trl.trainer.arguments import Optimizers, Processor
from trl.trainer.base_trainer import BaseTrainer
from trl.trainer.group_setup import RewardFuncs, reward_sources
from trl.trainer.inherited import settle_inherited
from trl.trainer.online_trainer import OnlineTrainer
from trl.trainer.run_metrics import ends_window
from trl.trainer.samples import SampleTables, ShowSamples

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere

VALUE_FOLDER = "value_model"


class PPOTrainer(LegacyGroups, SampleTables, OnlineTrainer):
    """Trainer of proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on prompts of a data set.

    Args:
        args: a `trl.experimental.ppo.PPOConfig`.
        processing_class: the policy's tokenizer; by default the one saved with the model.
        model: the policy: a causal language model, a `PeftModel`, or a name or path.
        ref_model: what the KL divergence is measured from. None: the policy as it is now (a frozen copy, or the base of
            an adapter).
        reward_model: a sequence classifier with one label, or its name or path; None where `reward_funcs` score.
        train_dataset: rows with a `prompt` (text or messages) or tokenised, with `input_ids`; other columns are handed
            to reward functions.
        value_model: a sequence classifier with one label, trained beside the policy. None: one is made of a copy of the
            policy, with a head that starts at 0.
        data_collator: accepted for compatibility; prompts are never padded.
        eval_dataset: the same kind of rows, or a dict of several sets by name.
        peft_config: trains a new adapter of the policy with these settings (the value model is trained as it is).
        reward_funcs: functions `func(prompts=, completions=, completion_ids=, trainer_state=, **columns)`, reward
            models, or several of them; added to the reward model's score.
        reward_processing_classes: the tokenizer of each reward model (None for functions).

    Losses are means over the response tokens of an optimiser step, of all its micro-batches on all processes.

    Example:
        >>> trainer = PPOTrainer(
        ...     PPOConfig("my-model", stop_token="eos"), tokenizer, "Qwen/Qwen3-0.6B", None, reward_model, dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "ppo"]
    _name: ClassVar[str] = "PPO"
    _paper = Paper("Fine-Tuning Language Models from Human Preferences", "1909.08593")
    _not_called: ClassVar[NotCalled] = {}
    policy_model = View("model")
    config_type: ClassVar[type[PPOConfig]] = PPOConfig  # type: ignore[assignment]
    args: PPOConfig  # type: ignore[assignment]
    scorer: PolicyValueScorer
    method: PPOMethod  # type: ignore[assignment]

    def __init__(
        self, args: PPOConfig | None = None,
        processing_class: Processor | None = None,
        model: nn.Module | PreTrainedModel | str | None = None,
        ref_model: nn.Module | PreTrainedModel | str | None = None,
        reward_model: nn.Module | PreTrainedModel | str | None = None, train_dataset: Dataset | None = None,
        value_model: nn.Module | PreTrainedModel | str | None = None,
        data_collator: DataCollatorWithPadding | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None, optimizers: Optimizers = (None, None),
        callbacks: list[TrainerCallback] | None = None, peft_config: AdapterConfig = None,
        reward_funcs: RewardFuncs = None,
        reward_processing_classes: ProcessingClasses = None, **older: Any,
    ) -> None:  # fmt: skip
        named = {"args": args, "processing_class": processing_class, "model": model, "ref_model": ref_model}
        moved = move_arguments(PPOConfig, named, older)
        model, ref_model, processing_class = moved["model"], moved["ref_model"], moved["processing_class"]
        args = own_copy(moved["args"])
        settle_inherited(args, "rollouts")
        self.sizes = check_sizes(args)
        parts = value_and_policy(model, value_model, args, processing_class, peft_config)
        self.scorer, self._tokenizer = parts.scorer, parts.policy.tokenizer
        self.batch_of = partial(Experience.as_batch, prefix_sharing=shares_prefix(parts.scorer, args.prefix_sharing))
        at_once = args.local_rollout_forward_batch_size
        funcs = all_rewards(reward_model, reward_funcs, parts.model.value_model)
        rewards = reward_sources(funcs, reward_processing_classes, args, parts.policy, batch_size=at_once, read="ids")
        rewards.check_groups(1, rows=at_once)
        self._end = end_token(args, parts.policy.tokenizer)
        policy_model = parts.policy.model
        self._sets = PromptSets(
            parts.policy.processing_class,
            PromptPreparation(vocabulary=embedded_tokens(policy_model), num_proc=args.dataset_num_proc),
            context_length=context_length_of(policy_model),
            room=("response_length", args.response_length),
        )
        train_dataset = self._sets(train_dataset, "train")
        eval_dataset = self._sets.every(eval_dataset)
        fill_in_sizes(args, self.sizes, len(train_dataset))
        path = model if isinstance(model, str) else None
        self.reference = make_reference(policy_model, parts.policy.scorer, ref_model, args=args, path=path)
        sampling = Sampling(
            max_new_tokens=args.response_length, temperature=args.temperature, seed=args.seed,
            stop_token_ids=() if self._end is None else (self._end,),
        )  # fmt: skip
        check_windows(parts, self.reference, [train_dataset, eval_dataset], args.response_length)
        self.method = PPOMethod(args, self._tokenizer.eos_token_id)  # type: ignore[arg-type]
        self.rows_at_once = at_once
        BaseTrainer.__init__(
            self, model=parts.model, args=args, data_collator=data_collator or list, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=parts.policy.processing_class, callbacks=callbacks,
            optimizers=optimizers,
        )  # fmt: skip
        engine = TransformersEngine(
            self.model,  # type: ignore[arg-type]
            tokenizer=self._tokenizer, accelerator=self.accelerator, gather_zero3=args.ds3_gather_for_generation,
        )  # fmt: skip
        self.begin_rollouts(engine, sampling, rewards)
        self.reference.prepare(self.accelerator)
        if eval_dataset is not None and args.num_sample_generations:
            self.add_callback(ShowSamples(self))

    # ---- a rollout batch

    def advantages(self, experience: Experience, *, group_size: int | None = None) -> Experience:
        """Whitened advantages and returns, from rewards with the KL penalty on every token."""
        self._check_kl(experience)
        return self.method.estimated(experience, self.accelerator)

    def _check_kl(self, experience: Experience) -> None:
        """Stop a run whose policy has left its reference for good. All processes must call it."""
        log_ratios = weighted(k1(experience.per_token[OLD], experience.per_token[REF]))
        kl, limit = float(Processes(self.accelerator).sum([log_ratios]).mean), self.args.max_kl_per_token
        if math.isfinite(kl) and (limit is None or kl <= limit):
            return
        raise FloatingPointError(
            "the KL divergence of the policy from its reference must stay finite and at most "
            f"max_kl_per_token={limit}, got {kl:.4g} nats per token in the responses after optimiser step "
            f"{self.state.global_step}. No update was made with them, and checkpoints under {self.args.output_dir} are "
            "untouched. Go on from one with a lower learning_rate, fewer num_ppo_epochs or a larger kl_coef, and look "
            "at the reward for what the policy exploits."
        )

    # ---- what is logged

    def rollout_metrics(self, experience: Experience, *, share: float) -> dict[str, Weighted]:
        """The documented `objective/*`, the means of the reward sources, and the number of end tokens."""
        metrics = self.method.metrics(experience)
        scores = scores_by_source(experience.per_row, self.rollouts.rewards.names).items()
        metrics |= {f"rewards/{name}/mean": weighted(column, ~column.isnan()) for name, column in scores}
        eos: Any = self._tokenizer.eos_token_id
        if eos is not None:
            ends = (experience.completions.values == eos).sum()
            metrics["val/num_eos_tokens"] = Weighted(ends, torch.tensor(share))  # summed over processes
        return metrics

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Complete a batch of prompts and record the metrics of rollouts; there is no loss."""
        rows = min(local_rows(self.accelerator, self.args.eval_batch_size), len(inputs))
        self.rollouts.follow(self.model_wrapped, self.state)
        experience = self.rollouts.evaluate(inputs[: max(rows, 1)])  # at least one row for the collectives
        experience = self.scored(experience, learning=False)
        if rows:
            whole = self.callback_handler.eval_dataloader.dataset  # type: ignore[union-attr]
            self._sums["eval"].add(self.rollout_metrics(experience, share=rows / len(whole)))
        return None, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with `eps`, `lr` and `episode` beside a training loss."""
        if ends_window(logs, self):
            batches = -(-self.state.global_step // self.sizes.steps)
            seconds = max(time.monotonic() - self._started, 1e-9)
            done = (batches - self._batches_before) * self.sizes.rows
            rates = {"eps": done / seconds, "episode": batches * self.sizes.rows}
            logs = {**logs, **rates, "lr": logs.get("learning_rate", self._get_learning_rate())}
        super().log(logs, start_time)

    _is_checkpoint = False  # whether `_save` writes a checkpoint
    _started = 0.0
    _batches_before = 0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Resuming is bit-exact, within a rollout batch too."""
        self._started, self._batches_before = time.monotonic(), 0
        return super().train(*args, **kwargs)

    def load_progress(self, folder: Path) -> None:
        """Load the state of a checkpoint, when training begins."""
        super().load_progress(folder)
        self._batches_before = -(-self.state.global_step // self.sizes.steps)

    # ---- the reference

    @contextmanager
    def null_ref_context(self) -> Iterator[nn.Module]:
        """A block whose yielded module is the reference: the policy without its adapter, or another model."""
        assert self.reference is not None
        with self.reference.active(self.model_wrapped) as model:  # type: ignore[arg-type]
            yield model

    # ---- checkpoints: the policy as it is loaded by itself, the value model in a folder beside it

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, to be loaded with `from_pretrained`; checkpoints also hold the value model."""
        # transformers writes checkpoints into a folder that it names, and what it is about to push into the run's own.
        self._is_checkpoint = _internal_call and output_dir is not None
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        both, folder = self._both(), output_dir if output_dir is not None else self.args.output_dir
        assert folder is not None
        with holding(self, "model", both.policy):
            super()._save(output_dir, _part(state_dict, POLICY))
        if self._is_checkpoint:
            value_model: Any = both.value_model
            where = os.path.join(folder, VALUE_FOLDER)
            value_model.save_pretrained(where, state_dict=_part(state_dict, VALUE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        both, folder = self._both(), os.path.join(resume_from_checkpoint, VALUE_FOLDER)
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{resume_from_checkpoint} has no folder {VALUE_FOLDER!r}, expected the value model in it. Resume "
                "from a checkpoint of this trainer, or start anew from its policy."
            )
        with holding(self, "model", both.policy):
            super()._load_from_checkpoint(resume_from_checkpoint)
        with holding(self, "model", both.value_model):
            super()._load_from_checkpoint(folder)

    def _both(self) -> PolicyAndValue:
        both = self.accelerator.unwrap_model(self.model)
        assert isinstance(both, PolicyAndValue)
        return both


def _part(state: dict[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    """The entries under a prefix, without it."""
    if state is None:
        return None
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
