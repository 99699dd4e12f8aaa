"""References: what a policy is held against, asked in one way whatever it is made of.

`make_reference` chooses once: a frozen model of its own, the policy with its adapter switched off, or the policy with
another adapter switched on. After that everybody says `reference.score(policy, batch, forward)`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled

from trl.models.distributed import is_sharded, prepare_deepspeed, prepare_fsdp
from trl.models.lending import peft_model_in, same_trainable, undisturbed, without_adapter, without_ddp
from trl.models.loading import create_model_from_path
from trl.models.parts import causal_core, embedded_tokens
from trl.models.peft import is_peft_model
from trl.models.quantization import forbid_inference_packing, is_quantized
from trl.models.reference_state import (
    adapter_weights,
    hash_weights,
    load_parameters,
    save_parameters,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Forward = Callable[[Any, nn.Module, Mapping[str, Any]], T]
"""(scorer, model, batch) -> whatever is wanted of the reference, such as its log-probs."""

REFERENCE_FILE = "reference.safetensors"


class Reference(Protocol):
    """A policy that does not learn: the same weights that answer for it, or a model of its own."""

    scorer: Any

    def active(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """A block in which the module it yields *is* the reference, without dropout; the policy is put back after."""
        ...

    def prepare(self, accelerator: Accelerator) -> None:
        """Bring a model of its own to the device, or shard it as the run shards the policy."""

    def cast(self, dtype: torch.dtype) -> None:
        """Hold the weights of a model of its own in another precision."""

    def fingerprint(self, policy: nn.Module) -> str:
        """A hash of the weights and settings that its log-probs depend on; all processes must ask."""
        ...

    def score(self, policy: nn.Module, batch: Mapping[str, Any], forward: Forward[T]) -> T:
        """`forward(scorer, model, batch)` of the reference, without gradient.

        `policy` may be wrapped (DDP, FSDP2, DeepSpeed). Its train or eval mode, `requires_grad` and random streams are
        afterwards what they were.
        """
        with torch.no_grad(), self.active(policy) as model:
            return forward(self.scorer, model, batch)


class FrozenModel(Reference):
    """A model of its own: given, loaded, or a copy of the policy as it was at the start.

    `module` holds the weights (callbacks that move the reference write into it), `model` is what is called: the same,
    or its DeepSpeed engine.
    """

    def __init__(self, model: nn.Module, scorer: Any) -> None:
        self.scorer = scorer
        self.module = self.model = model.requires_grad_(False).eval()
        forbid_inference_packing(model)  # it would change the weights' bytes, and so the fingerprint

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The frozen model."""
        with undisturbed(self.model):
            yield self.model

    def prepare(self, accelerator: Accelerator) -> None:
        """Shard it under FSDP and ZeRO-3, else move it to the device; a quantised or spread-out one stays as it is."""
        if is_quantized(self.module) or hasattr(self.module, "hf_device_map"):
            return
        if accelerator.state.deepspeed_plugin is not None:
            self.model = prepare_deepspeed(self.module, accelerator)
        elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
            self.model = prepare_fsdp(self.module, accelerator)
        else:
            self.module.to(accelerator.device)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast its weights; quantised ones, and those that an engine of DeepSpeed's holds, stay as they are."""
        if self.model is self.module and not is_quantized(self.module):
            self.module.to(dtype)

    def fingerprint(self, policy: nn.Module) -> str:
        """Of all its weights and its config; of adapters also how they are added, and which of them are active."""
        settings = causal_core(self.module).config.to_dict()
        if is_peft_model(self.module):
            adapted: Any = self.module
            settings["adapters"] = {name: kind.to_dict() for name, kind in adapted.peft_config.items()}
            settings["active"] = adapted.active_adapters
        return hash_weights(self.module, settings=settings)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write its weights into a checkpoint, for a run that moves them (TR-DPO, BEMA). All processes must call it."""
        save_parameters(self.module, os.path.join(folder, REFERENCE_FILE))

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take its weights from a checkpoint, bit for bit; one without them is said, and leaves it as it is."""
        file = os.path.join(folder, REFERENCE_FILE)
        if os.path.isfile(file):
            load_parameters(self.module, file)
        else:
            logger.warning("%s is missing: the reference starts anew from its first weights.", file)


class InitialPolicy(Reference):
    """The policy itself, before its first optimiser step: enough where log-probs are computed in advance."""

    def __init__(self, policy: nn.Module, scorer: Any) -> None:
        self.policy, self.scorer = policy, scorer

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The policy in eval mode."""
        model = without_ddp(policy)
        with undisturbed(model):
            yield model

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the policy to the device, where DeepSpeed would bring it later."""
        if not (is_quantized(self.policy) or hasattr(self.policy, "hf_device_map")):
            self.policy.to(accelerator.device)

    def fingerprint(self, policy: nn.Module) -> str:
        """Of all weights of the policy and its config."""
        return hash_weights(self.policy, settings=causal_core(self.policy).config.to_dict())


class DisabledAdapter(Reference):
    """The policy with its adapter switched off; modules trained as a whole are the original ones."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The policy without its adapter, in eval mode."""
        model, adapted = without_ddp(policy), peft_model_in(policy)
        with undisturbed(model), same_trainable(model) as put_back, without_adapter(adapted):
            put_back()
            yield model

    def fingerprint(self, policy: nn.Module) -> str:
        """Of the base's weights and config; the adapter has no part in it."""
        model = peft_model_in(policy)
        left_out = frozenset(adapter_weights(model))
        return hash_weights(model, settings=causal_core(model).config.to_dict(), left_out=left_out)


class NamedAdapter(Reference):
    """The policy's base with another adapter; `policy_adapter` is the one that trains."""

    def __init__(self, scorer: Any, ref_adapter: str, policy_adapter: str) -> None:
        self.scorer, self.ref_adapter, self.policy_adapter = scorer, ref_adapter, policy_adapter

    @contextmanager
    def active(self, policy: nn.Module) -> Iterator[nn.Module]:
        """The policy with the reference's adapter in the place of its own, in eval mode."""
        model, adapted = without_ddp(policy), peft_model_in(policy)
        with undisturbed(model), same_trainable(model) as put_back:
            try:
                adapted.set_adapter(self.ref_adapter, inference_mode=True)
                put_back()
                yield model
            finally:
                adapted.set_adapter(self.policy_adapter)

    def fingerprint(self, policy: nn.Module) -> str:
        """Of the base's and the reference adapter's weights and configs."""
        model = peft_model_in(policy)
        left_out = frozenset(
            name for name, adapter in adapter_weights(model).items() if adapter != self.ref_adapter
        )
        settings = {
            **causal_core(model).config.to_dict(),
            "adapter": model.peft_config[self.ref_adapter].to_dict(),
        }
        return hash_weights(model, settings=settings, left_out=left_out)


def make_reference(
    policy: nn.Module,
    *,
    scorer: Any,
    make_scorer: Callable[[nn.Module], Any],
    ref_model: nn.Module | str | os.PathLike[str] | None = None,
    ref_model_init_kwargs: dict[str, Any] | None = None,
    model_adapter_name: str | None = None,
    ref_adapter_name: str | None = None,
    force_use_ref_model: bool = False,
    model_path: str | None = None,
    model_init_kwargs: dict[str, Any] | None = None,
    precompute: bool = False,
) -> Reference:
    """The reference of a policy that is loaded and, with PEFT, wrapped, but not yet prepared by accelerate.

    `ref_model` is taken, or loaded with `ref_model_init_kwargs`. Without it a `PeftModel` is its own reference, with the
    adapter `ref_adapter_name` or with none, and any other model is copied. A policy whose weights are sharded already
    (ZeRO-3) is loaded again from `model_path` with `model_init_kwargs` instead, so give these where the trainer loaded it.
    With `precompute` the reference is only asked before training, and the copy is saved.

    `scorer` scores the policy, `make_scorer(model)` makes one for a model of the reference's own. Switches the policy to
    `model_adapter_name`, and freezes `ref_adapter_name`, in place.

    Raises: ValueError for settings that exclude each other or would not do what they say; FileNotFoundError, TypeError
    for what is no model.
    """
    _check_settings(ref_model, ref_model_init_kwargs, ref_adapter_name)
    if ref_model is None and force_use_ref_model:
        logger.warning("force_use_ref_model=True has no effect without a ref_model.")
    trained = _choose_adapters(policy, model_adapter_name, ref_adapter_name)
    if trained is not None:
        _check_adapter_is_reference(ref_model, force_use_ref_model)
        if ref_model is None:
            _check_adapter_is_whole(policy, precompute)
            named = ref_adapter_name is not None
            return NamedAdapter(scorer, ref_adapter_name, trained) if named else DisabledAdapter(scorer)
    if ref_model is None and precompute and not _shards(policy):
        return InitialPolicy(policy, scorer)
    if ref_model is None:
        model = _frozen_copy(policy, model_path, model_init_kwargs)
    elif isinstance(ref_model, nn.Module):
        model = ref_model
    else:
        model = create_model_from_path(os.fspath(ref_model), **(ref_model_init_kwargs or {}))
    _check_fits(policy, model)
    return FrozenModel(model, make_scorer(model))


def do_without_reference(
    policy: nn.Module,
    *,
    ref_model_init_kwargs: dict[str, Any] | None = None,
    model_adapter_name: str | None = None,
) -> None:
    """What `make_reference` does to a policy that is held against nothing: `model_adapter_name` is the adapter that trains.

    Raises: ValueError as `make_reference` does.
    """
    _check_settings(None, ref_model_init_kwargs, None)
    _choose_adapters(policy, model_adapter_name)


# ---- the rules


def _check_settings(
    ref_model: Any, ref_model_init_kwargs: dict[str, Any] | None, ref_adapter_name: str | None
) -> None:
    if ref_model_init_kwargs and not isinstance(ref_model, (str, os.PathLike)):
        given = "no ref_model" if ref_model is None else "a ref_model that is loaded already"
        raise ValueError(
            f"ref_model_init_kwargs={ref_model_init_kwargs!r} was given with {given}, expected a name or path. Pass "
            "ref_model as one, or load it with these arguments yourself."
        )
    if ref_model is not None and not isinstance(ref_model, (nn.Module, str, os.PathLike)):
        raise TypeError(
            f"ref_model must be a model, or its name or path, got {type(ref_model).__name__}. Leave it out to use the model as "
            "it is now."
        )
    if ref_model is not None and ref_adapter_name is not None:
        raise ValueError(
            f"ref_model and ref_adapter_name={ref_adapter_name!r} are two references, one is allowed. Leave one out."
        )


def _check_adapter_names(policy: Any, **names: str | None) -> None:
    known = sorted(policy.peft_config) if is_peft_model(policy) else []
    for field, name in names.items():
        if name is not None and not known:
            raise ValueError(
                f"{field}={name!r} names a PEFT adapter, and the model has none. Wrap it with "
                "`PeftModel.from_pretrained(model, path, adapter_name=...)`, or leave the name out."
            )
        if name is not None and name not in known:
            raise ValueError(
                f"{field}={name!r} is no adapter of the model, which has {known}. Choose one of them, or load it with "
                f"`model.load_adapter(path, adapter_name={name!r})`."
            )


def _choose_adapters(
    policy: Any, model_adapter_name: str | None, ref_adapter_name: str | None = None
) -> str | None:
    """Let `model_adapter_name` be the active adapter and freeze the reference's; returns the name of the active one.

    None for a policy that has no adapters; then neither may be named.
    """
    _check_adapter_names(policy, model_adapter_name=model_adapter_name, ref_adapter_name=ref_adapter_name)
    if not is_peft_model(policy):
        return None
    trained = model_adapter_name or policy.active_adapter
    if trained == ref_adapter_name:
        raise ValueError(
            f"ref_adapter_name={ref_adapter_name!r} is the adapter that trains, expected another one. Load the adapter a "
            f"second time under another name, with `model.load_adapter(path, adapter_name='reference')`."
        )
    if policy.active_adapter != trained:
        policy.set_adapter(trained)
    if ref_adapter_name is not None:
        owners = adapter_weights(policy)
        for name, parameter in policy.named_parameters():
            if owners.get(name) == ref_adapter_name:
                parameter.requires_grad_(False)
    return trained


def _check_adapter_is_reference(ref_model: Any, force_use_ref_model: bool) -> None:
    if ref_model is not None and not force_use_ref_model:
        raise ValueError(
            "ref_model was given with a PEFT model, whose base (the adapter switched off) is a reference that takes no "
            "memory. Leave ref_model out, or set force_use_ref_model=True if it is another model."
        )


def _check_adapter_is_whole(policy: nn.Module, precompute: bool) -> None:
    if precompute and _shards(policy):
        raise ValueError(
            "precompute_ref_log_probs=True with an adapter needs whole weights before training, and ZeRO-3 or FSDP "
            "shards them. Set precompute_ref_log_probs=False: a switched-off adapter takes no extra memory."
        )


def _frozen_copy(
    policy: nn.Module, model_path: str | None, model_init_kwargs: dict[str, Any] | None
) -> nn.Module:
    if not is_sharded(policy):
        return copy.deepcopy(policy)
    if model_path is None:
        raise ValueError(
            "The model's weights are sharded already (ZeRO-3 or FSDP) and cannot be copied for the reference. Pass "
            "ref_model, or pass model as a name or path, so that the reference is loaded from it too."
        )
    return create_model_from_path(model_path, **(model_init_kwargs or {}))


def _check_fits(policy: nn.Module, reference: nn.Module) -> None:
    """Raise ValueError for a reference that is the policy, or that does not read and write the same tokens."""
    trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    if reference is policy or any(id(parameter) in trained for parameter in reference.parameters()):
        raise ValueError(
            "ref_model and model share weights that train, expected a model of its own. Leave ref_model out to use a "
            "frozen copy of the model as it is now, or load it a second time."
        )
    core, other = causal_core(policy), causal_core(reference)
    ours, theirs = embedded_tokens(core), embedded_tokens(other)
    if ours != theirs:
        raise ValueError(
            f"ref_model has a vocabulary of {theirs} tokens, the model one of {ours}; they must be the same. Choose a "
            "reference of the same family, or grow its embeddings with `ref_model.resize_token_embeddings`."
        )
    if core.config.is_encoder_decoder != other.config.is_encoder_decoder:
        kinds = ("a decoder alone", "an encoder-decoder")
        raise ValueError(
            f"ref_model is {kinds[other.config.is_encoder_decoder]} and the model {kinds[core.config.is_encoder_decoder]}; "
            "they must be of one kind. Choose a reference of the same kind."
        )


def _shards(policy: nn.Module) -> bool:
    """Whether the policy's weights are sharded, or will be before training."""
    is_fsdp_run = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return is_fsdp_run or is_deepspeed_zero3_enabled() or is_sharded(policy)
