"""Online DPO: pairs of the policy's own completions, compared by a judge or by rewards."""

from typing import ClassVar

from accelerate.utils import gather_object

from trl._lazy import attach
from trl.agents.completer import Agent
from trl.data.formats import has_images
from trl.generation.engine import Engine
from trl.generation.transformers.mixture import MixtureEngine, TurnsEngine
from trl.legacy.text_data import LegacyPromptRows
from trl.methods.online_dpo import OnlineDPOMethod
from trl.models.peft import AdapterConfig
from trl.options.groups import names_checked
from trl.options.training import config_or_default
from trl.reporting.model_card import Paper
from trl.rewards.judge_source import comparison_source
from trl.rewards.judges import BasePairwiseJudge
from trl.rewards.source import ProcessingClasses
from trl.trainer import arguments
from trl.trainer.group_setup import Environments, RewardFuncs, Tools
from trl.trainer.online_dpo_config import OnlineDPOConfig
from trl.trainer.online_trainer import OnlineTrainer

__getattr__, *_ = attach(__name__)  # names of this path that live elsewhere


class OnlineDPOTrainer(LegacyPromptRows, OnlineTrainer):
    """Trainer of online DPO (Guo et al. 2024, arXiv:2402.04792).

    Args:
        model: the policy: a causal language model, a `PeftModel`, or a name or path.
        ref_model: the reference. None: the policy as it is now (a frozen copy, or the base of an adapter).
        reward_funcs: as `GRPOTrainer` takes them: functions, reward models or their paths, or several.
        judge: compares completions instead; with both the judge decides.
        args: an `OnlineDPOConfig`.
        train_dataset: rows with a `prompt` (text or messages).

    `reward_processing_classes`, `tools`, `agent`, `environment_factory`, `callbacks`, `optimizers` and `peft_config`
    are those of `GRPOTrainer`. The loss is the mean over the pairs of an optimiser step. Pairs without a judge's
    answer, or with equal scores (`tie_policy`), are dropped.

    Example:
        >>> def brevity(completions, **columns):
        ...     return [-float(len(text)) for text in completions]
        >>> trainer = OnlineDPOTrainer(
        ...     "Qwen/Qwen3-0.6B", reward_funcs=brevity, args=OnlineDPOConfig("brief"), train_dataset=dataset
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    _tag_names: ClassVar[list[str]] = ["trl", "online-dpo"]
    _name: ClassVar[str] = "Online DPO"
    _paper = Paper("Direct Language Model Alignment from Online AI Feedback", "2402.04792")
    evaluation_metrics: ClassVar[tuple[str, ...]] = ("loss", "rewards/margins", "objective/scores")
    args: OnlineDPOConfig
    method: OnlineDPOMethod
    method_type = OnlineDPOMethod
    config_type = OnlineDPOConfig

    @names_checked
    def __init__(
        self, model: arguments.AnyModel | None = None,
        ref_model: arguments.AnyModel | None = None,
        reward_funcs: RewardFuncs = None, judge: BasePairwiseJudge | None = None,
        args: OnlineDPOConfig | None = None, data_collator: arguments.Collator | None = None,
        train_dataset: arguments.AnyDataset | None = None, eval_dataset: arguments.EvalDatasets | None = None,
        processing_class: arguments.Processor | None = None,
        reward_processing_classes: ProcessingClasses = None, peft_config: AdapterConfig = None,
        compute_metrics: arguments.ComputeMetrics | None = None,
        callbacks: arguments.Callbacks | None = None, optimizers: arguments.Optimizers = (None, None),
        preprocess_logits_for_metrics: arguments.PreprocessLogits | None = None, tools: Tools | None = None,
        agent: Agent | None = None, environment_factory: Environments | None = None,
    ) -> None:  # fmt: skip
        unread = {
            "data_collator": data_collator,
            "compute_metrics": compute_metrics,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        if names := [name for name, value in unread.items() if value is not None]:
            raise TypeError(
                f"{self._name} trains on its own completions and does not use {' and '.join(names)}. Leave it out."
            )
        args = config_or_default(args, self.config_type, self._tag_names[-1])  # type: ignore[assignment]
        assert isinstance(args, OnlineDPOConfig)
        has_agent = agent is not None or environment_factory is not None
        wrong = {"tools": tools, "images": has_images(train_dataset, eval_dataset), "an agent": has_agent}
        if args.has_opponent and (names := [name for name in wrong if wrong[name]]):
            raise ValueError(
                f"{self._name} generates with an opponent on prompts of text alone, got {names[0]}. Leave them out, or "
                "use OnlineDPOTrainer."
            )
        if has_agent and (judge or args.judge):
            raise ValueError("An agent's result is its reward, which a judge does not replace. Leave one of them out.")
        sources, managed = reward_funcs or args.reward_model_path, None
        if not has_agent:
            sources, managed = comparison_source(reward_funcs, judge, args)
        super().__init__(
            model,  # type: ignore[arg-type]
            sources, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
            optimizers, peft_config, tools, ref_model=ref_model, agent=agent, environment_factory=environment_factory,
        )  # fmt: skip
        if args.missing_eos_penalty is not None and not self.rollouts.sampling.stop_token_ids:
            raise ValueError(
                f"missing_eos_penalty={args.missing_eos_penalty} needs an end token, tokenizer and model have none. "
                "Set eos_token of the tokenizer, or leave it out."
            )
        self.method.epoch = lambda: self.state.epoch or 0.0
        self.method.judge = managed

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; the summary at the end has the judge's cost, summed over processes."""
        if self.method.judge is not None and "train_loss" in logs:
            every = gather_object([self.method.judge.cost])
            logs.update({f"judge/{name}": sum(cost[name] for cost in every) for name in every[0]})
        super().log(logs, start_time)

    def rollout_engine(self, engine: Engine) -> Engine:
        """The config's; with an opponent, it takes turns with the mixture of policy and reference."""
        if not self.args.has_opponent:
            return engine
        assert self.model is not None and self.reference is not None
        opponent = MixtureEngine(
            self.model,
            self.reference,
            coefficient=lambda: self.method.reference_share,
            tokenizer=self.processing_class,
            accelerator=self.accelerator,
        )
        return TurnsEngine(engine, opponent)
