"""Prepared rows, counts and refusals of every kind of row and every trainer, compared with a recording.

Record again with `/work/main/.venv/bin/python -m tests.data.test_prepared_rows` (sources on PYTHONPATH).
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from tests.tiny import tiny_classifier, tiny_model, tiny_seq2seq
from tests.tiny_tokenizers import tiny_tokenizer

from trl.data.pipeline import prepare_dataset
from trl.data.preference import PreferencePreparation, RewardPreparation
from trl.data.prompts import PromptPreparation, PromptSets
from trl.data.stepwise import StepwisePreparation
from trl.data.text import SFTPreparation
from trl.data.unpaired import UnpairedPreparation

RECORDED = Path(__file__).with_name("prepared_rows.json")

ASK, SKY = ({"role": "user", "content": text} for text in ("And then?", "What colour is the sky?"))
UP, BLUE = ({"role": "assistant", "content": text} for text in ("Look up.", "It is blue."))
TALK = [SKY, BLUE, ASK, UP]
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
}
LONG = "Q: " + "How many apples? " * 8
TEXT: list[dict] = [{"text": "It is blue."}, {"text": "<s>Look up. " * 6}, {"text": "<s>Next."}]
HALVES = [
    {"prompt": "Q: How many apples?", "completion": " A: 7"},
    {"prompt": LONG, "completion": " A: 12"},
    {"prompt": "It is bl", "completion": "ue. Look up. " * 4},
]
CHAT_HALVES = [{"prompt": [SKY], "completion": [BLUE]}, {"prompt": [SKY, BLUE, ASK], "completion": [UP]}]
PAIRS = [
    {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"},
    {"prompt": LONG, "chosen": " A: 12 pears and seven apples.", "rejected": " A: no"},
    {"prompt": "And then?", "chosen": " Next.", "rejected": " Next."},
    {"prompt": "", "chosen": "Look up.", "rejected": "Next."},
    {"prompt": "It is bl", "chosen": "ue. Look up. " * 4, "rejected": "ack."},
]
CHAT_PAIRS = [
    {"prompt": [SKY], "chosen": [BLUE], "rejected": [UP]},
    {"prompt": [SKY, BLUE, ASK], "chosen": [SKY, BLUE, ASK, UP], "rejected": [SKY, BLUE, ASK, BLUE]},
]
WHOLE_PAIRS = [
    {"chosen": [ASK, UP], "rejected": [ASK, BLUE]},
    {"chosen": [*TALK], "rejected": [SKY, BLUE, ASK, BLUE]},
]
TOKEN_PAIRS = [
    {
        "prompt_input_ids": [10, 11, 12],
        "chosen_input_ids": [20, 2],
        "rejected_input_ids": [30, 31, 2],
        "extra": 1,
    },
    {"prompt_input_ids": [10], "chosen_input_ids": [*range(20, 29)], "rejected_input_ids": [2], "extra": 2},
]
SINGLES = [
    {"prompt": "Q: How many apples are left?", "completion": " A: Seven apples and 12 pears.", "label": True},
    {"prompt": "Q: And then?", "completion": " A: Look up.", "label": False},
    {"prompt": LONG, "completion": " A: It is blue. Be brief.", "label": True},
    {"prompt": "It is bl", "completion": "ue.", "label": False},
    {"prompt": "Q: How many?", "completion": " A: 7", "label": False},
]
CHAT_SINGLES = [{**row, "label": index == 0} for index, row in enumerate(CHAT_HALVES)]
TOKEN_SINGLES = [
    {"prompt_input_ids": [10 + n, 11], "completion_input_ids": [*range(20, 23 + n), 2], "label": n % 2 == 0,
     "reference_logps": -1.5 * n}
    for n in range(5)
]  # fmt: skip
STEPS = [
    {
        "prompt": "How many apples are left?",
        "completions": ["Seven apples.", "And 12 pears."],
        "labels": [True, False],
    },
    {
        "prompt": "And then?",
        "completions": ["Look up.", "It is blue.", "Next."],
        "labels": [True, True, True],
    },
    {"prompt": LONG, "completions": ["Be brief."], "labels": [False]},
]
PROMPTS = [{"prompt": text, "answer": n} for n, text in enumerate(["The sky is", LONG, "And then?", "Q: How many?"])]
CHAT_PROMPTS = [
    {"prompt": [SKY], "chat_template_kwargs": {"other": 1}},
    {"prompt": [SKY, BLUE, ASK], "chat_template_kwargs": {"other": 2}},
]
SHORT = {"max_length": 24, "max_prompt_length": 12}

PREPARE: dict[str, tuple[Any, Any]] = {
    "sft": (prepare_dataset, SFTPreparation),
    "pair": (prepare_dataset, PreferencePreparation),
    "reward": (prepare_dataset, RewardPreparation),
    "single": (prepare_dataset, UnpairedPreparation),
    "steps": (prepare_dataset, StepwisePreparation),
}
FIRST = {
    "prompt_first": {"truncation_order": "prompt_first"},
    "keep_start": {"truncation_mode": "keep_start"},
}

# name -> kind of row, rows, settings, tokenizer
CASES: dict[str, tuple[str, list[dict], dict[str, Any], dict[str, Any]]] = {
    "sft text": ("sft", TEXT, {}, {}),
    "sft text, begin token, cut": ("sft", TEXT, {"max_length": 9}, {"adds_begin": True}),
    "sft text column": ("sft", [{"body": row["text"], "weight": 0.5} for row in TEXT], {"text_field": "body", "keep_columns": ("weight",)}, {}),
    "sft formatted": ("sft", HALVES, {"formatting_func": lambda row: f"{row['prompt']}|{row['completion']}"}, {}),
    "sft halves": ("sft", HALVES, {"max_length": 30}, {}),
    "sft halves dropped": ("sft", HALVES, {"max_length": 30, "untrained_rows": "drop"}, {}),
    "sft halves refused": ("sft", HALVES, {"max_length": 30, "untrained_rows": "error"}, {}),
    "sft halves whole": ("sft", HALVES, {"completion_only_loss": False}, {"adds_begin": True}),
    "sft messages": ("sft", [{"messages": TALK}, {"messages": TALK[:2]}], {}, {}),
    "sft messages in the text column": ("sft", [{"text": TALK}], {}, {}),
    "sft from and value": ("sft", [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}], {}, {}),
    "sft tools": ("sft", [{"messages": TALK, "tools": [LOOK]}, {"messages": TALK, "tools": []}], {}, {"template": "qwen3_like"}),
    "sft assistant only": ("sft", [{"messages": TALK}, {"messages": TALK[:2]}], {"assistant_only_loss": True}, {}),
    "sft assistant only, marked": ("sft", [{"messages": TALK}, {"messages": TALK[:2]}], {"assistant_only_loss": True}, {"template": "marked"}),
    "sft chat halves": ("sft", CHAT_HALVES, {}, {}),
    "sft chat halves, assistant only": ("sft", CHAT_HALVES, {"assistant_only_loss": True}, {}),
    "sft packed": ("sft", HALVES, {"max_length": 80, "packing": True}, {}),
    "sft wrapped": ("sft", HALVES, {"max_length": 50, "packing": True, "packing_strategy": "wrapped"}, {}),
    "sft tokens": ("sft", [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "other": "x"}], {}, {}),
    "sft labels": ("sft", [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}], {"max_length": 2}, {}),
    "sft wrong id": ("sft", [{"input_ids": [5, 999]}], {}, {}),
    "sft short mask": ("sft", [{"input_ids": [5, 6], "completion_mask": [1]}], {}, {}),
    "sft none": ("sft", [TEXT[0], {"text": None}], {}, {}),
    "sft preference": ("sft", PAIRS, {}, {}),
    "sft untrained": ("sft", HALVES[1:2], {"max_length": 4}, {}),
    "pair": ("pair", PAIRS, {}, {}),
    "pair, begin token": ("pair", PAIRS, {}, {"adds_begin": True}),
    "pair cut": ("pair", PAIRS, SHORT, {}),
    **{f"pair cut, {name}": ("pair", PAIRS, {**SHORT, **more}, {}) for name, more in FIRST.items()},
    "pair cut, encoder-decoder": ("pair", PAIRS, {**SHORT, "max_completion_length": 5, "is_encoder_decoder": True}, {"adds_begin": True}),
    "pair refused": ("pair", PAIRS, {"max_length": 4, "untrained_rows": "error"}, {}),
    "pair all cut off": ("pair", PAIRS[:1], {"max_length": 3, "truncation_mode": "keep_start"}, {}),
    "pair implicit": ("pair", [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in PAIRS[:2]], {}, {}),
    "pair implicit, nothing shared": ("pair", [{"chosen": "a b", "rejected": "c d"}], {}, {}),
    "pair chat": ("pair", CHAT_PAIRS, {}, {}),
    "pair whole chats": ("pair", WHOLE_PAIRS, {}, {}),
    "pair tools": ("pair", CHAT_PAIRS, {"tools": [LOOK]}, {"template": "qwen3_like"}),
    "pair tokens": ("pair", TOKEN_PAIRS, {"max_length": 8, "keep_columns": ("extra",)}, {}),
    "pair reference": ("pair", [{**row, "ref_chosen_logps": -1, "ref_rejected_logps": -2.5} for row in PAIRS], {}, {}),
    "pair reference, none": ("pair", [{**PAIRS[0], "ref_chosen_logps": None, "ref_rejected_logps": -2.5}], {}, {}),
    "pair wrong role": ("pair", [{"prompt": [SKY], "chosen": [BLUE], "rejected": [UP, ASK]}], {}, {}),
    "pair of singles": ("pair", SINGLES, {}, {}),
    "reward": ("reward", [{**row, "margin": 0.5} for row in PAIRS], {"max_length": 30}, {}),
    "reward refused": ("reward", PAIRS, {"max_length": 30, "untrained_rows": "error"}, {}),
    "reward chats": ("reward", WHOLE_PAIRS, {}, {}),
    "reward chats and prompt": ("reward", CHAT_PAIRS, {}, {}),
    "reward older tokens": ("reward", [{"input_ids_chosen": [5, 6, 0], "attention_mask_chosen": [1, 1, 0], "input_ids_rejected": [7], "attention_mask_rejected": [1]}], {}, {}),
    "single": ("single", SINGLES, {}, {}),
    "single, mismatched": ("single", SINGLES, {"mismatch_group": 2, "max_length": 30, "max_prompt_length": 12}, {"adds_begin": True}),
    "single cut, keep start": ("single", SINGLES, {**SHORT, "truncation_mode": "keep_start", "mismatch_group": 4}, {}),
    "single cut off": ("single", SINGLES, {"max_length": 12}, {}),
    "single refused": ("single", SINGLES, {"max_length": 12, "untrained_rows": "error"}, {}),
    "single, encoder-decoder": ("single", SINGLES, {"max_prompt_length": 8, "max_completion_length": 4, "is_encoder_decoder": True, "mismatch_group": 2}, {}),
    "single chats": ("single", CHAT_SINGLES, {"mismatch_group": 2, "label_weights": (1.0, 2.0)}, {}),
    "single of pairs": ("single", PAIRS, {"mismatch_group": 4}, {}),
    "single of chat pairs": ("single", CHAT_PAIRS, {}, {}),
    "single tokens": ("single", TOKEN_SINGLES, {"mismatch_group": 2, "max_length": 6}, {}),
    "single embedded": ("single", SINGLES, {"embedding_tokenizer": tiny_tokenizer(adds_begin=True)}, {}),
    "single, text label": ("single", [{**SINGLES[0], "label": "yes"}], {}, {}),
    "steps": ("steps", STEPS, {}, {}),
    "steps cut": ("steps", STEPS, {"max_length": 20, "max_prompt_length": 8, "max_completion_length": 12}, {}),
    "steps last": ("steps", STEPS, {"train_on_last_step_only": True, "step_separator": "\n\n"}, {}),
    "steps dropped": ("steps", STEPS, {"max_length": 20, "untrained_rows": "drop"}, {}),
    "steps refused": ("steps", STEPS, {"max_length": 20, "untrained_rows": "error"}, {}),
    "steps tokens": ("steps", [{"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}, {"input_ids": [5], "labels": [1]}], {"max_length": 2}, {}),
    "steps, labels missing": ("steps", [{**STEPS[0], "labels": [True]}], {}, {}),
    "prompts": ("prompts", PROMPTS, {}, {"adds_begin": True}),
    "prompts kept": ("prompts", PROMPTS, {"keep": 6}, {}),
    "prompts too long": ("prompts", PROMPTS, {"longest": 20}, {}),
    "prompts chats": ("prompts", CHAT_PROMPTS, {"template_kwargs": {"enable_thinking": False}}, {}),
    "prompts tools": ("prompts", [{"prompt": [SKY]}], {"tools": [LOOK]}, {"template": "qwen3_like"}),
    "prompts tokens": ("prompts", [{"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "answer": "x"}], {}, {}),
    "prompts wrong id": ("prompts", [{"input_ids": [5, 999]}], {"vocabulary": 400}, {}),
}  # fmt: skip


def test_one_function_prepares_rows_of_every_kind() -> None:
    assert {prepare for prepare, _ in PREPARE.values()} == {prepare_dataset}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def rows_of(dataset: Any) -> dict[str, Any]:
    """Columns with their types, and the rows: the first one written out, all in a digest."""
    features = dataset.features
    rows = list(dataset.with_format(None))
    columns = sorted(rows[0]) if features is None else {name: str(kind) for name, kind in features.items()}
    return {"columns": columns, "rows": len(rows), "first": digest(rows[0]), "all": digest(rows)}


def counts_of(report: Any) -> dict[str, int]:
    """The counts that are not 0."""
    counts = {field.name: getattr(report, field.name) for field in fields(report) if field.type is int}
    return {name: count for name, count in sorted(counts.items()) if count}


def refusal(error: Exception) -> list[str]:
    """The type of an error and the row and column that it names."""
    words = str(error).partition(":")[0].partition(", has columns")[0]
    return [type(error).__name__, words]


def prepared(name: str, *, streaming: bool) -> dict[str, Any]:
    kind, rows, settings, tokenizer = CASES[name]
    dataset: Any = Dataset.from_list(rows)
    words = tiny_tokenizer(**tokenizer)
    if kind == "prompts":
        length = settings.get("longest")
        sets = PromptSets(words, PromptPreparation(**settings), context_length=length and length + 1, room=("", None))
        return rows_of(sets.prepared(dataset, "train"))
    prepare, preparation = PREPARE[kind]
    found, report = prepare(dataset.to_iterable_dataset() if streaming else dataset, words, preparation(**settings))
    return {**rows_of(found), "counts": counts_of(report)}


def outcome(name: str, *, streaming: bool = False) -> Any:
    try:
        return prepared(name, streaming=streaming)
    except (ValueError, TypeError) as error:
        return refusal(error)


# ---- through the trainers


def image_rows(**columns: Any) -> Dataset:
    from tests.tiny_vision import tiny_image

    images = [[tiny_image(1)], [tiny_image(2)]]
    features = Features({"images": List(Image()), **dict.fromkeys(columns, Value("string"))})
    return Dataset.from_dict({"images": images, **columns}, features=features)


def trainers() -> dict[str, Any]:
    """Name -> trainer class, config class, model, rows to train on, arguments of the config, further arguments."""
    from tests.tiny_vision import tiny_processor, tiny_vision_model

    import trl
    from trl.trainer.bco_config import BCOConfig
    from trl.trainer.bco_trainer import BCOTrainer

    def model(**fields: Any) -> Any:
        return tiny_model("llama", vocab_size=400, **fields)

    reward = {"reward_funcs": lambda completion_ids, **_: [0.0] * len(completion_ids)}
    group = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4}
    classifier = {"vocab_size": 400, "pad_token_id": 0}
    processor = tiny_processor()
    vision = {"processing_class": processor}

    def vision_model() -> Any:
        return tiny_vision_model(processor)

    image_text = {"prompt": ["<image>What?", "<image>And then?"], "completion": [" Blue.", " Up."]}
    return {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, model, HALVES, {"max_length": 40}, {}),
        "SFT packed": (trl.SFTTrainer, trl.SFTConfig, model, TEXT, {"max_length": 60, "packing": True, "eval_packing": False}, {}),
        "SFT shuffled chats": (trl.SFTTrainer, trl.SFTConfig, model, [{"messages": TALK}, {"messages": TALK[:2]}],
                               {"assistant_only_loss": True, "shuffle_dataset": True}, {}),
        "SFT images": (trl.SFTTrainer, trl.SFTConfig, vision_model, image_rows(**image_text), {}, vision),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, model, PAIRS, SHORT, {}),
        "CPO": (trl.CPOTrainer, trl.CPOConfig, model, PAIRS, SHORT, {}),
        "ORPO": (trl.ORPOTrainer, trl.ORPOConfig, model, PAIRS, SHORT, {}),
        "ORPO encoder-decoder": (trl.ORPOTrainer, trl.ORPOConfig, lambda: tiny_seq2seq("t5", vocab_size=400), PAIRS,
                                 {**SHORT, "max_completion_length": 6}, {}),
        "KTO": (trl.KTOTrainer, trl.KTOConfig, model, SINGLES, {**SHORT, "per_device_train_batch_size": 2}, {}),
        "BCO": (BCOTrainer, BCOConfig, model, SINGLES, SHORT, {}),
        "Reward": (trl.RewardTrainer, trl.RewardConfig, lambda: tiny_classifier("llama", num_labels=1, **classifier), PAIRS,
                   {"max_length": 60}, {}),
        "PRM": (trl.PRMTrainer, trl.PRMConfig, lambda: tiny_classifier("qwen2", num_labels=2, of_tokens=True, **classifier),
                STEPS, {"max_length": 40, "train_on_last_step_only": True}, {}),
        "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, model, PROMPTS, group, reward),
        "GRPO images": (trl.GRPOTrainer, trl.GRPOConfig, vision_model, image_rows(prompt=image_text["prompt"]), group,
                        {**reward, **vision}),
        "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, model, CHAT_PROMPTS, group, reward),
    }  # fmt: skip


def through_trainer(name: str) -> dict[str, Any]:
    """The prepared training rows and those of two evaluation sets by name."""
    trainer_class, config, model, rows, settings, arguments = trainers()[name]
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    with tempfile.TemporaryDirectory() as folder:
        args = config(folder, report_to="none", use_cpu=True, bf16=False, **settings)
        trainer = trainer_class(
            model=model(),
            args=args,
            train_dataset=dataset,
            eval_dataset={"one": dataset, "two": dataset.select([0])},
            **{"processing_class": tiny_tokenizer(), **arguments},
        )
    sets = {"train": trainer.train_dataset, **trainer.eval_dataset}
    return {name: rows_of(_without_images(part)) for name, part in sets.items()}


def _without_images(dataset: Dataset) -> Dataset:
    return dataset.select_columns([name for name in dataset.column_names if name != "images"])


TRAINERS = tuple(trainers())


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Any]]:
    yield json.loads(RECORDED.read_text())


@pytest.mark.parametrize("name", CASES)
def test_rows_counts_and_refusals_are_the_recorded_ones(name: str, recorded: dict[str, Any]) -> None:
    assert json.loads(json.dumps(outcome(name))) == recorded["rows"][name]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] != "prompts"])
def test_streams_are_as_recorded(name: str, recorded: dict[str, Any]) -> None:
    found = json.loads(json.dumps(outcome(name, streaming=True)))
    assert found == recorded["streams"].get(name, recorded["rows"][name])


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_prepare_the_recorded_rows(name: str, recorded: dict[str, Any]) -> None:
    assert json.loads(json.dumps(through_trainer(name))) == recorded["trainers"][name]


def main() -> None:
    rows = {name: outcome(name) for name in CASES}
    streams = {name: outcome(name, streaming=True) for name, case in CASES.items() if case[0] != "prompts"}
    found = {
        "rows": rows,
        "streams": {name: found for name, found in streams.items() if found != rows[name]},
        "trainers": {name: through_trainer(name) for name in TRAINERS},
    }
    lines = [
        f"{json.dumps(part)}: {{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in each.items()) + "\n}"
        for part, each in found.items()
    ]  # fmt: skip
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
