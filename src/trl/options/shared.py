"""Fields that several configs have, where no group of them belongs together: configs take them one by one."""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from trl.options.checks import CHECKPOINTING, JSONDict
from trl.options.groups import OptionGroup, moved, option, same
from trl.options.secrets import redacted

Weights = Literal["bf16+residual"]
RESIDUAL: Weights = "bf16+residual"
PrefixSharingMode = Literal["auto", "true", "false", True, False]  # the words as a command line has them


@dataclass
class SharedFields:
    """Each field as `shared(name)` declares it in a config."""

    model_init_kwargs: JSONDict = option(None, "Arguments of from_pretrained.")
    weights: Weights | None = option(
        None,
        "'bf16+residual': train exactly as float32 weights with a bfloat16 forward, in 14 bytes per weight, not 16 (8 "
        "with optim='adamw_8bit'): bfloat16 weights and gradients, and what rounding takes away as optimizer's state.",
    )
    model_adapter_name: str | None = option(None, "Adapter that is trained, in a model with several.")
    ref_adapter_name: str | None = option(None, "Adapter that is the reference. None: no adapter.")
    disable_dropout: bool = option(True, "Train without dropout, as the reference is scored.")
    prefix_sharing: PrefixSharingMode = option(
        "auto",
        "Run each prompt once for all of its completions: same losses and gradients, less time and memory. "
        "'auto': if the model can; True: or raise an error; False: repeat the prompt for each completion.",
    )
    padding_free: bool = option(False, "Concatenate the sequences of a batch without padding: same loss.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset. None: one.", ">= 1")
    shuffle_dataset: bool = option(False, "Shuffle the rows once, before they are packed and sampled.")
    max_length: int | None = option(1024, "Longest sequence or packed row in tokens. None: no limit.", ">= 1")
    max_prompt_length: int | None = option(512, "Longest prompt, in tokens. None: no limit.", ">= 1")
    max_completion_length: int | None = option(None, "Longest completion, in tokens. None: no limit.", ">= 1")
    pad_token: str | None = option(None, "Padding token. None: the tokenizer's, else its eos token.")
    label_smoothing: float = option(0.0, "Probability that a pair's label is wrong (cDPO).", "[0, 0.5)")
    teacher_model_name_or_path: str | None = option(None, "Teacher, if none is passed to the trainer.")
    teacher_model_init_kwargs: JSONDict = option(None, "Arguments of from_pretrained for the teacher, or JSON.")
    teacher_model_server_url: Mapping[str, str] | str | None = option(
        None,
        "Address of an OpenAI-style server (vLLM) with the teacher; several by the names in the rows' column "
        "`teacher`, as a dict or JSON. Needs temperature=1; teacher_model_name_or_path is the served one's name.",
    )
    teacher_top_k: int = option(20, "How many of its most likely tokens a server gives per token.", ">= 1")
    teacher_server_timeout: float = option(240.0, "Seconds for a server's answers, repeated requests too.", "> 0")
    temperature: float = option(1.0, "Divides the logits, in sampling and in all log-probabilities.", "> 0")
    ds3_gather_for_generation: bool = option(True, "Under ZeRO-3, gather all weights for a rollout: faster.")
    use_liger_loss: bool | None = moved("losses never need logits of the whole vocabulary.", flag=True)
    base_model_attribute_name: str = option("model", "Deprecated: the decoder is found automatically.")


@dataclass
class LoopOptions(OptionGroup):
    """Name, seed, tracker and accelerator of a trainer that runs its own loop."""

    exp_name: str = option(lambda: Path(sys.argv[0]).stem, "Name of the experiment. Default: that of the script.")
    seed: int = option(0, "Seed of all random streams.")
    log_with: Literal["wandb", "tensorboard"] | str | None = option(None, "A tracker of accelerate's. None: none.")
    tracker_kwargs: JSONDict = option(dict, "init_kwargs of accelerate's init_trackers.")
    accelerator_kwargs: JSONDict = option(dict, "Arguments of the Accelerator.")
    project_kwargs: JSONDict = option(dict, "Arguments of accelerate's ProjectConfiguration.")
    tracker_project_name: str = option("trl", "Name of the project for trackers.")

    def check(self) -> None:
        """None is an empty dict."""
        super().check()
        for name in ("tracker_kwargs", "accelerator_kwargs", "project_kwargs"):
            setattr(self, name, getattr(self, name) or {})

    def to_dict(self) -> dict[str, object]:
        """All fields as one flat dict, those of dicts as `name/key`; secrets are redacted."""
        return flatten_dict(redacted(vars(self)))


def shared(name: str, *default: object, **metadata: object) -> Any:
    """The field `name` of `SharedFields`, with another default if one is given; `metadata` replaces parts of it."""
    return same(SharedFields, name, *default, **metadata)


def flatten_dict(nested: Mapping[str, object], sep: str = "/") -> dict[str, object]:
    """A nested dict as a flat one, keys joined by `sep`. Raises: ValueError for a key that has it.

    >>> flatten_dict({"loss": {"policy": 1, "value": 2}})
    {'loss/policy': 1, 'loss/value': 2}
    """
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if sep in str(key):
            raise ValueError(f"keys must not contain {sep!r}, got {key!r}. Rename it or choose another separator.")
        if isinstance(value, Mapping):
            flat.update({f"{key}{sep}{rest}": item for rest, item in flatten_dict(value, sep).items()})
        else:
            flat[str(key)] = value
    return flat


_NOT_SHOWN = (
    "accelerator_config", "dataloader_pin_memory", *(f"{name}_kwargs" for name in CHECKPOINTING),  # filled in
    "generation_batch_size",  # follows from steps_per_generation
    "dry_run",
)  # fmt: skip


def changed_settings(*configs: Any) -> dict[str, object]:
    """The fields of the configs that differ from their defaults; an empty value for a default None does not."""
    changed = {}
    for config in configs:
        for field in dataclasses.fields(config):
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else field.default  # pyright: ignore[reportCallIssue]
            value = getattr(config, field.name)
            value, default = (item.value if isinstance(item, Enum) else item for item in (value, default))
            if field.name == "steps_per_generation" and value:
                default = config.gradient_accumulation_steps
            filled = field.name in _NOT_SHOWN or (default in (None, "", "none") and not value)
            if not filled and value != default:
                changed[field.name] = value
    return redacted(changed)
