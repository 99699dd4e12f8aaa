"""`trl compare A B --judge JUDGE --prompts FILE`: how often a judge prefers the answers of model B to those of A."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trl.scripts.plain_parser import PlainParser

Row = dict[str, Any]  # with a `prompt`, text or messages


def make_parser() -> PlainParser:
    from trl.options.methods import JudgeOptions

    text = "Let a judge compare the answers of two models, and print how often the second one wins."
    parser = PlainParser(prog="trl compare", description=text)
    parser.add_argument("first", metavar="A", help="model or adapter: a folder or a name on the Hub")
    parser.add_argument("second", metavar="B", help="the same, whose win rate is printed")
    parser.add_argument("--judge", required=True, help="pair_rm, openai, hf, random, or a path like my_module.MyJudge")
    parser.add_argument("--prompts", required=True, help="data set with a column prompt: file, folder, name on the Hub")
    parser.add_argument("--split", default="train", help="its split")
    parser.add_argument("--num_prompts", type=int, help="first prompts only (default: all)")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0 takes the most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    for item in fields(JudgeOptions):
        option, about = f"--{item.name}", item.metadata["help"]
        if item.default is False:
            parser.add_argument(option, action="store_true", help=about)
        else:
            kind = str if item.name == "judge_cache" else int
            parser.add_argument(option, type=kind, default=item.default, help=about)
    parser.add_argument("--out", metavar="FILE", help="also write figures and answers as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return make_parser().run(print_comparison, argv)


def print_comparison(options: argparse.Namespace) -> int:
    """Compare and print the figures; returns the exit status, 1 without an answer of the judge."""
    figures = compare(options)
    if options.out:
        Path(options.out).write_text(json.dumps(figures, indent=2))
    rows = figures.pop("rows")
    print(f"{options.second} against {options.first}, {len(rows)} prompts")
    for name, value in figures.items():
        print(f"  {name.replace('_', ' '):<28} {value:.4g}")
    return int(figures["unanswered"] == len(rows))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Figures, and `rows` with prompts, answers and shares. Raises: ValueError, TypeError, OSError, ImportError."""
    from trl.reporting.win_rate import length_controlled, win_rate, win_shares
    from trl.rewards.functions import resolve_judge
    from trl.rewards.judge_source import as_text
    from trl.rewards.managed_judge import managed

    if options.out and not Path(options.out).resolve().parent.is_dir():
        raise ValueError(f"--out {options.out} is in a folder that does not exist. Make the folder.")
    judge = managed(resolve_judge(options.judge), options, on_failure="skip")
    rows = _prompts(options)
    answers = [_answers(model, rows, options) for model in (options.first, options.second)]
    prompts = [as_text(row["prompt"]) for row in rows]
    pairs = list(zip(*answers, strict=True))
    shares = win_shares(judge, prompts, pairs)
    rate, lengths = win_rate(shares), [(len(first), len(second)) for first, second in pairs]
    return {
        "win_rate": rate.rate,
        "win_rate_low": rate.low,
        "win_rate_high": rate.high,
        "length_controlled_win_rate": length_controlled(shares, lengths),
        "ties": shares.count(0.5),
        "unanswered": rate.unanswered,
        "mean_length_first": sum(first for first, _ in lengths) / len(lengths),
        "mean_length_second": sum(second for _, second in lengths) / len(lengths),
        **{name.replace("/", "_"): value.mean.item() for name, value in judge.agreement().items()},
        **{f"judge_{name}": value for name, value in judge.cost.items()},
        "rows": [
            {"prompt": prompt, "first": first, "second": second, "share_of_second": share}
            for prompt, (first, second), share in zip(prompts, pairs, shares, strict=True)
        ],
    }


def _prompts(options: argparse.Namespace) -> list[Row]:
    from trl.data.sources import load_source

    rows: Any = load_source(options.prompts, split=options.split)
    if "prompt" not in rows.column_names:
        raise ValueError(f"'{options.prompts}' must have a column 'prompt', got {rows.column_names}.")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ValueError(f"--num_prompts must be at least 1, got {options.num_prompts}.")
    prompts = rows[: options.num_prompts]["prompt"]
    if missing := [number for number, prompt in enumerate(prompts) if not prompt]:
        raise ValueError(f"row {missing[0]} of '{options.prompts}' has no prompt. Remove the row.")
    return [{"prompt": prompt} for prompt in prompts]


def _answers(path: str, rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    import torch

    from trl.data.rendering import text_tokenizer
    from trl.generation.engine import Sampling
    from trl.generation.transformers.engine import TransformersEngine
    from trl.generation.transformers.requests import stop_tokens
    from trl.models.loading import create_model_from_path, load_processing_class
    from trl.trainer.samples import prompt_ids

    model: Any = create_model_from_path(path).eval()
    model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    tokenizer = text_tokenizer(load_processing_class(path))
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed,
        stop_token_ids=tuple(stop_tokens(model, tokenizer)),
    )  # fmt: skip
    prompts = [prompt_ids(row, tokenizer) for row in rows]
    completions = TransformersEngine(model, tokenizer=tokenizer).generate(prompts, sampling)
    return tokenizer.batch_decode([completion.ids for completion in completions], skip_special_tokens=True)
