"""Generation in the middle of sharded training, two processes over gloo: `torchrun ... -m tests.generation.sharded_worker OUT HOW`.

HOW: `fsdp2`, `zero3` or `zero3_layers` (weights stay sharded). The processes ask for different numbers of completions
where weights are gathered. Process 0 writes what was generated before each step, and the trained weights.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.one_step import run
from tests.trainer.sharded_worker import DEEPSPEED, STEPS, use_fsdp_on_cpu

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 10, 11, 12, 13], [20, 21]]


class Generate(TrainerCallback):
    """Samples completions before each step."""

    def __init__(self, route="auto", gather_zero3=True):
        self.options, self.trainer, self.seen = {"route": route, "gather_zero3": gather_zero3}, None, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append(self.generate())

    def generate(self):
        from trl.generation.engine import Sampling
        from trl.generation.transformers_engine import TransformersEngine

        accelerator = self.trainer.accelerator
        engine = TransformersEngine(self.trainer.model_wrapped, accelerator=accelerator, **self.options)
        uneven = self.options["gather_zero3"] and accelerator.process_index == 1
        prompts = PROMPTS[:1] * 7 if uneven else PROMPTS
        sampling = Sampling(max_new_tokens=5 + 4 * uneven, seed=3, stop_token_ids=())
        found = engine.generate(prompts, sampling)
        return [(completion.ids, completion.logps) for completion in found]


def train(callback, *, rows=2, **settings):
    """Three steps with completions before each."""
    fields = {**STEPS, "per_device_train_batch_size": rows, **settings}
    from tests.trainer import one_step

    init = one_step.SFTTrainer.__init__

    def with_callback(self, *args, **kwargs):
        init(self, *args, **kwargs)
        callback.trainer = self
        self.add_callback(callback)

    one_step.SFTTrainer.__init__ = with_callback
    try:
        trainer, _ = run(tiny_model("llama"), **fields)
    finally:
        one_step.SFTTrainer.__init__ = init
    return trainer


def main(out: str, how: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    if how == "fsdp2":
        use_fsdp_on_cpu()
    callback = Generate(gather_zero3=how != "zero3_layers")
    trainer = train(callback, **({} if how == "fsdp2" else {"deepspeed": DEEPSPEED}))
    trainer.save_model(out)
    if trainer.is_world_process_zero():
        torch.save(callback.seen, Path(out, "seen.pt"))
    trainer.accelerator.end_training()
    os._exit(0)  # DeepSpeed's own gloo groups stay open, and now and then abort the interpreter's exit


if __name__ == "__main__":
    main(*sys.argv[1:])
