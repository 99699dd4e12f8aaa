"""Trains a tiny model, kills itself with SIGKILL where it is told to, and writes what the run ended in.

`python -m tests.trainer.resume_worker OUT KIND KILL`: a run goes on from the newest checkpoint in OUT.
KILL: `micro:N` before the N-th micro-batch of the process, `write:N` within the N-th file of a checkpoint, or nothing; where
rollouts are learned from also `rollout:N`, `reward:N` or `score:N`, within the N-th call of the engine, of the reward sources,
or of the scoring pass after a rollout.
"""

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import get_last_checkpoint

from tests.tiny import tiny_model
from trl import SFTConfig, SFTTrainer

VOLATILE = ("runtime", "per_second", "time", "eps")
KINDS = {
    "packing": {"packing": True, "max_length": 24, "gradient_accumulation_steps": 2},
    "accumulation": {
        "gradient_accumulation_steps": 3,
        "neftune_noise_alpha": 5.0,
        "lr_scheduler_type": "cosine",
    },
    "streaming": {"gradient_accumulation_steps": 2, "max_steps": 9},
    "padding_free": {"padding_free": True, "num_train_epochs": 3},
    "residuals": {"weights": "bf16+residual", "optim": "adamw_torch_fused"},
}
GROUPS = {
    "grpo": {"steps_per_generation": 4, "num_iterations": 2, "top_entropy_quantile": 0.5},
    "rloo": {"steps_per_generation": 8, "mask_truncated_completions": True},
}


def rows(count: int = 23) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, 60, (n,), generator=generator).tolist()} for n in lengths]


def stream():
    yield from rows()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trainer, kill: str) -> None:
    """Let the process die where `kill` says."""
    what, _, number = kill.partition(":")
    if what == "micro":  # also in the middle of an accumulated step
        kill_within(trainer, "training_step", int(number), before=True)
    elif what == "write":
        kill_while_writing(int(number))
    elif what == "rollout":
        kill_within(trainer.engine, "generate", int(number))
    elif what == "reward":
        kill_within(trainer.rewards, "score", int(number))
    elif what == "score":
        kill_within(trainer, "score_rollout", int(number))


def kill_within(holder, method: str, number: int, *, before: bool = False) -> None:
    """Die after the N-th call has done its work, or `before` it does."""
    inner, left = getattr(holder, method), [number]

    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and before:
            die()
        found = inner(*args, **kwargs)
        if left[0] == 0:
            die()
        return found

    setattr(holder, method, wrapped)


def kill_while_writing(number: int) -> None:
    """Kill the process within the N-th file that a checkpoint is made of, half of it written."""
    left = [number]

    def wrap(module, name):
        inner = getattr(module, name)

        def save(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                target = next(a for a in [*args, *kwargs.values()] if isinstance(a, (str, os.PathLike)))
                Path(target).write_bytes(b"half")
                die()
            return inner(*args, **kwargs)

        setattr(module, name, save)

    wrap(torch, "save")
    wrap(safetensors.torch, "save_file")
    import transformers.modeling_utils as modeling

    wrap(modeling, "safe_save_file")


def main(out: str, kind: str, kill: str = "") -> None:
    torch.set_num_threads(1)
    makers = {**dict.fromkeys(KINDS, sft), **dict.fromkeys(GROUPS, groups), "ppo": ppo}
    trainer = makers.get(kind, preference)(out, kind)
    arm(trainer, kill)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) is not None)
    Path(out, "end.json").write_text(json.dumps(ending(trainer), indent=1))


def preference(out: str, method: str):
    """Two epochs and a half of eight rows in five steps, each of two micro-batches, with a checkpoint after each."""
    from tests.trainer.preference_methods import RESUMED

    make, settings = RESUMED[method]
    return make(
        out, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5, learning_rate=1e-2,
        optim="adamw_torch", lr_scheduler_type="cosine", save_strategy="steps", save_steps=1, save_total_limit=2,
        logging_steps=3, **settings,
    )  # fmt: skip


def groups(out: str, kind: str):
    """Windows of four steps twice over, every micro-batch half a step, in which groups are sampled again."""
    from tests.trainer.grpo_runs import make, prompts

    trainer, _ = make(
        kind.partition(" ")[0], folder=out, reward_funcs=[by_chance, at_leisure], per_device_train_batch_size=4, num_generations=4,
        gradient_accumulation_steps=2, max_steps=11, learning_rate=1e-2, optim="adamw_torch", lr_scheduler_type="cosine",
        save_strategy="steps", save_steps=3, save_total_limit=2, logging_steps=2, dtype="float32", dynamic_sampling=True,
        max_resampling_rounds=2, sync_ref_model=True, ref_model_sync_steps=3, eval_strategy="steps", eval_steps=7,
        given={"eval_dataset": prompts(2)}, log_completions=False, **GROUPS[kind],
    )  # fmt: skip
    return trainer


def ppo(out: str, kind: str):
    """Four optimiser steps to a batch of rollouts, a checkpoint every three."""
    from tests.experimental.ppo_runs import make, prompts

    trainer, _ = make(
        folder=out, reward_funcs=[by_chance, at_leisure], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=14,
        learning_rate=1e-2, optim="adamw_torch", lr_scheduler_type="cosine", save_strategy="steps", save_steps=3, save_total_limit=2,
        logging_steps=2, dtype="float32", eval_dataset=prompts(2), eval_strategy="steps", eval_steps=5, num_sample_generations=2,
        local_rollout_forward_batch_size=5,
    )  # fmt: skip
    return trainer


def by_chance(completion_ids: list[list[int]], **_) -> list[float]:
    """Often the same for a whole group; draws from two of the global random streams."""
    return [float((ids[0] + torch.randint(2, ()).item() + np.random.randint(2)) % 7 == 0) for ids in completion_ids]


async def at_leisure(completion_ids: list[list[int]], **_) -> list[float | None]:
    """The same, from the third; it has no opinion on some rows."""
    await asyncio.sleep(0)
    return [None if len(ids) % 3 == 0 else float(random.random() < 0.04) for ids in completion_ids]


def sft(out: str, kind: str) -> SFTTrainer:
    settings = {"num_train_epochs": 2, **KINDS[kind]}
    args = SFTConfig(
        out, per_device_train_batch_size=3, learning_rate=1e-2, save_steps=2, logging_steps=3, report_to="none",
        use_cpu=True, disable_tqdm=True, gradient_checkpointing=False, save_total_limit=2, seed=7, **settings,
    )  # fmt: skip
    data = IterableDataset.from_generator(stream) if kind == "streaming" else Dataset.from_list(rows())
    if kind == "streaming":
        data = data.shuffle(seed=3, buffer_size=8)
    return SFTTrainer(
        tiny_model("llama", attention_dropout=0.1), args, train_dataset=data, processing_class=tokenizer()
    )


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 64)}}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def ending(trainer: SFTTrainer) -> dict:
    """Digests of weights and optimiser state, and the whole log without its clocks."""
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in VOLATILE)}
        for entry in trainer.state.log_history
    ]
    moments = trainer.optimizer.state_dict()["state"]
    return {
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest({f"{i}.{k}": v for i, s in moments.items() for k, v in s.items()}),
        "schedule": trainer.lr_scheduler.state_dict()["last_epoch"],
        "logs": logs,
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(torch.as_tensor(tensors[name]).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
