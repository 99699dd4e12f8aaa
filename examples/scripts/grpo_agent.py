"""A model learns by GRPO to call a calculator: the reward is the right result, whichever way it was found.

    python examples/scripts/grpo_agent.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir runs/calculator --max_steps 200

`tools=[add]` is all that the trainer is told. The chat template shows the model the function's signature and docstring, what the
model calls is run, and what the tool answers is never trained on.

With `--agent` a program of its own solves the task, over OpenAI's API: `GRPOTrainer(agent=calculator)`. `--out FILE` appends the
figures of a run to a file.

Without a model at hand, `--tiny` first shows a two-layer Llama of random weights conversations of which a quarter call the tool (one in five with a wrong number), while the others guess, and then
trains it. Sums it is tested on are not among those that it learns from.
"""

import argparse
import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import openai
from datasets import Dataset
from transformers.utils import get_json_schema

from trl import GRPOConfig, GRPOTrainer, ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
from trl.scripts.loading import model_init_kwargs

LARGEST = 19
MARKS = ("<tool_call>", "</tool_call>", "<user>", "<assistant>", "<tool>")
WORDS = (
    "What",
    "is",
    "?",
    "+",
    "=",
    '{"name":',
    '"add",',
    '"arguments":',
    '{"a":',
    ",",
    '"b":',
    "}}",
    "Tools:",
    "add",
)
TEMPLATE = """\
{%- if tools %}Tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif -%}
{%- for message in messages %}<{{ message.role }}> {{ message.content }} {% for call in message.tool_calls or [] -%}
<tool_call> {"name": "{{ call.function.name }}", "arguments": {
{%- for name, value in call.function.arguments.items() -%}
"{{ name }}": {{ value | tojson }} {% if not loop.last %}, {% endif %}{% endfor %}}} </tool_call> {% endfor -%}
<end> {% endfor -%}
{%- if add_generation_prompt %}<assistant> {% endif -%}
"""
SFT = {
    "per_device_train_batch_size": 64, "max_steps": 400, "learning_rate": 3e-3, "assistant_only_loss": True, "logging_strategy": "no",
}  # fmt: skip
TINY = {
    "per_device_train_batch_size": 64, "per_device_eval_batch_size": 80, "num_generations_eval": 1, "max_completion_length": 24,
    "learning_rate": 1e-3, "logging_steps": 10, "max_steps": 80,
}  # fmt: skip
SMALL_MODEL = {
    "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False,
}  # fmt: skip


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def question(a: int, b: int) -> list[dict[str, str]]:
    """A user who wants a sum."""
    return [{"role": "user", "content": f"What is {a} + {b} ?"}]


def correct(completions: list[list[dict[str, Any]]], result: list[int], **columns: Any) -> list[float]:
    """1 where the last message ends with the right number, else 0."""
    said = [messages[-1].get("content", "").split() for messages in completions]
    return [float(words[-1:] == [str(wanted)]) for words, wanted in zip(said, result, strict=True)]


CLIENT = openai.AsyncOpenAI(base_url="http://localhost", api_key="none")  # its connections are shared


async def calculator(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent: it asks the policy, answers its calls, and gives 1 for the right result."""
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(row["prompt"])
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[get_json_schema(add)])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            try:
                content = str(add(**json.loads(call.function.arguments)))
            except (TypeError, ValueError) as error:
                content = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "name": "add", "content": content})
        if not message.tool_calls:
            break
    return correct([messages], [row["result"]])[0]


def shown(pairs: list[tuple[int, int]], count: int, dice: random.Random) -> Dataset:
    """Conversations to imitate: a quarter of them call the tool, the others guess."""
    rows = []
    for _ in range(count):
        a, b = dice.choice(pairs)
        messages: list[dict[str, Any]] = [*question(a, b)]
        if dice.random() < 0.25:
            second = b if dice.random() < 0.8 else dice.randint(0, LARGEST)
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": second}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "add", "content": str(a + second)})
            messages.append({"role": "assistant", "content": f"= {a + second}"})
        else:
            messages.append({"role": "assistant", "content": f"= {dice.randint(0, 2 * LARGEST)}"})
        rows.append({"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]})
    return Dataset.from_list(rows)


def split(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs to learn from, and 80 held out."""
    pairs = list(product(range(LARGEST + 1), repeat=2))
    random.Random(seed).shuffle(pairs)
    return pairs[80:], pairs[:80]


def small_parts(folder: Path, *, seed: int) -> dict[str, Any]:
    """A model that has seen the tool used, and its tokenizer."""
    import tiny

    tokenizer = tiny.word_tokenizer([*WORDS, *map(str, range(2 * LARGEST + 1))], MARKS)
    tokenizer.chat_template = TEMPLATE
    model = tiny.small_llama(tokenizer, seed=seed, layers=2, width=128)
    rows = shown(split(seed)[0], 4096, random.Random(seed))
    config = SFTConfig(str(folder), seed=seed, **{**SFT, **SMALL_MODEL})
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()
    return {"model_name_or_path": tiny.save(folder, {}, model, tokenizer)["model_name_or_path"]}


def sums(pairs: list[tuple[int, int]]) -> Dataset:
    """Questions with their answers."""
    return Dataset.from_list([{"prompt": question(a, b), "result": a + b} for a, b in pairs])


if __name__ == "__main__":
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    look.add_argument("--agent", action="store_true")
    look.add_argument("--tiny", action="store_true")
    look.add_argument("--out", type=Path)
    asked, words = look.parse_known_args()
    parser = TrlParser((GRPOConfig, ModelConfig))
    turns = {} if asked.agent else {"max_tool_calling_iterations": 2}
    parser.set_defaults(num_generations=8, seed=0, **turns)
    if asked.tiny:
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        look.add_argument("--output_dir", default="runs/grpo_agent")
        look.add_argument("--seed", type=int, default=0)
        run, _ = look.parse_known_args()
        options = {**SMALL_MODEL, **TINY, "output_dir": run.output_dir}
        options |= small_parts(Path(run.output_dir) / "tiny", seed=run.seed)
        words = [*(word for name, value in options.items() for word in (f"--{name}", str(value))), *words]
    training_args, model_args = parser.parse_args_and_config(words)
    training_args.model_init_kwargs = model_init_kwargs(model_args, training_args.model_init_kwargs)
    known, held_out = split(training_args.seed)
    trainer = GRPOTrainer(
        model_args.model_name_or_path,
        None if asked.agent else correct,
        training_args,
        sums(known),
        sums(held_out),
        peft_config=get_peft_config(model_args),
        **({"agent": calculator} if asked.agent else {"tools": [add]}),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    figures: dict[str, Any] = {"seed": training_args.seed}
    counted = ("eval_agent/turns", "turns") if asked.agent else ("eval_tools/call_frequency", "calls per question")
    for name, what in (("eval_reward", "right results"), counted):
        print(f"{what}: {before[name]:.3f} -> {after[name]:.3f} over {trainer.state.global_step} steps")
        figures[what] = f"{before[name]:.3f} → {after[name]:.3f}"
    if asked.out:
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures, ensure_ascii=False) + "\n")
    trainer.save_model(training_args.output_dir)
