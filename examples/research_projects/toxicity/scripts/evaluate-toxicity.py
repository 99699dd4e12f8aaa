"""How toxic is what models write? Each continues toxic prompts, and a classifier scores the continuations.

    python examples/research_projects/toxicity/scripts/evaluate-toxicity.py --model_type gpt-neo --output_file toxicity.csv \
        --num_samples 400 --max_new_tokens 30

`--model_type` stands for a few models, or is a name or folder itself. Prompts are the toxic comments of `OxAISH-AL-LLM/wiki_toxic`,
the classifier is `facebook/roberta-hate-speech-dynabench-r4-target`. The table has each model's mean and standard deviation of the
probability that a text is toxic.
"""

import csv
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl import TrlParser

MODELS = {
    "gpt-neo": ["EleutherAI/gpt-neo-125m", "EleutherAI/gpt-neo-2.7B"],
    "gpt-j": ["EleutherAI/gpt-j-6B"],
}


@dataclass
class Arguments:
    """What is evaluated, and how."""

    model_type: str = field(default="gpt-neo", metadata={"help": "gpt-neo, gpt-j, or a model by name."})
    output_file: str = field(default="toxicity.csv", metadata={"help": "The table that is written."})
    num_samples: int = field(default=400, metadata={"help": "Prompts that are continued."})
    batch_size: int = field(default=16, metadata={"help": "Prompts that are continued at once."})
    max_new_tokens: int = field(default=30, metadata={"help": "Length of a continuation."})
    context_length: int = field(default=2000, metadata={"help": "Characters of a prompt, at most."})
    dataset_name: str = field(default="OxAISH-AL-LLM/wiki_toxic", metadata={"help": "Rows of `comment_text`, `label`."})  # fmt: skip
    classifier: str = field(
        default="facebook/roberta-hate-speech-dynabench-r4-target",
        metadata={"help": "Classifier whose last label is toxic, or whose only logit is high for what is not."},
    )
    seed: int = field(default=0, metadata={"help": "Of the continuations."})


@torch.no_grad()
def toxicity(texts: list[str], model: Any, tokenizer: Any) -> torch.Tensor:
    """The probability that each text is toxic, `(B,)`."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True).to(model.device)
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.float()
    return 1 - logits[:, 0].sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=-1)[:, -1]


@torch.no_grad()
def continuations(prompts: list[str], name: str, args: Arguments) -> list[str]:
    """What a model writes behind the prompts, sampled."""
    tokenizer: Any = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(name).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    found: list[str] = []
    for start in range(0, len(prompts), args.batch_size):
        texts = prompts[start : start + args.batch_size]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        said = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, max_new_tokens=args.max_new_tokens)
        found += tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True)
    return found


if __name__ == "__main__":
    parser = TrlParser(Arguments)
    (args,) = parser.parse_args_and_config()
    torch.manual_seed(args.seed)
    judge = AutoModelForSequenceClassification.from_pretrained(args.classifier).eval()
    judge_tokenizer = AutoTokenizer.from_pretrained(args.classifier)
    rows = load_dataset(args.dataset_name, split="test").filter(lambda row: row["label"] == 1)
    prompts = [text[: args.context_length] for text in rows["comment_text"][: args.num_samples]]
    with open(args.output_file, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["model_id", "mean_toxicity", "std_toxicity"])
        for name in MODELS.get(args.model_type, [args.model_type]):
            texts = [text or " " for text in continuations(prompts, name, args)]
            parts = [texts[at : at + args.batch_size] for at in range(0, len(texts), args.batch_size)]
            found = torch.cat([toxicity(part, judge, judge_tokenizer) for part in parts])
            table.writerow([name, f"{found.mean():.4f}", f"{found.std():.4f}"])
            print(f"{name}: toxicity {found.mean():.3f} +- {found.std():.3f} over {len(found)} texts")
