"""PPO of two processes with sharded weights over gloo: `torchrun ... -m tests.experimental.ppo_sharded OUT HOW`.

HOW: one of `KINDS`. The process with rank 0 writes the policy and the log.
"""

import sys
from pathlib import Path

from tests.trainer.sharded_worker import exit_now, save, shard

KINDS = ("fsdp2", "zero3")
SETTINGS = {
    "architecture": "llama", "dtype": "float32", "max_steps": 3, "response_length": 5, "per_device_train_batch_size": 8, "num_mini_batches": 1,
    "optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3, "max_grad_norm": 1.0, "reward_model": 1,
    "prefix_sharing": False,
}  # fmt: skip


def main(out: str, how: str) -> None:
    settings = {**SETTINGS, "per_device_train_batch_size": 4, **shard(how)}
    import torch

    from tests.experimental.ppo_runs import run_with_models

    torch.set_num_threads(1)
    trainer, _ = run_with_models(**settings)
    save(trainer, Path(out))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
