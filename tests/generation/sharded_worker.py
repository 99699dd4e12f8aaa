"""Generation amid sharded training, two processes: `torchrun ... -m tests.generation.sharded_worker OUT HOW`.

HOW: `fsdp2`, `zero3` or `zero3_layers` (weights stay sharded). Where weights are gathered, process 1 asks for more and
longer completions than process 0: a second gathering within the phase would wait for ever. Each process writes what was
generated before each step, process 0 also the trained weights.
"""

import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.trainer.one_step import run
from tests.trainer.sharded_worker import STEPS, exit_now, shard

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 10, 11, 12, 13], [20, 21]]


class Generate(TrainerCallback):
    """Samples completions before each step; `more` asks for more and longer ones (None: in process 1)."""

    def __init__(self, *, more=None, **options):
        self.more, self.options, self.trainer = more, options, None
        self.seen, self.fallbacks = [], set()

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append(self.generate())

    def generate(self):
        from trl.generation.engine import Sampling
        from trl.generation.transformers.engine import TransformersEngine

        accelerator = self.trainer.accelerator
        engine = TransformersEngine(self.trainer.model_wrapped, accelerator=accelerator, **self.options)
        more = accelerator.process_index == 1 if self.more is None else self.more
        prompts = PROMPTS[:1] * 7 if more else PROMPTS
        found = engine.generate(prompts, Sampling(max_new_tokens=9 if more else 5, seed=3, stop_token_ids=()))
        self.fallbacks.update(engine.fallbacks)
        return [(completion.ids, completion.logps) for completion in found]


def train(*callbacks, rows=2, **settings):
    """Three steps with completions before each."""
    fields = {**STEPS, "per_device_train_batch_size": rows, **settings}
    from tests.trainer import one_step

    init = one_step.SFTTrainer.__init__

    def with_callback(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for callback in callbacks:
            callback.trainer = self
            self.callback_handler.callbacks.append(callback)  # `add_callback` warns of a second of one class

    one_step.SFTTrainer.__init__ = with_callback
    try:
        trainer, _ = run(tiny_model("llama"), **fields)
    finally:
        one_step.SFTTrainer.__init__ = init
    return trainer


def play_uneven_turns(trainer) -> None:
    """Episodes of one turn in process 0 and of three in process 1, which gather weights together."""
    from tests.trainer.resume_worker import tokenizer
    from trl.agents.text_environment import TextEnvironment
    from trl.generation.transformers.engine import TransformersEngine

    class Stubborn(TextEnvironment):
        def task_end_check(self, history, model_turn=True):
            return False, trainer.accelerator.process_index == 0

    engine = TransformersEngine(trainer.model_wrapped, tokenizer=tokenizer(), accelerator=trainer.accelerator)
    settings = {"max_new_tokens": 3, "eos_token_id": -1}
    env = Stubborn(trainer.model_wrapped, tokenizer(), max_turns=3, generation_kwargs=settings, engine=engine)
    histories = env.run(["w5 w6 w7"]).histories
    assert len(histories[0].text_spans) == (2 if trainer.accelerator.process_index == 0 else 7)


def main(out: str, how: str) -> None:
    torch.set_num_threads(1)
    settings = shard(how)
    layers = how == "zero3_layers"
    callback = Generate(more=False if layers else None, gather_zero3=not layers)
    trainer = train(callback, **settings)
    if how != "zero3_layers":
        play_uneven_turns(trainer)
    trainer.save_model(out)
    found = {"seen": callback.seen, "fallbacks": sorted(callback.fallbacks)}
    torch.save(found, Path(out, f"process_{trainer.accelerator.process_index}.pt"))
    trainer.accelerator.wait_for_everyone()
    exit_now(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
