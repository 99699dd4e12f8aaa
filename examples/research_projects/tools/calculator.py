"""A model learns by PPO to ask a calculator: what the tool writes is masked out, the reward is the right result.

    python examples/research_projects/tools/calculator.py --model_name bigcode/starcoderbase-1b --steps 100 --log_with wandb --output_dir runs/calculator

A prompt with two examples shows how a call looks; `trl.TextEnvironment` plays the turns.

Without a model at hand, `--tiny` first shows a two-layer Llama of random weights some calls (a third of them wrong), and then trains it by PPO.
"""

import ast
import operator
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from trl import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
    TextEnvironment,
    TrlParser,
)

PROMPT = """What is 13-3?

<request><Calculator>13-3<call>10<response>

Result=10<submit>

What is 4*3?

<request><Calculator>4*3<call>12<response>

Result=12<submit>

"""
MARKS = ("<request>", "<Calculator>", "<call>", "<response>", "<submit>")
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass
class Arguments:
    """What to run on."""

    tiny: bool = field(default=False, metadata={"help": "Train a small model of random weights."})
    output_dir: str = field(default="runs/calculator", metadata={"help": "Folder for the trained model."})


def calculate(text: str) -> str:
    """The value of a sum, difference, product or quotient of numbers."""

    def value(node: Any) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("numbers, + - * / only")

    return f"{value(ast.parse(text.strip(), mode='eval').body):g}"


def correct(texts: list[str], answers: list[float]) -> list[float]:
    """1 where a text ends in `Result = <the answer>`, else 0."""
    found = []
    for text, answer in zip(texts, answers, strict=True):
        given = text.rpartition("=")[2].replace("<submit>", "").strip()
        try:
            found.append(float(abs(float(given) - answer) < 0.1))
        except ValueError:
            found.append(0.0)
    return found


def tasks(count: int, dice: random.Random, *, tiny: bool) -> tuple[list[str], list[float]]:
    """Questions and their answers."""
    queries, answers = [], []
    for _ in range(count):
        left, right, sign = dice.randint(0, 9), dice.randint(0, 9), "+" if tiny else dice.choice("+-*")
        queries.append(f"What is {left} {sign} {right} ?" if tiny else f"What is {left}{sign}{right}?\n\n")
        answers.append(float(calculate(f"{left}{sign}{right}")))
    return queries, answers


def shown_calls(count: int) -> list[dict[str, str]]:
    """Questions with calls of the calculator, of which every third asks for something else."""
    dice, rows = random.Random(0), []
    for number in range(count):
        left, right, other = (dice.randint(0, 9) for _ in range(3))
        asked = other if number % 3 == 0 else right
        call = (
            f"<request> <Calculator> {left} + {asked} <call> {left + asked} <response> Result = {left + asked} <submit>"
        )
        rows.append({"prompt": f"What is {left} + {right} ?", "completion": f" {call}"})
    return rows


def small_parts(
    config: PPOConfig, words: Sequence[str], marks: Sequence[str], rows: list[dict[str, str]], folder: str
) -> tuple[Any, Any, PPOConfig]:
    """Model, tokenizer and settings of `--tiny`: a Llama of two layers that has imitated the rows."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tiny import TINY, small_llama, word_tokenizer

    tokenizer = word_tokenizer(words, marks)
    model = small_llama(tokenizer, seed=0, layers=2, width=64)
    args = SFTConfig(
        output_dir=folder, per_device_train_batch_size=64, max_steps=150, learning_rate=5e-3, report_to="none",
        logging_strategy="no", save_strategy="no", gradient_checkpointing=False, disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return model, tokenizer, replace(config, **{**TINY, "learning_rate": 5e-4}, steps=min(config.steps, 40))


def named_parts(config: PPOConfig) -> tuple[Any, Any, PPOConfig]:
    """The same by name."""
    tokenizer = AutoTokenizer.from_pretrained(config.model_name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return config.model_name, tokenizer, config


def learn(
    parts: tuple[Any, Any, PPOConfig],
    tools: dict[str, Callable[[str], Any]],
    reward: Callable[..., list[float]],
    draw: Callable[[int, random.Random], tuple[list[str], list[Any]]],
    *,
    what: str,
    folder: str,
    max_new_tokens: int,
    **environment: Any,
) -> None:
    """Train by PPO on the questions and answers of `draw`, report, and save; `environment` are settings of the turns."""
    model, tokenizer, config = parts
    model = AutoModelForCausalLMWithValueHead.from_pretrained(model, summary_dropout_prob=0.0)
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    played = TextEnvironment(
        trainer.accelerator.unwrap_model(trainer.model),
        tokenizer,
        tools,
        reward,
        generation_kwargs={"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": max_new_tokens},
        **environment,
    )
    dice, means, kls = random.Random(config.seed + trainer.accelerator.process_index), [], []
    for _ in range(config.steps):
        questions, answers = draw(config.batch_size, dice)
        queries, responses, masks, rewards, histories = played.run(questions, answers=answers)
        stats = trainer.step(queries, responses, rewards, masks)
        texts = {"query": questions, "response": [history.text for history in histories]}
        trainer.log_stats(stats, texts, rewards)
        means.append(stats["ppo/mean_scores"])
        kls.append(stats["objective/kl"])
    histories[0].show_text()
    few = max(1, len(means) // 5)
    first, last = sum(means[:few]) / few, sum(means[-few:]) / few
    print(f"{what}: {first:.3f} -> {last:.3f} over {len(means)} steps, KL at the end {kls[-1]:.3f} nats")
    written = sum(int((mask == 0).sum()) for mask in masks)
    print(f"tokens that tools wrote and nobody trained on: {written} in the last step")
    trainer.save_pretrained(folder)


def main() -> None:
    args, config = TrlParser((Arguments, PPOConfig)).parse_args_into_dataclasses()
    words = ["What", "is", "?", "+", "=", "Result", *map(str, range(19))]
    learn(
        small_parts(config, words, MARKS, shown_calls(1024), args.output_dir) if args.tiny else named_parts(config),
        {"Calculator": calculate},
        correct,
        partial(tasks, tiny=args.tiny),
        what="right results",
        folder=args.output_dir,
        prompt="" if args.tiny else PROMPT,
        max_turns=2,
        max_new_tokens=12 if args.tiny else 32,
    )


if __name__ == "__main__":
    main()
