"""What the examples of training on preference pairs share: their command line, and a small policy and pairs for `--tiny`."""

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, load_dataset
from small_model import small_llama, train_tokenizer

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.scripts.model_loading import model_init_kwargs


@dataclass
class ExampleArguments(ScriptArguments):
    """The data set, or `--tiny`."""

    tiny: bool = field(
        default=False, metadata={"help": "Train a small model of random weights on built-in pairs."}
    )


def train_on_pairs(config_class: type, trainer_class: type) -> None:
    """Read the command line, train, and save the model into `output_dir`."""
    parser = TrlParser((ExampleArguments, config_class, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    model: Any = model_args.model_name_or_path
    tokenizer = None
    if script_args.tiny:
        (model, tokenizer), sets = tiny_policy(), {"train": sums(), "test": sums(8)}
    else:
        training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
        sets: Any = load_dataset(script_args.dataset_name, script_args.dataset_config)
    trainer = trainer_class(
        model=model,
        args=training_args,
        train_dataset=sets[script_args.dataset_train_split],
        eval_dataset=sets[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


def sums(count: int = 64) -> Dataset:
    """Sums with a right and a wrong answer, standard format."""
    rows = []
    for left, right in ((number % 8, number // 8) for number in range(count)):
        right_answer, wrong_answer = f" {left + right}", f" {left + right + 1 + left % 3}"
        rows.append({"prompt": f"{left} + {right} =", "chosen": right_answer, "rejected": wrong_answer})
    return Dataset.from_list(rows)


def tiny_policy() -> tuple[Any, Any]:
    """A Llama of random weights and its tokenizer, made for `sums`."""
    texts = [row["prompt"] + row[side] for row in sums() for side in ("chosen", "rejected")]  # type: ignore[index]
    tokenizer = train_tokenizer(texts, vocabulary=300)
    return small_llama(tokenizer, seed=0), tokenizer
