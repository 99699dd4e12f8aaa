"""What a step-level trainer writes: its state, its policy with a model card, and statistics for a tracker."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi
from torch import Tensor

from trl.data.step_inputs import QueryLoader
from trl.models.step_state import load_step_state, moments_state, save_step_state
from trl.models.value_wrapper import under_module_names
from trl.objectives.kl import AdaptiveKLController, FixedKLController
from trl.options.shared import changed_settings
from trl.reporting.model_card import HERE, Paper, card_of_run
from trl.reporting.run_events import RunEvents
from trl.reporting.step_statistics import stats_to_np, step_statistics, tracker_logs
from trl.tensors.moments import RunningMoments, moments, over_processes
from trl.trainer.callbacks.run_report import begin, log_facts
from trl.trainer.ppo_config import PPOConfig

_FACTS = ("learning_rate", "batch_size", "mini_batch_size", "ppo_epochs", "init_kl_coef", "kl_penalty", "seed")


class SavedPolicy:
    """Saves and publishes the policy and the state of a step-level loop."""

    _tag_names: ClassVar[tuple[str, ...]]
    _name = "PPO"
    _paper = Paper("Fine-Tuning Language Models from Human Preferences", "1909.08593")
    config: PPOConfig
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    lr_scheduler: Any
    dataloader: QueryLoader | None
    kl_ctl: AdaptiveKLController | FixedKLController
    running: RunningMoments
    current_step: int
    highest_reward: float
    _events: RunEvents | None = None

    def save_state(self, output_dir: str | Path) -> None:
        """Write everything that the loop carries, at once or not at all: between two steps, by all processes.

        Weights, optimiser, scheduler, KL coefficient, running moments, random streams, the loader's place.
        """
        state = {
            "current_step": self.current_step,
            "kl_coef": self.kl_ctl.value,
            "running": moments_state(self.running),
            "highest_reward": self.highest_reward,
            "loader": None if self.dataloader is None else self.dataloader.state_dict(),
        }
        save_step_state(output_dir, self.accelerator, state)

    def load_state(self, input_dir: str | Path) -> None:
        """Go on from a folder of `save_state`, with a trainer that was built as that one was.

        The next pass over `dataloader` begins behind the last batch that was handed out before.
        """
        state = load_step_state(input_dir, self.accelerator, scheduled=self.lr_scheduler is not None)
        self.current_step, self.highest_reward = state["current_step"], state["highest_reward"]
        self.kl_ctl.value = state["kl_coef"]
        self.running = RunningMoments(self.accelerator, **state["running"])
        if self.dataloader is not None and state["loader"] is not None:
            self.dataloader.load_state_dict(state["loader"])

    def save_pretrained(
        self, save_directory: str | Path, *, repo_id: str | None = None, push_to_hub: bool = False, **kwargs: Any
    ) -> str | None:
        """Save policy (value head included), tokenizer and model card into a folder; all processes must call it.

        `push_to_hub` uploads to `repo_id` (default: the folder's name) with `kwargs`, and returns its address.
        """
        sizes = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
        with under_module_names(self.accelerator):
            state = self.accelerator.get_state_dict(self.model)
        if not self.accelerator.is_main_process:
            return None
        model: Any = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(save_directory, state_dict=state, **sizes)
        self.tokenizer.save_pretrained(save_directory)
        self.create_model_card(save_directory)
        if not push_to_hub:
            return None
        api, name = HfApi(token=kwargs.pop("token", None)), repo_id or Path(save_directory).name
        made = api.create_repo(name, private=kwargs.pop("private", None), exist_ok=True)
        return str(api.upload_folder(folder_path=save_directory, repo_id=made.repo_id, **kwargs))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload a policy trained by PPO",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
    ) -> str | None:
        """Upload policy, tokenizer and card; the address on the main process. All processes must call it."""
        with tempfile.TemporaryDirectory() as folder:
            return self.save_pretrained(
                folder, repo_id=repo_id, push_to_hub=True, commit_message=commit_message, private=private, token=token,
                revision=revision, create_pr=create_pr, max_shard_size=max_shard_size,
            )  # fmt: skip

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL Model") -> None:
        """Write a model card, `README.md`, into the folder `path`."""
        model: Any = self.accelerator.unwrap_model(self.model)
        facts = {name: getattr(self.config, name) for name in _FACTS} | {"steps": self.current_step}
        card = card_of_run(
            self, base_model=getattr(model.config, "_name_or_path", None) or None, hub_model_id=HERE,
            model_name=model_name or Path(path).name, dataset_name=None, tags=None, training_facts=facts,
        )  # fmt: skip
        Path(path).mkdir(parents=True, exist_ok=True)
        card.save(Path(path) / "README.md")

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of a step by their documented names, as numbers and numpy arrays.

        `data`: what `step_statistics` takes. All processes must call it.
        """
        found = step_statistics(kl_coef=kl_coef, accelerator=self.accelerator, **data)
        return stats_to_np(found)

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Statistics with each tensor replaced by its mean over all processes, which must all call it."""
        return {
            name: self.accelerator.reduce(value, reduction="mean") if isinstance(value, Tensor) else value
            for name, value in stats.items()
        }

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: Any,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send a step's statistics, `env/reward_mean`, `env/reward_std` and `env/reward_dist` to the tracker of
        `log_with`.

        wandb also gets a table of `columns_to_log` of the batch with the rewards. `rewards` are those of this process;
        all processes must call it.

        Raises: ValueError for a column that the batch lacks.
        """
        own = [float(reward) for reward in rewards]
        scores: Any = self.accelerator.gather(torch.tensor(own, device=self.accelerator.device))
        if not self.accelerator.is_main_process or self.config.log_with is None:
            return
        names = list(columns_to_log)
        if self.config.log_with == "wandb" and (lost := [name for name in names if name not in batch]):
            raise ValueError(
                f"columns_to_log has {lost}, the batch has {sorted(batch)}. Put them into the batch, or log other "
                "columns."
            )
        columns = {name: batch.get(name) for name in names}
        logs = tracker_logs(stats, scores, own, columns, kind=self.config.log_with)
        self.accelerator.log(logs, step=self.current_step)

    def write_report(self, stats: Mapping[str, object]) -> None:
        """Write the numbers of a step for `trl report` into `project_dir`, if there is one."""
        self._events = self._events or begin(
            self.accelerator.project_dir, "PPO", self.model, self.accelerator, run="PPO",
            settings=changed_settings(self.config), step=self.current_step - 1,
        )  # fmt: skip
        self._events.write("log", self.current_step, **log_facts(stats))

    def _push_if_best(self, scores: Tensor) -> None:
        """Scores as they were given: scaled ones of two steps cannot be compared."""
        push: Any = self.config.push_to_hub_if_best_kwargs
        if not push or self.current_step % self.config.compare_steps:
            return
        reward = float(over_processes(moments(scores), self.accelerator).mean)
        if reward > self.highest_reward:
            self.highest_reward = reward
            self.push_to_hub(**push)
