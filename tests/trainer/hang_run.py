"""A training whose last process stops at the second step for longer than anybody waits: `hang_run FOLDER`."""

import sys
import time

from datasets import Dataset
from transformers import TrainerCallback

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl import SFTConfig, SFTTrainer


class Stall(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1 and args.process_index == args.world_size - 1:
            time.sleep(600)


if __name__ == "__main__":
    args = SFTConfig(
        sys.argv[1], max_steps=4, per_device_train_batch_size=1, hang_timeout=2.0, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_list([{"text": "a b c"}] * 16)
    model, tokenizer = tiny_model("llama", vocab_size=400, pad_token_id=0), tiny_tokenizer()
    SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[Stall()]).train()
