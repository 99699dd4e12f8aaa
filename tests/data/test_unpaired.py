"""Unpaired preferences: token rows, mismatched completions, truncation, and what is refused."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.golden.runs import Assets
from tests.tiny_tokenizers import tiny_tokenizer
from torch import Tensor

from trl.data.formats import maybe_extract_prompt, maybe_unpair_preference_dataset
from trl.data.pipeline import prepare_dataset
from trl.data.unpaired import UnpairedPreparation
from trl.objectives.unpaired import UnpairedScores, bco_terms, kto_terms
from trl.tensors.reduce import count_units, reduce_terms

TEXT: list[dict[str, Any]] = [
    {"prompt": "Q: How many apples are left?", "completion": " A: Seven apples and 12 pears.", "label": True},
    {"prompt": "Q: And then?", "completion": " A: Look up.", "label": False},
    {"prompt": "Q: What colour is the sky?", "completion": " A: It is blue. Be brief.", "label": True},
    {"prompt": "Q: And then?", "completion": " A: Next.", "label": True},
    {"prompt": "Q: How many?", "completion": " A: 7", "label": False},
]
SKY = {"role": "user", "content": "What colour is the sky?"}
BLUE, GREY = ({"role": "assistant", "content": text} for text in ("It is blue.", "Look up."))
CHAT = [{"prompt": [SKY], "completion": [answer], "label": answer is BLUE} for answer in (BLUE, GREY)]
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" A: {number}"}
    for number, row in enumerate(TEXT)
]


def prepare(rows: list[dict], *, streaming: bool = False, template: str = "chatml", **settings: Any) -> Any:
    dataset: Any = Dataset.from_list(rows)
    if streaming:
        dataset = dataset.to_iterable_dataset()
    return prepare_dataset(dataset, tiny_tokenizer(template), UnpairedPreparation(**settings))


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


EOS = ids("<|im_end|>")


def test_rows_are_prompt_completion_with_its_eos_and_label() -> None:
    rows, report = prepare(TEXT)
    assert rows.column_names == ["prompt_input_ids", "completion_input_ids", "label"]
    for row, given in zip(rows, TEXT, strict=True):
        assert row["prompt_input_ids"] == ids(given["prompt"])
        assert row["completion_input_ids"] == ids(given["completion"]) + EOS
        assert row["label"] is given["label"]
    assert (report.rows, report.desirable_rows, report.undesirable_rows) == (5, 3, 2)
    assert report.summary() == f"train dataset: 5 rows, {report.tokens} tokens, 3 desirable rows, 2 undesirable rows"


def test_pairs_are_taken_apart_in_turn() -> None:
    rows, report = prepare(PAIRS)
    apart = [{"prompt": p["prompt"], "completion": p[side], "label": side == "chosen"}
             for p in PAIRS for side in ("chosen", "rejected")]  # fmt: skip
    assert list(rows) == list(prepare(apart)[0])
    assert (report.rows, report.desirable_rows) == (10, 5)
    implicit = [{side: p["prompt"] + p[side] for side in ("chosen", "rejected")} for p in PAIRS]
    texts = [tiny_tokenizer().decode(r["prompt_input_ids"] + r["completion_input_ids"]) for r in prepare(implicit)[0]]  # fmt: skip
    assert texts == [tiny_tokenizer().decode(r["prompt_input_ids"] + r["completion_input_ids"]) for r in rows]
    chats = [{"chosen": [SKY, BLUE], "rejected": [SKY, GREY]}]
    assert prepare(chats)[0][:] == prepare(CHAT)[0][:]


def test_rows_of_pairs_do_not_depend_on_streaming_or_processes() -> None:
    pairs = [{"prompt": "Q:", "chosen": f" {n}", "rejected": f" -{n}"} for n in range(1200)]
    stored, _ = prepare(pairs, mismatch_group=4)
    assert stored["label"][:] == [True, False] * 1200
    assert list(prepare(pairs, mismatch_group=4, streaming=True)[0]) == [
        {**row, "KL_prompt_input_ids": None} for row in stored
    ]
    assert prepare(pairs, mismatch_group=4, num_proc=2)[0][:] == stored[:]


@pytest.mark.parametrize("group", [4, 5, 6])
def test_mismatched_completions_of_pairs_come_from_other_pairs(group: int, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [{"prompt": f"{n}:", "chosen": f" {n}", "rejected": f" -{n}"} for n in range(30)]
    rows, _ = prepare(pairs, mismatch_group=group)
    own = rows["completion_input_ids"][:]
    for row, mismatched in enumerate(rows["KL_completion_input_ids"]):
        other = own.index(mismatched)
        assert other // group == row // group and other // 2 != row // 2
    assert "too few pairs" not in caplog.text
    prepare(pairs, mismatch_group=2)
    assert "steps of 2 rows have too few pairs" in caplog.text


def test_mismatched_completions_come_from_the_row_before_in_the_batch() -> None:
    rows, _ = prepare(TEXT[:4] * 300, mismatch_group=3)
    completions = rows["completion_input_ids"][:]
    for start in range(0, 1200, 3):
        own = completions[start : start + 3]
        assert rows["KL_completion_input_ids"][start : start + 3] == [own[2], own[0], own[1]]
    assert "KL_prompt_input_ids" not in rows.column_names


def test_a_row_that_is_alone_in_its_batch_gets_its_own_completion(caplog: pytest.LogCaptureFixture) -> None:
    prepare(TEXT[:4], mismatch_group=4)
    assert "alone in its step" not in caplog.text
    rows, _ = prepare(TEXT, mismatch_group=4)
    assert rows[4]["KL_completion_input_ids"] == rows[4]["completion_input_ids"]
    assert "the last row is alone in its step of 4" in caplog.text


def cut(prompt: list[int], completion: list[int], limit: int, prompt_limit: int, mode: str) -> tuple:
    """The rule in words: only rows that are too long lose prompt, then completion; two places are kept for marks."""
    room = limit - 2
    content = completion[:-1]
    if len(prompt) + len(content) > room:
        prompt = prompt[:prompt_limit] if mode == "keep_start" else prompt[-prompt_limit:]
    if len(prompt) + len(content) > room:
        content = content[: room - prompt_limit]
    return prompt, content + completion[-1:]


@pytest.mark.parametrize("mode", ["keep_end", "keep_start"])
def test_truncation(mode: str) -> None:
    limits = {"max_length": 17, "max_prompt_length": 5, "truncation_mode": mode}
    whole, _ = prepare(TEXT)
    rows, report = prepare(TEXT, mismatch_group=5, **limits)
    before, removed = whole[-1]["completion_input_ids"], 0
    for row, given in zip(rows, whole, strict=True):
        prompt, completion = given["prompt_input_ids"], given["completion_input_ids"]
        found = (row["prompt_input_ids"], row["completion_input_ids"])
        assert found == cut(prompt, completion, 17, 5, mode)
        own = row["KL_prompt_input_ids"] or row["prompt_input_ids"]
        assert (own, row["KL_completion_input_ids"]) == cut(prompt, before, 17, 5, mode)
        before = completion
        removed += len(prompt) + len(completion) - sum(map(len, found))
        assert sum(map(len, found)) <= 17
    assert report.removed_tokens == removed > 0
    assert any(row["KL_prompt_input_ids"] is not None for row in rows)
    assert any(row["KL_prompt_input_ids"] is None for row in rows)


def test_prepared_rows_are_prepared_to_themselves() -> None:
    for limits in ({}, {"max_length": 14, "max_prompt_length": 5}):
        once, _ = prepare(TEXT, mismatch_group=5, **limits)
        assert prepare(list(once), mismatch_group=5, **limits)[0][:] == once[:]


def test_rows_that_lose_their_completion_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    limit = len(ids(TEXT[1]["prompt"])) + 3
    rows, report = prepare(TEXT, max_length=limit)
    assert (len(rows), report.dropped_rows, report.rows) == (3, 2, 5)
    assert "in 2 of 5 rows (first: [0, 2]) no trained token is left" in caplog.text
    with pytest.raises(ValueError, match="row 0, column 'completion_input_ids': the prompt fills max_length"):
        prepare(TEXT, max_length=limit, untrained_rows="error")
    with pytest.raises(ValueError, match=r"Set or lower max_prompt_length.* All 5 rows are like"):
        prepare(TEXT, max_length=5)


def test_reference_numbers_are_kept_to_the_bit() -> None:
    given = [{**row, "reference_logps": -1 / 3, "reference_KL_logps": -2 / 7, "other": 1} for row in TEXT]
    rows, _ = prepare(given, mismatch_group=5)
    assert rows["reference_logps"][:] == [-1 / 3] * 5
    assert rows["reference_KL_logps"][:] == [-2 / 7] * 5
    assert "other" not in rows.column_names


def test_tokens_of_older_programs_are_refused() -> None:
    row = {"prompt_input_ids": [5], "completion_input_ids": [5, 6], "completion_labels": [-100, 6], "label": True}
    with pytest.raises(ValueError, match="has 'completion_labels': tokens as older programs made them"):
        prepare([row])


def test_one_kind_of_rows_is_trained_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    prepare([row for row in TEXT if row["label"]])
    assert "all 3 rows are desirable (label true)" in caplog.text
    prepare([row for row in TEXT if not row["label"]])
    assert "all 2 rows are undesirable (label false)" in caplog.text


def test_weights_that_do_not_make_up_for_the_numbers_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    for weights in ((1.0, 1.5), (2 / 3, 1.0), (8 / 9, 1.0)):
        prepare(TEXT, label_weights=weights)
    rows = Dataset.from_list(TEXT)
    prepare_dataset(rows, tiny_tokenizer(), UnpairedPreparation(label_weights=(1.0, 1.0)), name="eval")  # of no loss
    assert not caplog.text
    prepare(TEXT, label_weights=(1.0, 1.0))  # 3 rows to 2
    assert "Set desirable_weight to 0.6667 to 0.8889, or undesirable_weight to 1.125 to 1.5." in caplog.text
    assert "3 desirable rows of weight 1 and 2 undesirable ones of weight 1" in caplog.text


# The first optimiser step of the recorded runs whose pairs are taken apart: data set and what was logged.
RECORDED: dict[str, tuple[str, dict[str, float]]] = {
    "kto/paired_text": ("pref_text", {"loss": 0.52325475, "kl": 1.6563148, "logps/chosen": -144.83023}),
    "kto/paired_implicit_chat": ("pref_implicit_chat", {"loss": 0.5698148, "kl": 0.0, "logps/chosen": -138.66307}),
    "bco/paired_text": ("pref_text", {"loss": 0.69606829, "delta": 0.071960449}),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_first_steps_of_the_recorded_runs(case: str) -> None:
    assets = Assets()
    name, want = RECORDED[case]
    settings = UnpairedPreparation(max_length=1024, max_prompt_length=512, mismatch_group=4)
    tokenizer = assets.tokenizer("tok")
    dataset = Dataset.from_list(assets.rows(name, 6))
    # the reference takes pairs apart in blocks: all chosen completions, then all rejected ones
    dataset = maybe_unpair_preference_dataset(dataset.map(maybe_extract_prompt))
    rows = list(prepare_dataset(dataset, tokenizer, settings)[0])[:4]
    models = [assets.model("causal", part).double().eval() for part in ("lm", "ref")]

    def logps(model: Any, kind: str) -> Tensor:
        found = []
        for row in rows:
            prompt = row.get("KL_prompt_input_ids") if kind == "KL_" else None
            prompt, completion = prompt or row["prompt_input_ids"], row[f"{kind}completion_input_ids"]
            if case.endswith("chat"):  # the reference closes chats again
                completion = [*completion, tokenizer.eos_token_id]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum())
        return torch.stack(found)

    scores = UnpairedScores(*(logps(m, "") for m in models), torch.tensor([row["label"] for row in rows]))
    if case.startswith("kto"):
        policy, reference = (logps(m, "KL_") for m in models)
        terms = kto_terms(scores, kl=(policy - reference).mean().clamp(min=0))
    else:
        terms = bco_terms(scores, beta=0.1, delta=0.1 * scores.ratios.mean())
    found = {key: float(value.mean) for key, value in terms.metrics.items()}
    found["loss"] = float(reduce_terms(terms, count_units(terms)))
    assert {key: found[key] for key in want} == pytest.approx(want, rel=2e-5, abs=2e-6)
