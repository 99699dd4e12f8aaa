"""Language models with additional modules: loading, adapters (also of a reward model), saving."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    PushToHubMixin,
)
from transformers.utils.hub import cached_file

from trl.data.hub import loading_from_hub
from trl.models.loading import cast_state, create_model_from_path, name_dtype, save_dtype, without_records
from trl.models.packed.layout import Inputs
from trl.models.parts import causal_core
from trl.models.peft import is_peft_model, is_quantized, prepare_peft_model, require_peft
from trl.models.switches import same_trainable, undisturbed
from trl.options.checks import CHECKPOINTING

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

PREFIX = "v_head."
SEPARATE_FILE = "value_head.safetensors"
_SAFE_FILES = (SEPARATE_FILE, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)
_PICKLED_FILES = (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)
_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
_BASE = "pretrained_model."
# Attributes that are those of the model inside the wrapper and PEFT.
_OF_BASE = (
    "config", "device", "dtype", "get_input_embeddings", "get_output_embeddings", "enable_input_require_grads",
    *(f"{name}_{switch}" for name in CHECKPOINTING for switch in ("enable", "disable")),
)  # fmt: skip


class PreTrainedModelWrapper(nn.Module, PushToHubMixin):
    """A transformers model, optionally inside PEFT, as `pretrained_model`, with additional modules.

    Subclasses name the auto class that loads the model (`transformers_parent_class`) and their own arguments
    (`supported_args`). `score_module` is the head of a reward adapter named `rm_adapter_name`.
    """

    transformers_parent_class: ClassVar[Any] = None
    supported_args: ClassVar[tuple[str, ...]] = ()
    supported_modules: ClassVar[tuple[str, ...]] = ()
    supported_rm_modules: ClassVar[tuple[str, ...]] = ("score",)
    # PushToHubMixin is PeftModel's base, which needs no import of peft.
    supported_pretrained_model_architectures: ClassVar[tuple[type, ...]] = (PreTrainedModel, PushToHubMixin)

    def __init__(
        self, pretrained_model: Any = None, score_module: nn.Module | None = None, supports_rm_adapter: bool = False,
        rm_adapter_name: str | None = None, **kwargs: object,
    ) -> None:  # fmt: skip
        super().__init__()
        self.pretrained_model = pretrained_model
        self.is_peft_model = is_peft_model(pretrained_model)
        self.supports_rm_adapter = supports_rm_adapter
        self.rm_adapter_name = rm_adapter_name
        self.policy_adapter_name = pretrained_model.active_adapter if self.is_peft_model else "default"
        if score_module is not None:
            self.score = score_module

    def __getattr__(self, name: str) -> Any:
        if name in _OF_BASE:
            return getattr(self.get_base_model(), name)
        return super().__getattr__(name)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | nn.Module, *model_args: Any, **kwargs: Any
    ) -> Self:
        """A wrapper around a model given by Hub name or folder, or around a loaded model.

        `peft_config` adds a new adapter (an existing one is merged into the base). A folder with an adapter is loaded
        over its base, trainable unless `is_trainable=False`. `reward_adapter` (folder or name) adds a reward model's
        adapter under `reward_adapter_name`. `load_in_8bit` and `load_in_4bit` quantise. Other keyword arguments go to
        the model's `from_pretrained`, or are the wrapper's own (`supported_args`). The added modules' weights are
        loaded if the checkpoint has them: from safetensors, and with `pickled_value_head=True` (or
        `use_safetensors=False`) also from TRL's `pytorch_model.bin`. Raises: TypeError for what is no model; ValueError
        for an adapter that cannot be merged; FileNotFoundError if there is no such model.
        """
        settings = {name: kwargs.pop(name) for name in cls.supported_args if name in kwargs}
        peft_config = kwargs.pop("peft_config", None)
        reward_adapter = kwargs.pop("reward_adapter", None)
        reward_name = kwargs.pop("reward_adapter_name", "reward_adapter")
        is_trainable = kwargs.pop("is_trainable", True)
        pickled = kwargs.pop("pickled_value_head", kwargs.get("use_safetensors") is False)
        bits = {name: kwargs.pop(name, False) for name in ("load_in_8bit", "load_in_4bit")}
        if any(bits.values()):
            kwargs["quantization_config"] = BitsAndBytesConfig(**bits)
        model, weights = pretrained_model_name_or_path, None
        if isinstance(model, str | os.PathLike):
            path = os.fspath(model)
            with loading_from_hub(path, "model"):
                with without_records(logging.getLogger("transformers.modeling_utils"), _lists_value_heads_alone):
                    auto, trained = cls.transformers_parent_class, peft_config is None
                    model = create_model_from_path(path, auto, trained=trained, **kwargs)
                weights = load_value_head(path, pickled=pickled, **kwargs)
        elif not (isinstance(model, PreTrainedModel) or is_peft_model(model)):
            raise TypeError(f"model must be a name, PreTrainedModel or PeftModel, got {type(model)}.")
        model = _with_adapter(model, peft_config, trainable=is_trainable)
        if reward_adapter is not None:
            score = cls.add_and_load_reward_modeling_adapter(model, reward_adapter, reward_name, kwargs.get("token"))
            settings |= {"score_module": score, "supports_rm_adapter": True, "rm_adapter_name": reward_name}
        wrapped = cls(model, *model_args, **settings)
        wrapped.post_init(weights or {})
        return wrapped

    @classmethod
    def add_and_load_reward_modeling_adapter(
        cls, pretrained_model: Any, adapter_model_id: str, adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> nn.Linear:  # fmt: skip
        """Load a reward model's adapter into a `PeftModel`, frozen and not active, and return its score head, frozen.

        `adapter_model_id` is a folder or Hub name that PEFT saved from a sequence classifier over the same base model.
        Raises: TypeError for a model without adapters, ValueError for a name in use or an adapter without score head.
        """
        require_peft()
        from peft import PeftConfig, set_peft_model_state_dict
        from peft.utils.save_and_load import load_peft_weights

        model, name = pretrained_model, adapter_name
        if not is_peft_model(model):
            raise TypeError(f"reward_adapter needs a PeftModel, got {type(model).__name__}. Set peft_config.")
        if name in model.peft_config:
            raise ValueError(f"reward_adapter_name {name!r} is taken by another adapter. Choose another.")
        with loading_from_hub(adapter_model_id, "adapter"):
            config: Any = PeftConfig.from_pretrained(adapter_model_id, token=token)
            weights = load_peft_weights(adapter_model_id, device="cpu", token=token)
        config.modules_to_save, config.inference_mode = None, True  # the head is not in a language model
        parts = {key: key.rpartition(".")[2] for key in weights if ".score." in f".{key}"}
        of_head = {part: weights.pop(key) for key, part in parts.items()}
        if "weight" not in of_head:
            raise ValueError(
                f"'{adapter_model_id}' has no score head. "
                "Train it with RewardTrainer and LoraConfig(task_type='SEQ_CLS')."
            )
        active = model.active_adapter
        with same_trainable(model):
            model.add_adapter(name, config)
            set_peft_model_state_dict(model, weights, adapter_name=name)
            model.set_adapter(active)
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameter.requires_grad_(False)
        weight = of_head["weight"]
        head = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in of_head)
        head.load_state_dict(of_head)
        return head.to(next(model.parameters()).device, weight.dtype).requires_grad_(False).eval()

    @torch.no_grad()
    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> Tensor:
        """Scores of the reward adapter at every position, `(B, T) -> (B, T, C)`, without gradient.

        The score of a sequence is that of its last token. `ppo_adapter_name` is the adapter that is active afterwards
        (by default the policy's). Raises ValueError without a reward adapter.
        """
        if not self.supports_rm_adapter or self.rm_adapter_name is None:
            raise ValueError("compute_reward_score needs a model loaded with reward_adapter=...")
        model = self.pretrained_model
        policy_adapter = kwargs.pop("ppo_adapter_name", self.policy_adapter_name)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, **kwargs}
        with undisturbed(model), same_trainable(model) as put_back:
            try:
                model.set_adapter(self.rm_adapter_name, inference_mode=True)
                put_back()
                outputs = model(**inputs, output_hidden_states=True, use_cache=False)
            finally:
                model.set_adapter(policy_adapter)
            return self.score(last_hidden(outputs).to(next(self.score.parameters()).dtype))

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the added modules' weights from those of a checkpoint; here there are none."""

    def added_weights(self) -> dict[str, Tensor]:
        """The weights of the added modules, by their names in a checkpoint."""
        return {}

    def generate(self, *args: object, **kwargs: object) -> Any:
        """`generate` of the wrapped model."""
        return self.pretrained_model.generate(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> Inputs:
        """The arguments of the wrapped model's forward at a step of generation."""
        return self.pretrained_model.prepare_inputs_for_generation(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: object,
    ) -> None:
        """Save a checkpoint of the wrapped model (safetensors, sharded by `max_shard_size`) with the added weights.

        An adapter is saved alone, with the added weights in a separate file. `state_dict` may use either naming.
        """
        weights = {key.removeprefix(_BASE): weight for key, weight in (state_dict or {}).items()}
        added = {key: weight for key, weight in weights.items() if key.startswith(PREFIX)} or self.added_weights()
        model, file = self.pretrained_model, Path(save_directory, SEPARATE_FILE)
        is_main = kwargs.get("is_main_process", True)
        if not (self.is_peft_model or is_quantized(model)):
            if is_main:
                file.unlink(missing_ok=True)  # an adapter's, which would be read instead of what is saved now
            dtype = save_dtype(model)
            whole = cast_state(model, weights or model.state_dict(), dtype)
            model.save_pretrained(save_directory, state_dict={**whole, **added}, **kwargs)
            if is_main:
                name_dtype(save_directory, dtype)
            return
        weights = {key: weight for key, weight in weights.items() if key not in added}
        model.save_pretrained(save_directory, **({"state_dict": weights} if weights else {}), **kwargs)
        if is_main and added:
            file.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: weight.detach().cpu().contiguous() for name, weight in added.items()}
            save_file(tensors, file, metadata={"format": "pt"})

    def state_dict(self, *args: object, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The wrapped model's weights under its own names, and the added ones under theirs (`v_head.*`)."""
        del args  # torch's older positional form; nothing that saves models uses it
        whole = self.pretrained_model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, module in self.named_children():
            if name != "pretrained_model":
                module.state_dict(destination=whole, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return whole

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        """Load weights under the names of `state_dict`, or under the modules' own."""
        children = tuple(f"{prefix}{name}." for name, _ in self.named_children())
        for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(children)]:
            state_dict[f"{prefix}{_BASE}{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_base_model(self) -> PreTrainedModel:
        """The transformers model inside this wrapper and PEFT's."""
        return causal_core(self.pretrained_model)

    @property
    def generation_config(self) -> GenerationConfig:
        """The wrapped model's generation config."""
        return self.get_base_model().generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        self.get_base_model().generation_config = value

    @property
    def current_device(self) -> torch.device:
        """`device`, by its name in older programs."""
        return self.device


def last_hidden(outputs: Any) -> Tensor:
    """The last hidden states `(B, T, H)` of a language model's outputs; the decoder's, if it has an encoder too."""
    return (getattr(outputs, "decoder_hidden_states", None) or outputs.hidden_states)[-1]


def _with_adapter(model: Any, peft_config: "PeftConfig | None", *, trainable: bool) -> PreTrainedModel:
    """The model with a new adapter if there is a `peft_config`; its own adapter is frozen unless `trainable`."""
    if peft_config is None:
        if is_peft_model(model) and not trainable:
            model.requires_grad_(False)
        return model
    args: Any = SimpleNamespace(
        gradient_checkpointing=is_quantized(model), gradient_checkpointing_kwargs=None, bf16=False
    )
    return prepare_peft_model(model, peft_config, args)


@contextmanager
def under_module_names(accelerator: Accelerator) -> Iterator[None]:
    """A block in which, under FSDP, the `state_dict` of prepared models names weights as `named_parameters` does.

    `torch.distributed.checkpoint`, which saves and loads FSDP2's weights and optimiser states, needs equal names.
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


# ---- the value head's files


def load_value_head(model_id: str, *, pickled: bool = False, **options: Any) -> dict[str, Tensor] | None:
    """The `v_head.*` weights of a checkpoint, by their names there; None if it has no value head.

    `model_id` is a folder or a Hub name; of `options` only those that locate files on the Hub are used. `pickled` also
    reads `pytorch_model.bin`, in which older TRL saves value heads, with `weights_only=True`.
    """
    causes = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{cause}": False for cause in causes}
    locate = partial(cached_file, model_id, **quiet, **{k: v for k, v in options.items() if k in _HUB_OPTIONS})

    for names in (_SAFE_FILES, _PICKLED_FILES) if pickled else (_SAFE_FILES,):
        file = next((file for name in names if (file := locate(name))), None)
        if file is None:
            continue
        files = [file]
        if file.endswith(".index.json"):
            places = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"].items()
            shards = sorted({shard for key, shard in places if key.startswith(PREFIX)})
            files = [path for shard in shards if (path := locate(shard))]
        if weights := {key: weight for path in files for key, weight in _read(path).items()}:
            return weights
        if not pickled:
            return None
    if not pickled and locate(WEIGHTS_NAME) is not None:
        logger.warning("'%s' may have a pickled value head. If you trust it, set pickled_value_head=True.", model_id)
    return None


def _read(file: str) -> dict[str, Tensor]:
    if not file.endswith(".safetensors"):
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        return {key: weight for key, weight in loaded.items() if key.startswith(PREFIX)}
    with safe_open(file, framework="pt") as weights:
        return {key: weights.get_tensor(key) for key in weights.keys() if key.startswith(PREFIX)}  # noqa: SIM118


def _lists_value_heads_alone(message: str) -> bool:
    """Whether transformers' loading report lists only the value head."""
    rows = re.findall(r"^(\S+)\s+\|.*(?:UNEXPECTED|MISSING|MISMATCH|CONVERSION)", message, re.MULTILINE)
    return bool(rows) and all(name.startswith(PREFIX) for name in rows)
