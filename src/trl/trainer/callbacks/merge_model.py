"""Merging the policy's checkpoints with another model, by mergekit."""

import copy
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState
from huggingface_hub import HfApi
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from trl.models.step_state import own_rng_states
from trl.options.checks import check_one_of
from trl.options.packages import is_mergekit_available

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mergekit.config import MergeConfiguration  # pyright: ignore[reportMissingImports]

Parameter = float | Sequence[Any]  # a list of numbers by layer, or of dicts with a `value` and a `filter`
_METHODS = ("linear", "ties", "dare_ties", "slerp")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "None")  # which mergekit checks only when it merges


def _require_mergekit() -> None:
    if not is_mergekit_available():
        raise ImportError("Merging models needs the mergekit package. Install it with `pip install 'trl[merge]'`.")


class MergeConfig:
    """Settings of a merge of two models: attributes that may be changed before `create` is called.

    Attributes:
        method: "linear", "ties", "dare_ties" or "slerp".
        policy_model_path, target_model_path: folders or names of the two models, or of adapters. The callback sets the
            first, and the second where it is None.
        dtype: of the merged weights ("float16").
        policy_model_weight, target_model_weight: 0.5 each for "linear", else 1.0.
        policy_model_density, target_model_density: of ties and dare_ties: the shares of changed weights that are kept,
            from the first layer to the last ([1.0, 0.7, 0.1] and [1.0]).
        normalize: of ties and dare_ties: divide by the sum of the weights (1.0).
        t_values: of slerp: 0 is the policy, 1 the target (0.5); a list goes from the first layer to the last.

    The base of ties, dare_ties and slerp is the policy, so changes are those of the target: ties with
    `target_model_density=[1.0]` gives the target itself.
    """

    def __init__(self, method: str = "linear") -> None:
        if method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}.")
        self.method = method
        self.policy_model_path: str | None = None
        self.target_model_path: str | None = None
        self.dtype = "float16"
        self.policy_model_weight: Parameter = 0.5 if method == "linear" else 1.0
        self.target_model_weight: Parameter = self.policy_model_weight
        self.policy_model_density: Parameter = [1.0, 0.7, 0.1]
        self.target_model_density: Parameter = [1.0]
        self.normalize = 1.0
        self.t_values: Parameter = 0.5

    def create(self) -> "MergeConfiguration":
        """The `mergekit.config.MergeConfiguration` of `method`."""
        return getattr(self, f"create_merge_config_{self.method}")()

    def create_merge_config_linear(self) -> "MergeConfiguration":
        """Weighted mean (Wortsman et al. 2022, arXiv:2203.05482)."""
        models = [
            _source(self.policy_model_path, weight=self.policy_model_weight),
            _source(self.target_model_path, weight=self.target_model_weight),
        ]
        return self._configuration("linear", models)

    def create_merge_config_ties(self) -> "MergeConfiguration":
        """Large changes whose signs agree (Yadav et al. 2023, arXiv:2306.01708)."""
        return self._of_changes("ties")

    def create_merge_config_dare_ties(self) -> "MergeConfiguration":
        """Ties on a random part of the changes (Yu et al. 2023, arXiv:2311.03099)."""
        return self._of_changes("dare_ties")

    def create_merge_config_slerp(self) -> "MergeConfiguration":
        """Interpolation on the sphere, tensor by tensor."""
        models = [_source(self.target_model_path)]
        return self._configuration("slerp", models, has_base=True, parameters={"t": self.t_values})

    def _of_changes(self, method: str) -> "MergeConfiguration":
        policy = {"weight": self.policy_model_weight, "density": self.policy_model_density}
        target = {"weight": self.target_model_weight, "density": self.target_model_density}
        models = [_source(self.policy_model_path, **policy), _source(self.target_model_path, **target)]
        return self._configuration(method, models, has_base=True, parameters={"normalize": self.normalize})

    def _configuration(
        self, method: str, models: list[Any], *, has_base: bool = False, **settings: Any
    ) -> "MergeConfiguration":
        _require_mergekit()
        check_one_of("dtype", str(self.dtype).removeprefix("torch."), _DTYPES)
        from mergekit.config import MergeConfiguration  # pyright: ignore[reportMissingImports]

        for parameters in (settings.get("parameters", {}), *(model["parameters"] for model in models)):
            for name, value in parameters.items():
                _check_parameter(name, value)
        if has_base:
            settings["base_model"] = _source(self.policy_model_path)["model"]
        return MergeConfiguration.model_validate(
            {"merge_method": method, "models": models, "dtype": self.dtype, **settings}
        )


def _check_parameter(name: str, value: Parameter) -> None:
    """Raise ValueError for what mergekit does not read as a number, a list of numbers, or numbers by filter.

    mergekit itself checks them only when it merges.
    """
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        number: Any = entry.get("value") if isinstance(entry, dict) else entry
        if isinstance(number, list):
            _check_parameter(name, number)
            continue
        try:
            float(number)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number or a list of numbers, got {number!r}.") from None


def _source(path: str | None, **parameters: Parameter) -> dict[str, Any]:
    """A model of mergekit's configuration; the folder of an adapter is one with its base."""
    if path is None:
        raise ValueError("A merge needs two models. Set policy_model_path and target_model_path of the MergeConfig.")
    if not Path(path).is_dir():
        return {"model": path, "parameters": parameters}
    adapter, model = Path(path) / "adapter_config.json", {"model": {"path": path}}
    if adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base:
            raise ValueError(f"{adapter} does not name its base model. Load the base by its name or path.")
        model = {"model": {"path": base}, "lora": {"path": path}}
    elif not [*Path(path).glob("model*.safetensors"), *Path(path).glob("pytorch_model*.bin")]:
        raise ValueError(f"{path} has no weights of a whole model to merge. Save checkpoints with full state dicts.")
    return {"model": model, "parameters": parameters}


def merge_models(config: "MergeConfiguration", out_path: str) -> None:
    """Write the merged model and its tokenizer into `out_path`, on the CPU; `config` is that of `MergeConfig.create`.

    The same models give the same merge, and the random number generators are left as they are.
    """
    _require_mergekit()
    from mergekit.merge import MergeOptions, run_merge  # pyright: ignore[reportMissingImports]

    with own_rng_states(), tempfile.TemporaryDirectory() as adapters:
        run_merge(config, out_path, MergeOptions(random_seed=0, quiet=True, lora_merge_cache=adapters))


def upload_model_to_hf(
    folder_path: str, repo_id: str, *, private: bool | None = None, token: str | None = None
) -> None:
    """Push the files of a folder to a model repository of the Hub, which is created if it does not exist."""
    api = HfApi(token=token)
    api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
    api.upload_folder(folder_path=folder_path, repo_id=repo_id, repo_type="model")


class MergeModelCallback(TrainerCallback):
    """Merges checkpoints of the policy with another model, by mergekit, into `checkpoint-<step>/merged`.

    Args:
        merge_config: a `MergeConfig`; None for the mean of both models. Without `target_model_path` the other model is
            the one that the policy was loaded from.
        merge_at_every_checkpoint: merge after each save, instead of once at the end of training, where the last
            checkpoint is merged (`save_strategy="no"` and `"best"` write one for it).
        push_to_hub: upload each merged model to the repository `<hub_model_id or output_dir>_checkpoint-<step>_merged`.

    The process with rank 0 merges; the training run is not changed.

    Raises: ImportError without mergekit; before the first step ValueError for settings that mergekit refuses, a folder
        that does not exist, and runs that save sharded checkpoints.

    Example:
        >>> trainer.add_callback(MergeModelCallback(MergeConfig("slerp")))  # doctest: +SKIP
    """

    def __init__(
        self,
        merge_config: MergeConfig | None = None,
        merge_at_every_checkpoint: bool = False,
        push_to_hub: bool = False,
    ) -> None:
        _require_mergekit()
        self.merge_config = merge_config or MergeConfig()
        self.merge_at_every_checkpoint = merge_at_every_checkpoint
        self.push_to_hub = push_to_hub
        self._newest: Path | None = None

    def on_train_begin(self, args, state, control, model: object = None, **kwargs):
        self._newest, target = None, self._target(model)
        if not target:
            raise ValueError(
                "MergeModelCallback got a model without a name or path. Set merge_config.target_model_path to the "
                "model to merge with."
            )
        is_local = target.startswith((".", "~", os.sep)) or target.count("/") > 1
        if is_local and not Path(target).is_dir():
            raise ValueError(f"target_model_path={target!r} does not exist. Name a folder, or a model of the Hub.")
        _check_whole_checkpoints()
        self._config(target, target).create()  # raises for settings that mergekit refuses

    def on_step_end(self, args, state, control, **kwargs):
        is_saved = args.save_strategy not in (SaveStrategy.NO, SaveStrategy.BEST)
        if state.global_step >= state.max_steps and not (is_saved or self.merge_at_every_checkpoint):
            control.should_save = True

    def on_save(self, args, state, control, model=None, **kwargs):
        self._newest = _checkpoint(args, state)
        if self.merge_at_every_checkpoint:
            self._merge(args, state, self._newest, model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.merge_at_every_checkpoint:
            return
        newest = self._newest or _checkpoint(args, state)  # resumed at the end
        if newest.is_dir():
            self._merge(args, state, newest, model)
        else:
            logger.warning("%s does not exist: nothing was merged. Save a checkpoint before the end.", newest)

    def _target(self, model: object) -> str | None:
        return self.merge_config.target_model_path or getattr(model, "name_or_path", None)

    def _config(self, policy: str, target: str | None) -> MergeConfig:
        config = copy.copy(self.merge_config)
        config.policy_model_path, config.target_model_path = policy, target
        return config

    def _merge(self, args: Any, state: TrainerState, checkpoint: Path, model: object) -> None:
        if not state.is_world_process_zero:
            return
        merged = checkpoint / "merged"
        merge_models(self._config(str(checkpoint), self._target(model)).create(), str(merged))
        if self.push_to_hub:
            name = args.hub_model_id or Path(args.output_dir).name
            upload_model_to_hf(
                str(merged), f"{name}_{checkpoint.name}_merged", private=args.hub_private_repo, token=args.hub_token
            )


def _check_whole_checkpoints() -> None:
    """Raise ValueError if this run saves shards, which mergekit cannot read."""
    state: Any = AcceleratorState()
    fsdp, deepspeed = getattr(state, "fsdp_plugin", None), state.deepspeed_plugin
    zero = deepspeed.deepspeed_config["zero_optimization"] if deepspeed is not None else {}
    change = None
    if fsdp is not None and "FULL" not in str(fsdp.state_dict_type):
        change = "fsdp_state_dict_type: FULL_STATE_DICT"
    elif zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        change = "zero3_save_16bit_model: true"
    if change:
        raise ValueError(f"MergeModelCallback needs checkpoints of whole weights. Set `{change}` for accelerate.")


def _checkpoint(args: Any, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
