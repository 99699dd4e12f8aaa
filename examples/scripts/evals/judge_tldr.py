"""How often does a judge prefer a model's summaries to those that people wrote?

    python examples/scripts/evals/judge_tldr.py --model_name_or_path vwxyzjn/ppo_tldr --judge_model gpt-4o-mini \
        --num_examples 1000

`gpt-` models are reached through OpenAI's API (`pip install 'trl[judges]'`), all others through the Hub's. Without `--judge_model` a
summary wins that shares more words with its post.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import TrlParser
from trl.experimental.judges import BasePairwiseJudge, HfPairwiseJudge, OpenAIPairwiseJudge
from trl.rewards import ManagedJudge


@dataclass
class Arguments:
    """What is judged, and by whom."""

    model_name_or_path: str = field(metadata={"help": "Model whose summaries are judged."})
    model_revision: str = field(default="main", metadata={"help": "Its revision on the Hub."})
    judge_model: str | None = field(default=None, metadata={"help": "Model that judges. None: shared words decide."})
    judge_cache: str | None = field(default=None, metadata={"help": "File that keeps its answers."})
    swap_positions: bool = field(default=False, metadata={"help": "Show it each pair in both orders."})
    num_examples: int | None = field(default=None, metadata={"help": "Posts to summarise. None: all."})
    dataset_name: str = field(default="trl-lib/tldr", metadata={"help": "Rows of `prompt`, `completion`."})
    dataset_split: str = field(default="validation", metadata={"help": "Its split."})
    max_new_tokens: int = field(default=200, metadata={"help": "Length of a summary."})
    batch_size: int = field(default=16, metadata={"help": "Posts that are summarised at once."})


class SharedWords(BasePairwiseJudge):
    """Prefers the completion of which the larger share of words stands in the prompt."""

    def judge(
        self, prompts: Sequence[str], completions: Sequence[Sequence[str]], shuffle_order: bool = True
    ) -> list[int]:
        def share(prompt: str, text: str) -> float:
            words = text.split()
            return sum(word in prompt.split() for word in words) / max(len(words), 1)

        pairs = zip(prompts, completions, strict=True)
        return [int(share(prompt, second) > share(prompt, first)) for prompt, (first, second) in pairs]


def judge_of(model: str | None) -> BasePairwiseJudge:
    """The judge that an option names."""
    if model is None:
        return SharedWords()
    if model.startswith("gpt-"):
        return OpenAIPairwiseJudge(model, max_requests=None)
    return HfPairwiseJudge(model)


@torch.no_grad()
def summaries(prompts: list[str], args: Arguments) -> list[str]:
    """What the model writes, token by token the likeliest."""
    name = args.model_name_or_path
    tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=args.model_revision, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(name, revision=args.model_revision).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    found: list[str] = []
    for start in range(0, len(prompts), args.batch_size):
        texts = prompts[start : start + args.batch_size]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        mask, ids = inputs["attention_mask"], inputs["input_ids"]
        said = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=args.max_new_tokens)
        found += tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True)
    return found


if __name__ == "__main__":
    parser = TrlParser(Arguments)
    (args,) = parser.parse_args_and_config()
    rows = load_dataset(args.dataset_name, split=args.dataset_split)
    rows = rows.select(range(min(args.num_examples or len(rows), len(rows))))
    pairs = [list(pair) for pair in zip(rows["completion"], summaries(list(rows["prompt"]), args), strict=True)]
    judge = ManagedJudge(judge_of(args.judge_model), cache=args.judge_cache, swap_positions=args.swap_positions)
    verdicts = judge.judge(list(rows["prompt"]), pairs)
    answered = [verdict for verdict in verdicts if verdict >= 0]  # 0.5: a tie, -1: no answer
    rate = sum(answered) / len(answered) if answered else math.nan
    print(f"Model win rate: {100 * rate:.2f}%, {len(verdicts) - len(answered)} of {len(verdicts)} unanswered")
