"""Short runs of `transformers.Trainer` on a tiny model, for callbacks."""

from datasets import Dataset
from transformers import Trainer, TrainingArguments

from tests.models.words import word_tokenizer
from tests.tiny import tiny_model

PROMPTS = ["the cat", "the mat sat on", "on"]


def trainer(folder, *, steps=4, callbacks=None, eval_dataset=None, report_to="none", train=None, **options):
    """A trainer of four rows in batches of two, plain SGD, not started."""
    rows = train or [{"input_ids": [4, 5, 6, i], "labels": [4, 5, 6, i]} for i in range(3, 7)]
    fields = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": report_to,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model=tiny_model("llama"),
        args=TrainingArguments(**{**fields, **options}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=eval_dataset,
        processing_class=word_tokenizer(eos_token="</s>", pad_token="<pad>"),
        callbacks=callbacks,
    )


def prompt_dataset():
    """The prompts as an evaluation dataset."""
    return Dataset.from_dict({"prompt": PROMPTS})
