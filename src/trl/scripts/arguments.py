"""What a training script reads besides its training and model configs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl.options.groups import OptionGroup, documented, option

if TYPE_CHECKING:
    from trl.options.checks import JSONDict
    from trl.options.shared import SharedFields
    from trl.options.training import TrainingDefaults

    class AnyConfig(TrainingDefaults, SharedFields):
        """The training config of any method, for type checkers."""

        ref_model_init_kwargs: JSONDict


@documented
@dataclass
class ScriptArguments(OptionGroup):
    """The dataset of a script, and two switches for distributed training.

    Example:
        >>> from trl import ScriptArguments
        >>> ScriptArguments("train.jsonl").dataset_train_split
        'train'
    """

    dataset_name: str | None = option(None, "Dataset: json, jsonl, csv or parquet file, folder, Hub name.")
    dataset_config: str | None = option(None, "The dataset's configuration (subset), if there are several.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on; read only if eval_strategy is not 'no'.")
    dataset_streaming: bool = option(False, "Read rows as they are needed instead of all beforehand.")
    gradient_checkpointing_use_reentrant: bool = option(False, "Use reentrant gradient checkpointing.")
    ignore_bias_buffers: bool = option(False, "Do not synchronise boolean buffers (attention masks).")


@dataclass
class ColumnMapping(OptionGroup):
    """Names that columns get before training."""

    column_mapping: list[str] | None = option(None, "Columns to rename (a mapping in files).", metavar="OLD=NEW")

    def check(self) -> None:
        super().check()
        self.renames()

    def renames(self) -> dict[str, str]:
        """Old name -> new name. Raises: ValueError for an item that is not old=new, and for repeated names."""
        if isinstance(self.column_mapping, dict):
            return dict(self.column_mapping)
        renames: dict[str, str] = {}
        for item in self.column_mapping or []:
            old, _, new = item.partition("=")
            if not old or not new:
                raise ValueError(f"column_mapping takes old=new items, got {item!r}.")
            if old in renames or new in renames.values():
                raise ValueError(f"column_mapping names a column twice, got {self.column_mapping!r}.")
            renames[old] = new
        return renames


@dataclass
class CommandArguments(ColumnMapping, ScriptArguments):
    """What every training command reads besides its config and `ModelConfig`; that of many reads no more."""

    dry_run: bool = option(False, "Prepare the data, print changed settings, two rows and memory; then stop.")


@dataclass
class DPOScriptArguments(CommandArguments):
    """What `trl dpo` reads besides `DPOConfig` and `ModelConfig`."""

    ref_model_name_or_path: str | None = option(None, "Reference model. None: the model before training.")
    dialogue_marker: str | None = option(None, "What opens the assistant's turns in dialogues as text ('Assistant:').")


@dataclass
class RewardFunctions(CommandArguments):
    """What judges completions, by name."""

    reward_funcs: list[str] | None = option(
        None,
        "Rewards: functions of trl.rewards (accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
        "get_soft_overlong_punishment), dotted paths (my_module.my_function), reward models.",
        metavar="REWARD",
    )

    reward_model_name_or_path: str | None = option(None, "Reward model beside reward_funcs; comes first.")

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        super().__post_init__()


SFTScriptArguments = RewardScriptArguments = CommandArguments
GRPOScriptArguments = RLOOScriptArguments = RewardFunctions
