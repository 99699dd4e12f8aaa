"""PPO of two processes with sharded weights over gloo: `torchrun ... -m tests.experimental.ppo_sharded OUT HOW`.

HOW: one of `KINDS`. The process with rank 0 writes the policy and the log.
"""

import copy
import sys

from tests.trainer.sharded_worker import DEEPSPEED, save_and_exit, use_deepspeed_on_cpu, use_fsdp_on_cpu

KINDS = ("fsdp2", "zero3")
SETTINGS = {
    "architecture": "llama", "dtype": "float32", "max_steps": 3, "response_length": 5, "per_device_train_batch_size": 8, "num_mini_batches": 1,
    "optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3, "max_grad_norm": 1.0, "reward_model": 1,
    "prefix_sharing": False,
}  # fmt: skip


def main(out: str, how: str) -> None:
    settings = {**SETTINGS, "per_device_train_batch_size": 4}
    if how == "fsdp2":
        use_fsdp_on_cpu()
    else:
        use_deepspeed_on_cpu()
        settings["deepspeed"] = copy.deepcopy(DEEPSPEED)
        settings["deepspeed"]["zero_optimization"]["stage"] = int(how[-1])
    import torch

    from tests.experimental.ppo_runs import run_with_models

    torch.set_num_threads(1)
    trainer, _ = run_with_models(**settings)
    save_and_exit(trainer, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
