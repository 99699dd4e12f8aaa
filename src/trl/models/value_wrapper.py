"""A language model with something added: loading it by name or from a model, adapters, saving, sharing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.utils import PushToHubMixin

from trl.data.hub import loading_from_hub
from trl.models.loading import create_model_from_path
from trl.models.parts import causal_core
from trl.models.peft import is_peft_model, merge_adapter, prepare_model_for_kbit_training, require_peft
from trl.models.quantization import is_quantized
from trl.models.reward_adapters import adapter_scores, add_reward_adapter
from trl.models.value_head_saving import (
    PREFIX,
    expected_value_head,
    load_value_head,
    remove_value_head,
    save_value_head,
)

_BASE = "pretrained_model."


class PreTrainedModelWrapper(nn.Module, PushToHubMixin):
    """A transformers model, maybe inside PEFT, as `pretrained_model`, with modules of its own beside it.

    Subclasses name the auto class that loads the model (`transformers_parent_class`) and the arguments of their own
    (`supported_args`). `score_module` is the head of a reward adapter named `rm_adapter_name`.
    """

    transformers_parent_class: ClassVar[Any] = None
    supported_args: ClassVar[tuple[str, ...]] = ()
    supported_modules: ClassVar[tuple[str, ...]] = ()
    supported_rm_modules: ClassVar[tuple[str, ...]] = ("score",)
    supported_pretrained_model_architectures: ClassVar[tuple[type, ...]] = (
        PreTrainedModel,
        PushToHubMixin,  # PeftModel's base, which needs no import of peft
    )

    def __init__(
        self,
        pretrained_model: Any = None,
        score_module: nn.Module | None = None,
        supports_rm_adapter: bool = False,
        rm_adapter_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.is_peft_model = is_peft_model(pretrained_model)
        self.supports_rm_adapter = supports_rm_adapter
        self.rm_adapter_name = rm_adapter_name
        self.policy_adapter_name = pretrained_model.active_adapter if self.is_peft_model else "default"
        if score_module is not None:
            self.score = score_module

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | nn.Module,
        *model_args: Any,
        **kwargs: Any,
    ) -> Any:
        """A wrapper around a model given by Hub name or folder, or around a model that exists.

        `peft_config` wraps it with a new adapter (one that is there is merged into the base); a folder with an adapter loads it over its base, ready to be trained
        unless `is_trainable=False`. `reward_adapter` (folder or name) adds a reward model's adapter under
        `reward_adapter_name`. `load_in_8bit` and `load_in_4bit` quantise. Other keyword arguments go to the model's
        `from_pretrained`, or are the wrapper's own (`supported_args`). The added modules' weights load where the
        checkpoint has them: from safetensors, and with `pickled_value_head=True` (or `use_safetensors=False`) from TRL's
        `pytorch_model.bin` too.

        Raises: TypeError for what is no model; ValueError for an adapter that cannot be merged; FileNotFoundError where there is no such model.
        """
        own = {name: kwargs.pop(name) for name in cls.supported_args if name in kwargs}
        peft_config = kwargs.pop("peft_config", None)
        reward_adapter = kwargs.pop("reward_adapter", None)
        reward_name = kwargs.pop("reward_adapter_name", "reward_adapter")
        is_trainable = kwargs.pop("is_trainable", True)
        pickled = kwargs.pop("pickled_value_head", kwargs.get("use_safetensors") is False)
        weights = None
        if isinstance(pretrained_model_name_or_path, str | os.PathLike):
            path = os.fspath(pretrained_model_name_or_path)
            with loading_from_hub(path, "model"):
                with expected_value_head():
                    model = create_model_from_path(path, cls.transformers_parent_class, **_quantised(kwargs))
                weights = load_value_head(path, pickled=pickled, **kwargs)
        else:
            model = _checked(pretrained_model_name_or_path)
        model = _with_adapter(model, peft_config, trainable=is_trainable)
        score = None
        if reward_adapter is not None:
            score = add_reward_adapter(model, reward_adapter, name=reward_name, token=kwargs.get("token"))
            own |= {"score_module": score, "supports_rm_adapter": True, "rm_adapter_name": reward_name}
        wrapped = cls(model, *model_args, **own)
        wrapped.post_init(weights or {})
        return wrapped

    @classmethod
    def add_and_load_reward_modeling_adapter(
        cls,
        pretrained_model: Any,
        adapter_model_id: str,
        adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> nn.Linear:
        """Load a reward adapter into a `PeftModel`, frozen and not active, and return its score head."""
        return add_reward_adapter(pretrained_model, adapter_model_id, name=adapter_name, token=token)

    def compute_reward_score(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Scores of the reward adapter at every position, `(B, T) -> (B, T, C)`, without gradient.

        `ppo_adapter_name` is the adapter that is active afterwards (by default the policy's). Raises ValueError without a
        reward adapter.
        """
        if not self.supports_rm_adapter or self.rm_adapter_name is None:
            raise ValueError(
                "compute_reward_score needs a reward adapter, got none. Load the model with "
                "from_pretrained(..., peft_config=..., reward_adapter=...)."
            )
        back_to = kwargs.pop("ppo_adapter_name", self.policy_adapter_name)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        return adapter_scores(
            self.pretrained_model, self.score, inputs, adapter=self.rm_adapter_name, policy_adapter=back_to
        )

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the added modules' weights out of a checkpoint's; nothing is added here."""

    def added_weights(self) -> dict[str, Tensor]:
        """The weights of the added modules, by their names in a checkpoint."""
        return {}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the wrapped model."""
        return self.pretrained_model.generate(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save as a checkpoint of the wrapped model (safetensors, sharded by `max_shard_size`) with the added weights.

        An adapter is saved alone, the added weights in a file beside it. `state_dict` may have names of either form.
        """
        given = {key.removeprefix(_BASE): weight for key, weight in (state_dict or {}).items()}
        added = {
            key: weight for key, weight in given.items() if key.startswith(PREFIX)
        } or self.added_weights()
        model = self.pretrained_model
        if self.is_peft_model or is_quantized(model):
            given = {key: weight for key, weight in given.items() if key not in added}
            model.save_pretrained(save_directory, **({"state_dict": given} if given else {}), **kwargs)
            if kwargs.get("is_main_process", True) and added:
                save_value_head(added, save_directory)
            return
        if kwargs.get("is_main_process", True):
            remove_value_head(save_directory)
        whole = given or dict(model.state_dict())
        model.save_pretrained(save_directory, state_dict={**whole, **added}, **kwargs)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The wrapped model's weights under its own names, and the added ones under theirs (`v_head.*`)."""
        del args  # torch's older form by position is not used by anything that saves models
        whole = self.pretrained_model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, module in self.named_children():
            if name != "pretrained_model":
                module.state_dict(destination=whole, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return whole

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take weights under the names that `state_dict` gives them, or under the modules' own."""
        children = tuple(f"{prefix}{name}." for name, _ in self.named_children())
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(children)]:
            state_dict[f"{prefix}{_BASE}{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_base_model(self) -> PreTrainedModel:
        """The transformers model inside of this wrapper and PEFT's."""
        return causal_core(self.pretrained_model)

    @property
    def config(self) -> Any:
        """The wrapped model's config."""
        return self.pretrained_model.config

    @property
    def generation_config(self) -> Any:
        """The wrapped model's settings of generation."""
        return self.get_base_model().generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self.get_base_model().generation_config = value

    @property
    def device(self) -> torch.device:
        """Where the wrapped model's first parameter is."""
        return next(self.pretrained_model.parameters()).device

    @property
    def current_device(self) -> torch.device:
        """`device`, by its name in older programs."""
        return self.device

    @property
    def dtype(self) -> torch.dtype:
        """The wrapped model's dtype."""
        return self.get_base_model().dtype

    def get_input_embeddings(self) -> nn.Module:
        """The wrapped model's table of token embeddings."""
        return self.get_base_model().get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """The wrapped model's language modelling head."""
        return self.get_base_model().get_output_embeddings()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped model's forward takes at a step of generation."""
        return self.pretrained_model.prepare_inputs_for_generation(*args, **kwargs)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Recompute the wrapped model's activations in the backward pass."""
        self.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep the wrapped model's activations for the backward pass."""
        self.get_base_model().gradient_checkpointing_disable()

    def enable_input_require_grads(self) -> None:
        """Let gradients through a frozen embedding."""
        self.get_base_model().enable_input_require_grads()


def _quantised(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`load_in_8bit` and `load_in_4bit` of older programs as the quantisation config that they stand for."""
    kwargs = dict(kwargs)
    asked = {name: kwargs.pop(name, False) for name in ("load_in_8bit", "load_in_4bit")}
    if any(asked.values()):
        kwargs["quantization_config"] = BitsAndBytesConfig(**asked)
    return kwargs


def _checked(model: Any) -> Any:
    if isinstance(model, PreTrainedModel) or is_peft_model(model):
        return model
    raise TypeError(
        f"the model must be a Hub name, a folder, a PreTrainedModel or a PeftModel, got {type(model).__name__}. Load it with "
        "a transformers auto class first."
    )


def _with_adapter(model: Any, peft_config: Any, *, trainable: bool) -> Any:
    """The model with a new adapter where one is asked for, and its own adapter frozen unless `trainable`."""
    if peft_config is None:
        if is_peft_model(model) and not trainable:
            model.requires_grad_(False)
        return model
    require_peft()
    from peft import get_peft_model

    if is_peft_model(model):
        model = merge_adapter(model)
    if is_quantized(model):
        model = prepare_model_for_kbit_training(model)
    return get_peft_model(model, peft_config)


@contextmanager
def under_module_names(accelerator: Any) -> Iterator[None]:
    """A block in which, under FSDP, the `state_dict` of prepared models names weights as `named_parameters` does.

    `torch.distributed.checkpoint`, through which FSDP2's weights and optimiser states come and go, takes both for one list
    of names.
    """
    sharded = getattr(accelerator.state, "fsdp_plugin", None) is not None
    models: list[Any] = [accelerator.unwrap_model(model) for model in accelerator._models] if sharded else []
    for model in models:
        model.state_dict = partial(nn.Module.state_dict, model)
    try:
        yield
    finally:
        for model in models:
            del model.state_dict
