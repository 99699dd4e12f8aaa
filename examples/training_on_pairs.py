"""What the examples of preference training share: their inputs, and a small policy and pairs for `--tiny`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datasets import Dataset
from small_model import small_llama, train_tokenizer

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.scripts.training import load_inputs


@dataclass
class ExampleArguments(ScriptArguments):
    """The data set, or `--tiny`."""

    tiny: bool = field(
        default=False, metadata={"help": "Train a small model of random weights on built-in pairs."}
    )


class Inputs(NamedTuple):
    """What a trainer is given."""

    model: Any
    tokenizer: Any
    train: Any
    evaluation: Any


def inputs(script_args: ExampleArguments, training_args: Any, model_args: ModelConfig) -> Inputs:
    """The model and the data sets that a command line names (as `trl dpo` reads them), or the small ones."""
    if script_args.tiny:
        return Inputs(*tiny_policy(), sums().shuffle(seed=0), sums(8))
    train, evaluation = load_inputs(script_args, training_args, model_args, DatasetMixtureConfig())
    return Inputs(model_args.model_name_or_path, None, train, evaluation)


def train_on_pairs(
    config_class: type,
    trainer_class: type,
    arguments_class: type = ExampleArguments,
    extra: Callable[[Any, Any], dict[str, Any]] = lambda script_args, training_args: {},
) -> None:
    """Read the command line, train, and save the model into `output_dir`.

    `extra` gives further arguments of the trainer, from those of the script (an `arguments_class`) and of training.
    """
    parser = TrlParser((arguments_class, config_class, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    given = inputs(script_args, training_args, model_args)
    trainer = trainer_class(
        model=given.model,
        args=training_args,
        train_dataset=given.train,
        eval_dataset=given.evaluation if training_args.eval_strategy != "no" else None,
        processing_class=given.tokenizer,
        peft_config=get_peft_config(model_args),
        **extra(script_args, training_args),
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
