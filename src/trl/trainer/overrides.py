"""Methods of 0.4-0.26 that a subclass overrides: training calls them, or they are refused before the first step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

WHOLE_BATCH = ("get_batch_loss_metrics", "get_batch_metrics", "store_metrics")
REFERENCES = ("compute_ref_log_probs", "compute_reference_log_probs")
LOSSES = ("dpo_loss", "cpo_loss", "odds_ratio_loss", "kto_loss", "bco_loss")
CALLED = ("compute_loss", *WHOLE_BATCH, *REFERENCES, *LOSSES)
"""Methods that training calls where a subclass overrides them, or a program replaces them."""

GIVEN = "given"
"""The entry of a batch that overridden methods are given: with the columns of 0.26, or as the user's collator made it."""

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
_SCORING = (("score_rollout", "outcome"), "Override score_rollout(batch, learning=...)")
NOT_CALLED_OF_GROUPS: NotCalled = {
    **dict.fromkeys(("_compute_loss", "compute_liger_loss", "get_sapo_token_loss"), _LOSS),
    **dict.fromkeys(("_generate_and_score_completions", "_generate", "_generate_single_turn"), _ROLLOUT),
    **dict.fromkeys(("_get_per_token_logps", "_get_per_token_logps_and_entropies"), _SCORING),
    "_calculate_rewards": (("make_rollout_batch",), "Give reward_funcs="),
}
NOT_CALLED_OF_REPLAY: NotCalled = {**NOT_CALLED_OF_GROUPS, **dict.fromkeys(
    ("slice_group_data", "update_replay_buffer", "sample_from_replay_buffer", "update_with_replay_buffer"),
    (("make_rollout_batch",), "Override make_rollout_batch(number)"),
)}  # fmt: skip


_ADDED_LATER = {"compute_loss": "num_items_in_batch", "log": "start_time"}
"""Arguments that transformers 4.46 added: overrides of 0.4-0.11 do not take them."""


class Overridable:
    """Mixin that knows which methods of this library's trainers a subclass, or a program, has replaced."""

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
