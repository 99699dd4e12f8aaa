"""Model card, upload and tracker logs of a policy trained step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import HfApi
from torch import Tensor

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
_FACTS = (
    "learning_rate",
    "batch_size",
    "mini_batch_size",
    "ppo_epochs",
    "init_kl_coef",
    "kl_penalty",
    "seed",
)


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> str:
    """Upload a folder to the Hub; returns its address."""
    api = HfApi(token=token)
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=folder, repo_id=made.repo_id, **options))


def model_card(
    config: PPOConfig, base_model: str | None, model_name: str, *, tags: Sequence[str], steps: int
) -> Any:
    """The model card of a policy after so many steps."""
    return generate_model_card(
        base_model=base_model,
        model_name=model_name,
        hub_model_id=HERE,
        dataset_name=None,
        tags=list(tags),
        wandb_url=get_wandb_run_url(),
        comet_url=get_comet_experiment_url(),
        trainer_name="PPO",
        trainer_citation=_PAPER["citation"],
        paper_title=_PAPER["title"],
        paper_id=_PAPER["id"],
        training_facts={name: getattr(config, name) for name in _FACTS} | {"steps": steps},
    )


def tracked(stats: Mapping[str, Any], scores: Tensor, *, numbers_only: bool) -> dict[str, Any]:
    """A step's statistics with those of the scores `(B,)` of all processes."""
    logs = {
        **stats,
        "env/reward_mean": float(scores.mean()),
        "env/reward_std": float(scores.std()) if len(scores) > 1 else 0.0,
        "env/reward_dist": scores.numpy(),
    }
    if not numbers_only:
        return logs
    return {name: value for name, value in logs.items() if not isinstance(value, np.ndarray)}


def reward_table(batch: Mapping[str, Any], rewards: Any, columns: list[str]) -> Any:
    """A wandb table. Raises: ValueError for a column that the batch lacks."""
    missing = [name for name in columns if name not in batch]
    if missing:
        raise ValueError(
            f"columns_to_log has {missing}, the batch has {sorted(batch)}. Put them into the batch, or log other columns."
        )
    import wandb  # pyright: ignore[reportMissingImports]

    values = [float(reward) for reward in rewards]
    rows = [list(row) for row in zip(*(batch[name] for name in columns), values, strict=True)]
    return wandb.Table(columns=[*columns, "reward"], rows=rows)
