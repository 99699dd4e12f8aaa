"""References of two processes with sharded weights, over gloo: `torchrun ... -m tests.models.reference_worker OUT HOW`.

HOW: `fsdp2` or `zero3`. Process 0 writes what a frozen model and a switched-off adapter answered, and the adapter that
was trained meanwhile; `expected()` gives the same from one process without sharding.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.sharded_worker import STEPS, exit_now, shard

BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    "labels": torch.tensor([[-100, 6, 7, 8], [-100, -100, 11, -100]]),
}


def logps(scorer, model, batch):
    """The scores of the batch."""
    return scorer.score(model, batch).logps


class Ask(TrainerCallback):
    """Asks the references before each step, moves the frozen one towards itself in the file, and keeps the answers."""

    def __init__(self, frozen, disabled, folder):
        self.frozen, self.disabled, self.folder, self.seen, self.trainer = frozen, disabled, folder, {}, None

    def on_step_begin(self, args, state, control, **kwargs):
        policy = self.trainer.model_wrapped
        if state.global_step == 0:
            self.frozen.prepare(self.trainer.accelerator)
            self.seen["fingerprint"] = self.frozen.fingerprint(policy)
            self.seen["fingerprint_disabled"] = self.disabled.fingerprint(policy)
        self.seen[f"disabled_{state.global_step}"] = self.disabled.score(policy, BATCH, logps)
        self.seen[f"frozen_{state.global_step}"] = self.frozen.score(policy, BATCH, logps)
        if state.global_step == 0:
            self._save_change_and_load(policy)

    def _save_change_and_load(self, policy):
        from trl.models.distributed import gathered_parameters

        self.frozen.save(self.folder)
        self.trainer.accelerator.wait_for_everyone()
        for parameter in self.frozen.module.parameters():
            with gathered_parameters([parameter], modifier_rank=0):
                parameter.data.mul_(1.5)
        self.seen["moved"] = self.frozen.score(policy, BATCH, logps)
        self.frozen.load(self.folder)


def train(folder: str, *, rows: int = 2, ask: bool = True, **settings):
    """Three steps of LoRA with the references asked before each; the answers and the adapter's weights."""
    import peft
    from accelerate.utils import set_seed
    from datasets import Dataset

    from tests.trainer.one_step import SETTINGS, fixed_rows
    from tests.trainer.resume_worker import tokenizer

    set_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    other = tiny_model("llama", seed=1)
    from trl import SFTConfig, SFTTrainer
    from trl.models.reference import FrozenModel, make_reference
    from trl.models.scoring.causal import Scorer

    frozen = FrozenModel(other, Scorer(other))
    disabled = make_reference(model, Scorer(model))
    callback = Ask(frozen, disabled, folder)
    fields = {**SETTINGS, **STEPS, "per_device_train_batch_size": rows, **settings}
    args = SFTConfig(tempfile.mkdtemp(), **fields)
    trainer = SFTTrainer(
        model, args, train_dataset=Dataset.from_list(fixed_rows()), processing_class=tokenizer(),
        callbacks=[callback] if ask else [],
    )  # fmt: skip
    callback.trainer = trainer
    trainer.train()
    return callback.seen, trainer


def save_answer(model, out: str) -> None:
    """The logits of a frozen model that a loop without a trainer wraps."""
    from trl.models.distributed import is_sharded
    from trl.trainer.utils import forward, prepare_deepspeed

    engine = prepare_deepspeed(model, per_device_train_batch_size=2)
    assert is_sharded(engine) and not engine.module.training
    with torch.no_grad():
        logits = forward(engine, BATCH["input_ids"], pad_token_id=0).logits
    torch.save(logits, Path(out, f"by_hand_{os.environ['RANK']}.pt"))


def main(out: str, how: str) -> None:
    torch.set_num_threads(1)
    settings = shard(how)
    by_hand = tiny_model("llama", seed=2)  # ZeRO-3, once on, shards new ones
    seen, trainer = train(out, **settings)
    if how == "zero3":
        save_answer(by_hand, out)
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        torch.save(seen, Path(out, "seen.pt"))
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
