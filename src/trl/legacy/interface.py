"""The outermost ring of every trainer: what programs of 0.4-0.26 read, set and override.

Attributes are views of the config and of the parts that hold the values. Overridden methods are called by training, or
refused before the first step. Public classes name these mixins first in their heads; nothing inside reads them.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationConfig, TrainingArguments

from trl.data.rendering import text_tokenizer
from trl.legacy import move_onto_config
from trl.models.peft import AdapterConfig, is_peft_model
from trl.models.policy import Policy
from trl.objectives.group_policy import soft_gate
from trl.trainer.arguments import Processor

WHOLE_BATCH = ("get_batch_loss_metrics", "get_batch_metrics", "store_metrics")
REFERENCES = ("compute_ref_log_probs", "compute_reference_log_probs")
LOSSES = ("dpo_loss", "cpo_loss", "odds_ratio_loss", "kto_loss", "bco_loss")
"""Methods that training calls where they are overridden, beside `compute_loss`, `outcome` and `objective`."""

RECORDED = "recorded"
"""The entry of a batch that overridden methods take: with the columns of 0.26, or as the user's collator made it."""

NotCalled = Mapping[str, tuple[tuple[str, ...], str]]
"""Methods that training does not call: those of which one must be overridden too, and what to do instead."""


_PARTS = ("concatenated_forward", "concatenated_inputs", "get_batch_logps", "null_ref_context")
_ROWS = ((), "Tokenise the rows before, with dataset.map")
WHOLE = (("get_batch_loss_metrics",), "Override get_batch_loss_metrics, which may call it")
NOT_CALLED: NotCalled = {
    **dict.fromkeys(_PARTS, WHOLE),
    **dict.fromkeys(("tokenize_row", "process_row", "build_tokenized_answer"), _ROWS),
}
_LOSS = (("objective", "compute_loss"), "Override objective(experience, scored)")
_ROLLOUT = (
    ("make_rollout_batch",),
    "Give rollout_func=, or override advantages(experience, group_size=None) or make_rollout_batch(number)",
)
_SCORING = (("score_rollout", "outcome"), "Override score_rollout(batch, columns)")
NOT_CALLED_OF_GROUPS: NotCalled = {
    **dict.fromkeys(("_compute_loss", "compute_liger_loss", "get_sapo_token_loss"), _LOSS),
    **dict.fromkeys(("_generate_and_score_completions", "_generate", "_generate_single_turn"), _ROLLOUT),
    **dict.fromkeys(("_get_per_token_logps", "_get_per_token_logps_and_entropies"), _SCORING),
    "_calculate_rewards": (("make_rollout_batch",), "Give reward_funcs="),
}

_ADDED_LATER: Mapping[str, tuple[str, ...]] = {
    "compute_loss": ("num_items_in_batch",),
    "log": ("start_time",),
    "outcome": ("step", "with_outputs"),
}
"""Arguments that overrides need not take; transformers 4.46 added those of its own methods."""

_TAKES_FEWER = "_takes_fewer_arguments"  # marks an override that is called without those

OTHER_NAMES = {
    "epsilon_low": "epsilon",
    "guided_decoding_regex": "vllm_guided_decoding_regex",
    "use_liger_kernel": "use_liger_kernel",
}
"""Attributes that are fields of the config under another name, or of `TrainingArguments`, beside those of its own."""

LIVE = frozenset((
    "alpha", "beta", "cpo_alpha", "desirable_weight", "epsilon", "epsilon_high", "f_divergence_type",
    "generate_during_eval", "label_smoothing", "ld_alpha", "log_completions", "normalize_advantages",
    "num_completions_to_print", "simpo_gamma", "undesirable_weight",
))  # fmt: skip
"""Fields that are read in every step: setting the attribute sets the field. Others are read by the constructor."""


def generation_settings(trainer: Any) -> dict[str, Any]:
    args, tokenizer = trainer.args, trainer._tokenizer
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    settings = {"do_sample": True, **{name: getattr(args, name) for name in names if hasattr(args, name)}}
    if hasattr(args, "max_completion_length"):
        settings["max_new_tokens"] = args.max_completion_length
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    ids["pad_token_id"] = trainer.scorer.pad_token_id
    return {**settings, **ids, **(getattr(args, "generation_kwargs", None) or {})}


def _of_model(name: str, default: Any) -> Callable[[Any], Any]:
    return lambda trainer: getattr(trainer.scorer.core.config.get_text_config(), name, default)


def _of_sources(*names: str) -> Callable[[Any], list[Any]]:
    def read(trainer: Any) -> list[Any]:
        sources = trainer.rollouts.rewards.sources
        return [next((getattr(source, n) for n in names if hasattr(source, n)), None) for source in sources]

    return read


class View:
    """An attribute that is read where its value is: along a path from the trainer, or by a function of it.

    Setting it sets the config's field if that is `LIVE`, and raises AttributeError otherwise. Before the constructor of
    transformers it is an attribute as any other.
    """

    def __init__(self, read: str | Callable[[Any], Any]) -> None:
        self._read = attrgetter(read) if isinstance(read, str) else read
        self._field = read.removeprefix("args.") if isinstance(read, str) else None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        if _is_built(trainer):
            return self._read(trainer)
        if self._name in vars(trainer):
            return vars(trainer)[self._name]
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")

    def __set__(self, trainer: Any, value: Any) -> None:
        if not _is_built(trainer):
            vars(trainer)[self._name] = value
        elif self._field in LIVE:
            setattr(trainer.args, self._field, value)
        elif value is not (other := getattr(trainer, self._name)):
            is_plain = isinstance(value, (str, int, float, list, tuple, dict)) and isinstance(other, type(value))
            if is_plain and value == other:
                return
            fault = f"{self._name} of {type(trainer).__name__} cannot be set after the trainer was built"
            remedy = f"Set it in {type(trainer.args).__name__}, or give it to the constructor"
            raise AttributeError(f"{fault}, got {value!r}. {remedy}.")


def _is_built(trainer: Any) -> bool:
    """Whether the constructor of transformers runs or has run; a subclass may set `args` before."""
    return {"args", "_sums"} <= vars(trainer).keys()


def _fields(config: type) -> dict[str, str]:
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    added = names - {field.name for field in dataclasses.fields(TrainingArguments)}
    others = {name: field for name, field in OTHER_NAMES.items() if field in names}
    return {**{name: name for name in added}, **others}


def _without(method: Any, later: Sequence[str]) -> Callable[..., Any]:
    count = method.__code__.co_argcount - 1

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args[:count], **{name: kwargs[name] for name in kwargs if name not in later})

    setattr(call, _TAKES_FEWER, True)
    return call


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method can be given an argument of that name, perhaps among its `*args` or `**kwargs`."""
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def call_with(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method with `args` and those of `kwargs` that it takes: by position where it has `*args` alone."""
    kinds = {p.kind for p in inspect.signature(method).parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
        return method(*args, *kwargs.values())
    return method(*args, **{name: value for name, value in kwargs.items() if takes(method, name)})


if TYPE_CHECKING:
    from trl.trainer.base_trainer import BaseTrainer as _Trainer
else:
    _Trainer = object


class Legacy(_Trainer):
    """Attributes of every trainer, and refusals of overrides that training would not call.

    A trainer has a view of each field of its config beside those listed, unless its class defines the name.
    """

    _not_called: ClassVar[NotCalled] = {}

    aux_loss_coef = View(_of_model("router_aux_loss_coef", 0.0))
    aux_loss_enabled = View(_of_model("output_router_logits", False))
    decoder_start_token_id = View(_of_model("decoder_start_token_id", None))
    is_encoder_decoder = View("scorer.core.config.is_encoder_decoder")
    is_peft_model = View(lambda trainer: is_peft_model(trainer.model))
    maybe_activation_offload_context = View(lambda trainer: trainer._offloading())
    pad_token_id = View("scorer.pad_token_id")
    ref_model = View(lambda trainer: getattr(trainer.reference, "module", None))
    tokenizer = View(lambda trainer: text_tokenizer(trainer.processing_class))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("trl."):
            for name, later in _ADDED_LATER.items():
                method = getattr(cls, name, None)  # perhaps of a mixin
                if inspect.isfunction(method) and not hasattr(method, _TAKES_FEWER):
                    missing = [argument for argument in later if not takes(method, argument)]
                    if missing:
                        setattr(cls, name, _without(method, missing))
            return
        config = getattr(cls, "_config_class", getattr(cls, "config_type", None))
        for name, field in _fields(config).items() if config else ():
            if not hasattr(cls, name):
                view = View(f"args.{field}")
                view.__set_name__(cls, name)
                setattr(cls, name, view)

    def check_class(self) -> None:
        """Raise TypeError for an override that training would not call."""
        for name, (others, advice) in self._not_called.items():
            if overrides(self, name) and not overrides(self, *others):
                fault = f"{type(self).__name__} overrides {name}, which training does not call"
                raise TypeError(f"{fault}. {advice}, or remove the override.")

    def create_accelerator_and_postprocess(self) -> None:
        """Called by transformers' constructor. Raises TypeError where a subclass calls that one in place of ours."""
        if "_sums" not in vars(self):
            name = type(self).__name__
            raise TypeError(f"{name}.__init__ did not call the constructor of its trainer. Call super().__init__(...).")
        super().create_accelerator_and_postprocess()

    def begin(
        self, model: object, args: Any, processing_class: Processor | None, peft_config: AdapterConfig,
        older: Mapping[str, object] = {}, **kwargs: Any,
    ) -> tuple[Policy, Any]:  # fmt: skip
        """`BaseTrainer.begin`; `older` arguments are moved onto the config. Raises: ValueError."""
        arguments = {"model": model, "args": args, "processing_class": processing_class, "older": older}
        moved = move_onto_config(self._config_class, **arguments)
        if getattr(moved.args, "precompute_ref_log_probs", False) and overrides(self, *REFERENCES):
            names = f"{' or '.join(REFERENCES)}, which {type(self).__name__} overrides"
            raise ValueError(f"precompute_ref_log_probs=True does not call {names}. Set it to False.")
        return super().begin(moved.model, moved.args, moved.processing_class, peft_config, **kwargs)


def overrides(trainer: Legacy, *names: str) -> bool:
    """Whether one of the named methods, which this library has or does not call, is not that of this library."""
    kind = type(trainer)
    ours = next(base for base in kind.__mro__ if base.__module__.startswith("trl."))
    known = [name for name in names if hasattr(ours, name) or name in trainer._not_called]
    return any(name in vars(trainer) or getattr(kind, name, None) is not getattr(ours, name, None) for name in known)


class LegacySFT(Legacy):
    """Attributes of `SFTTrainer`."""

    num_virtual_tokens = View(lambda t: getattr(getattr(t.model, "active_peft_config", None), "num_virtual_tokens", 0))
    padding_free = View("_padding_free")


class LegacyGroups(Legacy):
    """Attributes of the trainers that learn from rollouts, and what these refuse."""

    _not_called: ClassVar[NotCalled] = NOT_CALLED_OF_GROUPS

    chat_template = View("_tokenizer.chat_template")
    eos_token_id = View("_tokenizer.eos_token_id")
    epsilon_high = View(lambda trainer: trainer.args.group_options().high)
    generation_config = View(lambda trainer: GenerationConfig(**generation_settings(trainer)))
    generation_kwargs = View(generation_settings)
    num_generations_eval = View("evaluation_group")
    pad_token = View("_tokenizer.pad_token")
    reward_func_names = View(lambda trainer: list(trainer.rollouts.rewards.names))
    reward_funcs = View(_of_sources("function", "model", "judge"))
    reward_processing_classes = View(_of_sources("processing_class"))
    reward_weights = View(lambda trainer: trainer.rollouts.rewards.weights.float())
    rollout_func = View(lambda trainer: getattr(trainer.rollouts.completer, "function", None))
    shuffle_dataset = View("rollouts.prompts.shuffle")
    tools = View(lambda trainer: getattr(trainer.rollouts.completer, "functions", None))
    engine, rewards, sampling = (View(f"rollouts.{name}") for name in ("engine", "rewards", "sampling"))


class LegacyGRPO(LegacyGroups):
    """Methods of `GRPOTrainer` that training does not call."""

    def compute_liger_loss(self, unwrapped_model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, as `compute_loss` gives it: no loss here holds the logits of a whole batch."""
        return self.compute_loss(unwrapped_model, inputs)

    @staticmethod
    def get_sapo_token_loss(unclipped_token_loss: Tensor, temperature: float) -> Tensor:
        """SAPO's gate of each token's ratio, of any shape; its loss is minus the gate times the advantage."""
        return soft_gate(unclipped_token_loss, temperature)


class LegacyReplay(LegacyGroups):
    """What `GRPOWithReplayBufferTrainer` refuses."""

    _not_called: ClassVar[NotCalled] = {**NOT_CALLED_OF_GROUPS, **dict.fromkeys(
        ("slice_group_data", "update_replay_buffer", "sample_from_replay_buffer", "update_with_replay_buffer"),
        (("make_rollout_batch",), "Override make_rollout_batch(number)"),
    )}  # fmt: skip

    def slice_group_data(self, *args: Any, **named: Any) -> Any:
        """Not supported, nor are the other methods of 0.26 for padded tensors."""
        raise RuntimeError(
            "GRPOWithReplayBufferTrainer has no replay of padded tensors. Training replaces groups in "
            "make_rollout_batch(number); elsewhere use ReplayBuffer(max_size), add(scores, data), sample(number)."
        )

    update_replay_buffer = sample_from_replay_buffer = update_with_replay_buffer = slice_group_data
