"""`--help` of training commands: options in groups, each once, the essential ones first."""

import re

from trl.scripts import grpo, sft
from trl.scripts.parser import ESSENTIAL, options_of

TITLES = [
    *("essential", "model", "data", "training", "method", "generation"),
    *("logging, evaluation and saving", "hardware and speed", "older names"),
]


def help_of(parser, monkeypatch, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = parser.format_help()
    found = {}
    for line in text.splitlines():
        if re.fullmatch(r"[a-z][\w ,]*:", line):
            title = line[:-1]
        elif line.startswith("  -"):
            found.setdefault(title, []).append(line.split()[-1 if "--help" in line else 0].removeprefix("--"))
    return text, found


def test_every_option_stands_once_under_its_group(monkeypatch):
    parser = grpo.make_parser()
    text, found = help_of(parser, monkeypatch)
    assert list(found) == TITLES
    shown = [name for names in found.values() for name in names]
    assert sorted(shown) == sorted([*options_of(parser), "config", "help"])
    assert max(map(len, text.splitlines())) <= 80
    assert found["essential"] == [name for name in ESSENTIAL if name in shown]
    places = {"lora_r": 1, "column_mapping": 2, "weight_decay": 3, "epsilon": 4, "top_p": 5, "save_steps": 6}
    places |= {"deepspeed": 7, "warmup_ratio": 8, "torch_dtype": 8}
    assert {name: TITLES[at] for name, at in places.items()} == {
        name: title for title, names in found.items() for name in names if name in places
    }


def test_values_are_shown_by_kind_and_defaults_where_there_are_some(monkeypatch):
    text, found = help_of(sft.make_parser(), monkeypatch)
    assert text.startswith("usage: trl sft --model_name_or_path MODEL --dataset_name DATASET [options]\n")
    assert found["essential"][:3] == ["model_name_or_path", "dataset_name", "output_dir"]
    assert "  --learning_rate FLOAT\n" in text and "(default: 2e-05)" in text
    assert "  --packing [true|false]\n" in text and "  --loss_type {nll,dft}\n" in text
    assert "  --lr_scheduler_type NAME\n" in text and re.search(r"One of linear,\s+cosine,", text)
    assert (
        "(default: None)" not in text and "--no_" not in text.replace("--no_cuda", "") and "--learning-rate" not in text
    )
