"""What programs of 0.4-0.26 expect of every trainer: attributes, and methods that a subclass overrides.

Attributes are views of the config and of the parts that hold the values. Overridden methods are called by training, or
refused before the first step.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import GenerationConfig, TrainingArguments

from trl.data.rendering import text_tokenizer
from trl.models.peft import is_peft_model
from trl.options.checks import library_config

WHOLE_BATCH = ("get_batch_loss_metrics", "get_batch_metrics", "store_metrics")
REFERENCES = ("compute_ref_log_probs", "compute_reference_log_probs")
LOSSES = ("dpo_loss", "cpo_loss", "odds_ratio_loss", "kto_loss", "bco_loss")
CALLED = ("compute_loss", "outcome", "objective", *WHOLE_BATCH, *REFERENCES, *LOSSES)
"""Methods that training calls where a subclass overrides them, or a program replaces them."""

GIVEN = "given"
"""The entry of a batch that overridden methods are given: with the columns of 0.26, or as the user's collator made
it.
"""

NotCalled = Mapping[str, tuple[tuple[str, ...], str]]
"""Methods that training does not call: those of which one must be overridden too, and what to do instead."""


_PARTS = ("concatenated_forward", "concatenated_inputs", "get_batch_logps", "null_ref_context")
_ROWS = ("tokenize_row", "process_row", "build_tokenized_answer")
_WHOLE = (("get_batch_loss_metrics",), "Override get_batch_loss_metrics, which may call it")
NOT_CALLED: NotCalled = {
    **dict.fromkeys(_PARTS, _WHOLE),
    **dict.fromkeys(_ROWS, ((), "Tokenise the rows before, with dataset.map")),
}
NOT_CALLED_OF_UNPAIRED: NotCalled = {**NOT_CALLED, "forward": _WHOLE}
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
NOT_CALLED_OF_PROMPTS: NotCalled = {
    **NOT_CALLED_OF_GROUPS,
    **dict.fromkeys(("tokenize_row", "process_vision_row"), NOT_CALLED["tokenize_row"]),
}
NOT_CALLED_OF_GKD: NotCalled = {
    "generalized_jsd_loss": (("outcome",), "Override outcome(model, batch)"),
    "generate_on_policy_outputs": (("get_batch_samples",), "Override get_batch_samples"),
}
NOT_CALLED_OF_REPLAY: NotCalled = {**NOT_CALLED_OF_GROUPS, **dict.fromkeys(
    ("slice_group_data", "update_replay_buffer", "sample_from_replay_buffer", "update_with_replay_buffer"),
    (("make_rollout_batch",), "Override make_rollout_batch(number)"),
)}  # fmt: skip


_ADDED_LATER = {"compute_loss": "num_items_in_batch", "log": "start_time"}
"""Arguments that transformers 4.46 added: overrides of 0.4-0.11 do not take them."""

OTHER_NAMES = {
    "epsilon_low": "epsilon",
    "guided_decoding_regex": "vllm_guided_decoding_regex",
    "use_liger_kernel": "use_liger_kernel",
}
"""Attributes that are fields of the config under another name, or of `TrainingArguments`. Fields that a method's config
adds go by their own.
"""

LIVE = frozenset((
    "alpha", "beta", "cpo_alpha", "desirable_weight", "epsilon", "epsilon_high", "f_divergence_type", "generate_during_eval",
    "label_smoothing", "ld_alpha", "log_completions", "normalize_advantages", "num_completions_to_print", "simpo_gamma",
    "undesirable_weight",
))  # fmt: skip
"""Fields that are read in every step: setting the attribute sets the field. The others are read when the trainer is
built.
"""


def _generation(trainer: Any) -> dict[str, Any]:
    args, tokenizer = trainer.args, trainer._tokenizer
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {"do_sample": True, **{name: getattr(args, name) for name in names if hasattr(args, name)}}
    if hasattr(args, "max_completion_length"):
        found["max_new_tokens"] = args.max_completion_length
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    return {
        **found,
        **ids,
        "pad_token_id": trainer.scorer.pad_token_id,
        **(getattr(args, "generation_kwargs", None) or {}),
    }


def _of_model(name: str, default: Any) -> Callable[[Any], Any]:
    return lambda trainer: getattr(trainer.scorer.core.config.get_text_config(), name, default)


def _of_sources(*names: str) -> Callable[[Any], list[Any]]:
    def read(trainer: Any) -> list[Any]:
        sources = trainer.rewards.sources
        return [next((getattr(each, n) for n in names if hasattr(each, n)), None) for each in sources]

    return read


PARTS: Mapping[str, Mapping[str, str | Callable[[Any], Any]]] = {
    "BaseTrainer": {
        "aux_loss_coef": _of_model("router_aux_loss_coef", 0.0),
        "aux_loss_enabled": _of_model("output_router_logits", False),
        "decoder_start_token_id": _of_model("decoder_start_token_id", None),
        "is_encoder_decoder": _of_model("is_encoder_decoder", False),
        "is_peft_model": lambda trainer: is_peft_model(trainer.model),
        "maybe_activation_offload_context": lambda trainer: trainer._offloading(),
        "pad_token_id": "scorer.pad_token_id",
        "ref_model": lambda trainer: getattr(trainer.reference, "module", None),
        "tokenizer": lambda trainer: text_tokenizer(trainer.processing_class),
    },
    "SFTTrainer": {
        "num_virtual_tokens": lambda trainer: getattr(
            getattr(trainer.model, "active_peft_config", None), "num_virtual_tokens", 0
        ),
        "padding_free": "_padding_free",
    },
    "GKDTrainer": {
        "generation_config": lambda trainer: GenerationConfig(**_generation(trainer)),
        "generation_kwargs": _generation,
        "teacher_model": "teacher.model",
    },
    "DPOTrainer": {
        "f_divergence_params": lambda trainer: {"alpha_divergence_coef": trainer.args.f_alpha_divergence_coef},
        "is_vision_model": "with_images",
    },
    "KTOTrainer": {"calculate_KL": "mismatched"},
    "BCOTrainer": {
        "clf": lambda trainer: getattr(trainer._density, "classifier", None),
        "embedding_func": lambda trainer: getattr(trainer._density, "embedding_func", None),
        "embedding_tokenizer": lambda trainer: getattr(trainer._density, "embedding_tokenizer", None),
        "match_underlying_distribution": lambda trainer: trainer._density is not None,
    },
    "OnlineTrainer": {
        **{name: f"rollouts.{name}" for name in ("engine", "rewards", "sampling")},
        "chat_template": "_tokenizer.chat_template",
        "eos_token_id": "_tokenizer.eos_token_id",
        "epsilon_high": "method.settings.high",
        "generation_config": lambda trainer: GenerationConfig(**_generation(trainer)),
        "generation_kwargs": _generation,
        "num_generations_eval": "evaluation_group",
        "pad_token": "_tokenizer.pad_token",
        "reward_func_names": lambda trainer: list(trainer.rewards.names),
        "reward_funcs": _of_sources("function", "model", "judge"),
        "reward_processing_classes": _of_sources("processing_class"),
        "reward_weights": lambda trainer: trainer.rewards.weights.float(),
        "rollout_func": lambda trainer: getattr(trainer.rollouts.completer, "function", None),
        "shuffle_dataset": "rollouts.prompts.shuffle",
        "tools": lambda trainer: getattr(trainer.rollouts.completer, "functions", None),
    },
    "PPOTrainer": {"policy_model": "model"},
    "OnlineDPOTrainer": {"judge": lambda trainer: getattr(trainer.method.judge, "inner", None)},
    "GFPOTrainer": {"group_filter_func": "method.group_filter"},
}  # fmt: skip
"""Attributes that are parts, by trainer: the path to them, or how they are made."""


@cache
def _fields(config: type) -> dict[str, str]:
    """The attributes that are fields of a method's config, not of `TrainingArguments` or a program's subclass, with the
    fields.
    """
    config = library_config(config)
    names = {field.name for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    own = names - {field.name for field in dataclasses.fields(TrainingArguments)}
    others = {name: field for name, field in OTHER_NAMES.items() if field in names}
    return {**{name: name for name in own}, **others}


@cache
def _parts(kind: type) -> dict[str, Callable[[Any], Any]]:
    found = {name: read for each in reversed(kind.__mro__) for name, read in PARTS.get(each.__name__, {}).items()}
    return {name: attrgetter(read) if isinstance(read, str) else read for name, read in found.items()}


class LegacyInterface:
    """Mixin of trainers: reading an attribute of the tables reads the part; setting it sets a field that is `LIVE`, or
    raises.

    What is set before the trainer's constructor, or without it, is an attribute as any other. The mixin also knows
    which methods of this library's trainers a subclass, or a program, has replaced.
    """

    _not_called: ClassVar[NotCalled] = {}
    _own_methods: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if cls.__module__.startswith("trl."):
            others = {name for names, _ in cls._not_called.values() for name in names}
            names = {*(name for name in CALLED if hasattr(cls, name)), *cls._not_called, *others}
            cls._own_methods = {name: _definition(cls, name) for name in names}
            return
        for name, later in _ADDED_LATER.items():
            method = vars(cls).get(name)
            if inspect.isfunction(method) and not takes(method, later):
                setattr(cls, name, _without(method, later))

    def overridden(self, *names: str) -> bool:
        """Whether one of the named methods is not that of this library."""
        own = self._own_methods
        known = [name for name in names if name in own]
        return any(name in vars(self) or _definition(type(self), name) is not own[name] for name in known)

    def check_overrides(self) -> None:
        """Raise TypeError for an override that training would not call."""
        for name, (others, advice) in self._not_called.items():
            if self.overridden(name) and not self.overridden(*others):
                raise TypeError(
                    f"{type(self).__name__} overrides {name}, which training does not call. {advice}, or remove the override."
                )

    # ---- attributes

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in (parts := _parts(type(self))):
                return parts[name](self)
            args = vars(self).get("args")
            if args is not None and name in (fields := _fields(type(args))):
                return getattr(args, fields[name])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        built = "_sums" in vars(self) and "args" in vars(self)
        # A name that the class defines, perhaps as a property of a program's, is no view.
        fields = _fields(type(vars(self)["args"])) if built and not hasattr(type(self), name) else {}
        if fields.get(name) in LIVE:
            setattr(vars(self)["args"], fields[name], value)
        elif not fields or not (name in fields or name in _parts(type(self))):
            super().__setattr__(name, value)
        elif not _same(value, getattr(self, name)):
            raise AttributeError(
                f"{name} of {type(self).__name__} cannot be set after the trainer was built, got {value!r}. Set it in "
                f"{type(vars(self)['args']).__name__}, or give it to the constructor."
            )

    def settle_views(self) -> None:
        """After the constructor of transformers: the config's values count, whatever a program set before."""
        for name in (_parts(type(self)) | _fields(type(vars(self)["args"]))).keys() & vars(self).keys():
            del vars(self)[name]

    def adopted_args(self, config: type) -> Any:
        """The arguments of a trainer that was built without our constructor, as such a config: its attributes are
        settings.
        """
        found: Any = object.__new__(config)
        made = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
        defaults = {
            n: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for n, f in made.items()
        }
        own = {field: vars(self)[name] for name, field in _fields(config).items() if name in vars(self)}
        vars(found).update({**defaults, **vars(vars(self)["args"]), **own})
        return found


def _same(value: Any, other: Any) -> bool:
    plain = isinstance(value, (str, int, float, list, tuple, dict)) and isinstance(other, type(value))
    return value is other or (plain and value == other)


def _definition(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _without(method: Callable[..., Any], later: str) -> Callable[..., Any]:
    count = method.__code__.co_argcount - 1

    @functools.wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        named.pop(later, None)
        return method(self, *given[:count], **named)

    return call


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method can be given an argument of that name, perhaps among its `*args` or `**kwargs`."""
    parameters = inspect.signature(method).parameters.values()
    return any(p.name == name or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def call_with(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a method with `given` and those of `named` that it takes: by position where it has `*args` alone."""
    kinds = {p.kind for p in inspect.signature(method).parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
        return method(*given, *named.values())
    return method(*given, **{name: value for name, value in named.items() if takes(method, name)})
