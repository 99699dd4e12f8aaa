"""Saving a policy trained step by step: as a model that loads again, on the Hub, with a card, and its statistics to trackers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from huggingface_hub import HfApi
from torch import Tensor

from trl.models.value_wrapper import under_module_names
from trl.reporting.model_card import HERE, generate_model_card
from trl.reporting.trackers import get_comet_experiment_url, get_wandb_run_url
from trl.trainer.ppo_config import PPOConfig

_PAPER = {
    "title": "Fine-Tuning Language Models from Human Preferences",
    "id": "1909.08593",
    "citation": """@article{ziegler2019finetuning,
    title   = {Fine-Tuning Language Models from Human Preferences},
    author  = {Ziegler, Daniel M. and Stiennon, Nisan and Wu, Jeffrey and Brown, Tom B. and Radford, Alec and Amodei, Dario and
               Christiano, Paul and Irving, Geoffrey},
    journal = {arXiv preprint arXiv:1909.08593},
    year    = {2019}
}""",
}


class SavesPolicy:
    """What a step-level trainer can do with its policy beside training it."""

    _tag_names = ("trl", "ppo", "reinforcement-learning")
    accelerator: Accelerator
    config: PPOConfig
    model: Any
    tokenizer: Any
    current_step: int

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> str | None:
        """Save policy (value head included), tokenizer and model card into a folder; all processes must call it.

        `push_to_hub` uploads to `repo_id` (default: the folder's name) with `kwargs`, and returns its address.
        """
        push = {name: kwargs.pop(name) for name in list(kwargs) if name != "max_shard_size"}
        self._save_pretrained(save_directory, **kwargs)
        return (
            self._upload(save_directory, repo_id or Path(save_directory).name, **push)
            if push_to_hub
            else None
        )

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
        """Upload policy, tokenizer and model card; returns the address on the main process. All processes must call it."""
        options = {"commit_message": commit_message, "private": private, "token": token, "revision": revision}
        with tempfile.TemporaryDirectory() as folder:
            self._save_pretrained(folder, max_shard_size=max_shard_size)
            return self._upload(folder, repo_id, create_pr=create_pr, **options)

    def _upload(
        self,
        folder: str | Path,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        **options: Any,
    ) -> str | None:
        if not self.accelerator.is_main_process:
            return None
        api = HfApi(token=token)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=made.repo_id, **options))

    def _save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        with under_module_names(self.accelerator):
            state = self.accelerator.get_state_dict(self.model)
        model: Any = self.accelerator.unwrap_model(self.model)
        if not self.accelerator.is_main_process:
            return
        model.save_pretrained(save_directory, state_dict=state, **kwargs)
        self.tokenizer.save_pretrained(save_directory)
        self.create_model_card(save_directory)

    def create_model_card(self, path: str | Path, model_name: str | None = "TRL Model") -> None:
        """Write a model card, `README.md`, into the folder `path`."""
        config = self.config
        model: Any = self.accelerator.unwrap_model(self.model)
        names = (
            "learning_rate",
            "batch_size",
            "mini_batch_size",
            "ppo_epochs",
            "init_kl_coef",
            "kl_penalty",
            "seed",
        )
        card = generate_model_card(
            base_model=getattr(model.config, "_name_or_path", None) or None,
            model_name=model_name or Path(path).name,
            hub_model_id=HERE,
            dataset_name=None,
            tags=list(self._tag_names),
            wandb_url=get_wandb_run_url(),
            comet_url=get_comet_experiment_url(),
            trainer_name="PPO",
            trainer_citation=_PAPER["citation"],
            paper_title=_PAPER["title"],
            paper_id=_PAPER["id"],
            training_facts={name: getattr(config, name) for name in names} | {"steps": self.current_step},
        )
        Path(path).mkdir(parents=True, exist_ok=True)
        card.save(Path(path) / "README.md")

    def log_stats(
        self,
        stats: Mapping[str, Any],
        batch: Mapping[str, Any],
        rewards: Any,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send a step's statistics, `env/reward_mean`, `env/reward_std` and `env/reward_dist` to the tracker of `log_with`.

        wandb also gets a table of `columns_to_log` of the batch with the rewards. `rewards` are those of this process; all
        processes must call it.

        Raises: ValueError for a column that the batch lacks.
        """
        scores = (
            rewards if isinstance(rewards, Tensor) else torch.tensor([float(reward) for reward in rewards])
        )
        gathered: Any = self.accelerator.gather(scores.detach().flatten().float().to(self.accelerator.device))
        scores = gathered.cpu()
        if not self.accelerator.is_main_process or self.config.log_with is None:
            return
        logs = {
            **stats,
            "env/reward_mean": float(scores.mean()),
            "env/reward_std": float(scores.std()) if len(scores) > 1 else 0.0,
            "env/reward_dist": scores.numpy(),
        }
        if self.config.log_with != "wandb":  # others take numbers only
            logs = {name: value for name, value in logs.items() if not isinstance(value, np.ndarray)}
        else:
            logs["game_log"] = _table(batch, rewards, list(columns_to_log))
        self.accelerator.log(logs, step=self.current_step)


def _table(batch: Mapping[str, Any], rewards: Any, columns: list[str]) -> Any:
    missing = [name for name in columns if name not in batch]
    if missing:
        raise ValueError(
            f"columns_to_log has {missing}, the batch has {sorted(batch)}. Put them into the batch, or log other columns."
        )
    import wandb  # pyright: ignore[reportMissingImports]

    values = [float(reward) for reward in rewards]
    rows = [list(row) for row in zip(*(batch[name] for name in columns), values, strict=True)]
    return wandb.Table(columns=[*columns, "reward"], rows=rows)
