"""Models and tokenizers from a name or a path: dtype, architecture, special tokens."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from trl.checkpoints.wholeness import listed, unreadable
from trl.data.hub import loading_from_hub, may_be_on_hub
from trl.data.rendering import text_tokenizer
from trl.models.parts import causal_core
from trl.models.peft import get_kbit_device_map, is_peft_model, require_peft, resolve_dtype, train_copies_in_float32
from trl.options.secrets import redacted

logger = logging.getLogger(__name__)

LoadArguments = Mapping[str, Any]
"""Arguments of `from_pretrained`."""
_CONFIG_KEYS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "trust_remote_code")
_SPREADING_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_FILE_DTYPE = "dtype_of_its_files"  # attribute


def create_model_from_path(
    model_id: str, architecture: type | None = None, *, trained: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Load a model by Hub name or local path, in the class that its config names.

    `architecture` (a model class or an `AutoModelFor…`) overrides that class; `kwargs` go to `from_pretrained`. `dtype`
    may be a string (default: the checkpoint's own). Weights load from safetensors, and remote code runs only with
    `trust_remote_code=True`. Files that lack weights of the architecture are refused, except for a new classification
    head, or with `allow_missing_weights=True`. A quantised model goes to this process's device unless there is a
    `device_map`. A folder with a PEFT adapter loads as its base model with the trainable adapter.

    With `trained` all weights will train: without a `dtype` they are float32, because a 16-bit weight keeps an update
    only where the learning rate exceeds about 1/512 of it, and `save_dtype` is that of the files. Raises:
    FileNotFoundError if there is no such model, no safetensors weights or no way to the Hub; ValueError for a `dtype`
    or `device_map` that cannot work, and for missing weights.
    """
    older = kwargs.pop("torch_dtype", None)
    dtype = resolve_dtype(older if kwargs.get("dtype") is None else kwargs["dtype"])
    trained = trained and older is None and kwargs.get("dtype") is None
    if older is not None and resolve_dtype(older) != dtype:
        raise ValueError(f"dtype={kwargs['dtype']!r} and torch_dtype={older!r} disagree. Give `dtype` alone.")
    kwargs["dtype"], device_map = dtype, kwargs.get("device_map")
    if device_map in _SPREADING_DEVICE_MAPS and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"device_map={device_map!r} cannot be used by several processes. Leave it out.")
    _check_local_path(model_id)
    with loading_from_hub(model_id, "model"):
        folder = Path(model_id)
        has_config = (folder / "config.json").is_file()
        if (folder / "adapter_config.json").is_file() and not has_config:
            return load_adapter(model_id, architecture, kwargs)
        elsewhere = any(kwargs.get(key) is not None for key in ("config", "subfolder", "gguf_file"))
        if folder.is_dir() and not (has_config or elsewhere):
            raise FileNotFoundError(f"'{model_id}' has no config.json, expected a saved model.")
        allows_missing = kwargs.pop("allow_missing_weights", False)
        if kwargs.get("quantization_config") is not None and "device_map" not in kwargs:
            kwargs["device_map"] = get_kbit_device_map()
        try:
            file_dtype = _trained_dtype(model_id, kwargs) if trained else None
            model_class = architecture or architecture_of(model_id, kwargs)
            if kwargs.setdefault("use_safetensors", True) and folder.is_dir():
                _check_safetensors(folder)
            model, info = model_class.from_pretrained(model_id, output_loading_info=True, **kwargs)
        except FileNotFoundError:
            raise
        except SafetensorError as error:
            files = sorted(folder.rglob("*.safetensors"))
            broken = listed({file.name: why for file in files if (why := unreadable(file))})
            raise ValueError(
                f"'{model_id}' has damaged weights: {broken or error}. Save or download them again."
            ) from error
        except OSError as error:
            raise FileNotFoundError(f"'{model_id}' could not be loaded: {_first_line(error)}.") from error
        if not allows_missing:
            _check_complete(model, info["missing_keys"], model_id)
        if file_dtype is not None:
            setattr(model, _FILE_DTYPE, file_dtype)
        return model


def _check_safetensors(folder: Path) -> None:
    if not any(folder.rglob("*.safetensors")):
        files = [file.name for file in sorted(folder.iterdir()) if file.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        raise FileNotFoundError(
            f"'{folder}' holds {', '.join(files) or 'no weights'}, expected safetensors. If you trust it, convert it "
            "with from_pretrained(path, use_safetensors=False).save_pretrained(path)."
        )


def _check_complete(model: PreTrainedModel, missing: Iterable[str], model_id: str) -> None:
    """Raise ValueError for `missing` weights; a classification head may be new."""
    required = f"{model.base_model_prefix}." if "Classification" in type(model).__name__ else ""
    if lacking := sorted(name for name in missing if name.startswith(required)):
        raise ValueError(
            f"'{model_id}' lacks {len(lacking)} weights of {type(model).__name__} ({', '.join(lacking[:3])}), which "
            "would be random. Or set model_init_kwargs={'allow_missing_weights': True}."
        )


def _trained_dtype(model_id: str, kwargs: dict[str, Any]) -> torch.dtype | None:
    """Set the `dtype` of weights that train, in place; returns the files', None where it stays or is unknown."""
    if kwargs.get("quantization_config") or kwargs.get("gguf_file"):
        return None
    config = _config_of(model_id, kwargs)
    if getattr(config, "quantization_config", None):
        return None
    saved: Any = config.dtype or config.get_text_config().dtype
    kwargs["dtype"] = torch.promote_types(saved or torch.float32, torch.float32)
    return saved


# ---- saved models


def save_dtype(model: nn.Module, wanted: str | None = None) -> torch.dtype | None:
    """The dtype to save a model in: `wanted`, else that of the files it was loaded from to train; None: its own."""
    if wanted is not None and wanted != "auto":
        return resolve_dtype(wanted)  # pyright: ignore[reportReturnType]
    return getattr(causal_core(model), _FILE_DTYPE, None)


def cast_state(model: nn.Module, state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """A model's state with floating values in `dtype` (None: as they are), on the CPU.

    Tied weights stay tied. Modules that the model keeps in float32, and frozen weights beside an adapter, stay.
    """
    wide = tuple(getattr(causal_core(model), "_keep_in_fp32_modules_strict", None) or ())
    frozen = {name for name, x in model.named_parameters() if not x.requires_grad} if is_peft_model(model) else ()
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    cast = dict(state)
    for name, value in state.items() if dtype is not None else ():
        is_cast = torch.is_tensor(value) and value.is_floating_point() and name not in frozen
        if is_cast and not any(part in name for part in wide):
            place = (value.data_ptr(), value.shape, value.stride())
            cast[name] = copies[place] = copies.get(place, value.detach().to("cpu", dtype))
    return cast


def name_dtype(folder: str | os.PathLike[str], dtype: torch.dtype | None) -> None:
    """Write a dtype (None: nothing) into the config of a saved model, if it has one: the model loads in it."""
    file = Path(folder, "config.json")
    if dtype is not None and file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            if "dtype" in part:
                part["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def get_config_model_id(config: PretrainedConfig) -> str:
    """The name or path that a config was loaded from, the empty string for one built by hand."""
    return getattr(config, "_name_or_path", None) or ""


def load_checkpoint_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a checkpoint into the model that wrote it, bit for bit.

    transformers 5 saves some architectures (vision-language models, mixtures of experts) under other names, which only
    `from_pretrained` puts back. Raises: ValueError if a weight is missing.
    """
    missing, unexpected = set(model.state_dict()), False
    for file in sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        is_safe = file.suffix == ".safetensors"
        weights = load_file(file) if is_safe else torch.load(file, map_location="cpu", weights_only=True)
        result = model.load_state_dict(weights, strict=False)
        missing &= set(result.missing_keys)
        unexpected |= bool(result.unexpected_keys)
    if unexpected:
        widest = max((parameter.dtype for parameter in model.parameters()), key=lambda dtype: dtype.itemsize)
        loaded: Any = type(model).from_pretrained(folder, dtype=widest, output_loading_info=True)  # type: ignore[attr-defined]
        saved, info = loaded
        missing = {str(name) for name in [*info["missing_keys"], *info["mismatched_keys"]]}
        if not missing:
            model.load_state_dict(saved.state_dict())
    else:  # tied weights are read under their other name
        missing -= {
            *(getattr(model, "all_tied_weights_keys", None) or ()),
            *(getattr(model, "_keys_to_ignore_on_save", None) or ()),
        }
    if missing:
        raise ValueError(f"{len(missing)} tensors of the model are missing ({min(missing)}, ...)")


def load_processing_class(
    model_or_path: str | PreTrainedModel, *, eos_token: str | None = None, pad_token: str | None = None,
    trust_remote_code: bool = False, revision: str | None = None,
) -> PreTrainedTokenizerBase | ProcessorMixin:  # fmt: skip
    """The processor or tokenizer saved with a model, with `apply_special_tokens` done."""
    path = model_or_path if isinstance(model_or_path, str) else get_config_model_id(model_or_path.config)
    if not path:
        raise ValueError("The model has no name to find its tokenizer by. Pass `processing_class`.")
    _check_local_path(path)
    options = {"revision": revision} if revision else {}
    with loading_from_hub(path, "tokenizer"):
        try:
            loaded = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"No tokenizer in '{path}' ({_first_line(error)}). Save one there, or pass `processing_class`."
            ) from error
    apply_special_tokens(loaded, eos_token=eos_token, pad_token=pad_token)
    return loaded


def apply_special_tokens(
    processing_class: PreTrainedTokenizerBase | ProcessorMixin, *, eos_token: str | None = None,
    pad_token: str | None = None,
) -> PreTrainedTokenizerBase:  # fmt: skip
    """Set eos and pad on the tokenizer (of the processor) in place, and return the tokenizer.

    Both must be in its vocabulary. Without any pad token, eos pads: what is trained is chosen by position, never by
    token id, so eos stays trained.
    """
    tokenizer = text_tokenizer(processing_class)
    for field, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ValueError(
                f"{field} {token!r} is not in the vocabulary of '{tokenizer.name_or_path}'. "
                "Add it, and resize the embeddings."
            )
        setattr(tokenizer, field, token)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("The tokenizer has no pad token: padding with its eos token %r.", tokenizer.eos_token)
    return tokenizer


def _check_local_path(model_id: str) -> None:
    if not may_be_on_hub(model_id) and not Path(model_id).is_dir():
        if "://" in model_id:
            raise ValueError(
                f"{redacted(model_id)!r} is an address, expected a saved model, or a Hub name. GKDTrainer and "
                "DistillationTrainer take servers as teachers, GKDTrainer also several by name, but not servers beside "
                "models."
            )
        raise FileNotFoundError(f"There is no folder '{model_id}'. Give a saved model, or a Hub name.")


def _config_of(model_id: str, kwargs: LoadArguments) -> PretrainedConfig:
    config = kwargs.get("config")
    if isinstance(config, PretrainedConfig):
        return config
    return AutoConfig.from_pretrained(model_id, **{k: kwargs[k] for k in _CONFIG_KEYS if k in kwargs})


def load_config(model_id: str, options: LoadArguments) -> PretrainedConfig:
    """The config of a saved model or Hub name; of the `options` of a model those are used that say where it is.

    Raises: FileNotFoundError for a name without one, and where the Hub cannot be reached.
    """
    _check_local_path(model_id)
    with loading_from_hub(model_id, "config"):
        try:
            return _config_of(model_id, options)
        except OSError as error:
            raise FileNotFoundError(f"'{model_id}' has no config that can be loaded: {_first_line(error)}.") from error


def architecture_of(model_id: str, kwargs: LoadArguments) -> type:
    """The class that a model's config names. Raises: ValueError for one that transformers does not know."""
    config = _config_of(model_id, kwargs)
    names = config.architectures or []
    if not names or (kwargs.get("trust_remote_code") and getattr(config, "auto_map", None)):
        return AutoModelForCausalLM
    architecture = getattr(transformers, names[0], None)
    if architecture is None:
        raise ValueError(
            f"'{model_id}' is a {names[0]}, unknown to transformers. Upgrade, or set trust_remote_code=True if you "
            "have read and trust the code in that repository."
        )
    return architecture


def load_adapter(
    model_id: str, architecture: type | None, kwargs: LoadArguments, base: str | None = None
) -> PreTrainedModel:
    """The base model of a folder with a PEFT adapter and no model of its own, with the adapter on top.

    `base` is where the base lies now (None: where the adapter names it).
    """
    require_peft()
    from peft import PeftConfig, PeftModel

    base = base or PeftConfig.from_pretrained(model_id).base_model_name_or_path
    if not base:
        raise ValueError(f"The adapter in '{model_id}' names no base. Use PeftModel.from_pretrained.")
    model = create_model_from_path(base, architecture, **kwargs)
    adapted: Any = PeftModel.from_pretrained(model, model_id, is_trainable=True)
    if train_copies_in_float32(adapted):
        adapted.load_adapter(model_id, "default", is_trainable=True)  # with all of the file's digits
    return adapted


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def suppress_from_pretrained_warning(logger: logging.Logger) -> AbstractContextManager[None]:
    """A block in which `logger` drops transformers' report of newly initialised weights, such as a new score head's."""
    return without_records(logger, lambda message: "newly initialized" in message)


@contextmanager
def without_records(logger: logging.Logger, dropped: Callable[[str], bool]) -> Iterator[None]:
    """A block in which `logger` drops some messages."""

    def keeps(record: logging.LogRecord) -> bool:
        return not dropped(record.getMessage())

    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)
