"""Preference pairs with images as batches: order, what is scored, what is cut, what is refused."""

import logging
import re

import pytest
import torch
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from tests.tiny_vision import FAMILIES, PLACEHOLDERS, tiny_image, tiny_processor, tiny_vision_model

from trl.collators.images import DataCollatorForVisionLanguageModeling, DataCollatorForVisionPreference
from trl.data.image_rows import check_image_rows
from trl.models.scoring.causal import Scorer
from trl.tensors.sequences import sum_by_sequence

ASK = {"role": "user", "content": "What colour is the sky?"}
BLUE = {"role": "assistant", "content": "It is blue."}
GREY = {"role": "assistant", "content": "Grey, as far as I can see."}
PART = {"type": "image"}
OF_IMAGES = {"pixel_values", "pixel_attention_mask", "image_grid_thw"}
TURN = "<|im_end|>\n"


def pair(seeds, prompt=(ASK,), chosen=(BLUE,), rejected=(GREY,)):
    images = [tiny_image(seed) for seed in seeds]
    return {"images": images, "prompt": list(prompt), "chosen": list(chosen), "rejected": list(rejected)}


ROWS = [pair([0]), pair([], chosen=[GREY], rejected=[BLUE]), pair([1, 2], rejected=[BLUE, ASK, GREY])]


def check(data, processor, name):
    check_image_rows(data, DataCollatorForVisionPreference(processor).rows, name=name)


@pytest.fixture(scope="module")
def llava():
    return tiny_processor("llava")


def scored_texts(processor, batch):
    return [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---- what is scored


@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_and_rejected_follow_each_other_and_completions_are_scored(family):
    processor = tiny_processor(family)
    reference = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}
    batch = DataCollatorForVisionPreference(processor, pad_to_multiple_of=64)([{**row, **reference} for row in ROWS])
    assert batch["input_ids"].shape[1] % 64 == 0 and batch["ref_logps"].tolist() == [-1.5, -2.5] * 3
    blue, grey = BLUE["content"] + TURN, GREY["content"] + TURN
    longer = f"{blue}<|im_start|>user\n{ASK['content']}{TURN}<|im_start|>assistant\n{grey}"
    assert scored_texts(processor, batch) == [blue, grey, grey, blue, blue, longer]
    lengths = [len(processor.tokenizer(text)["input_ids"]) for text in (blue, grey, grey, blue, blue, longer)]
    assert (batch["labels"] != -100).sum(dim=1).tolist() == lengths
    assert batch["rows"].tolist() == [0, 1, 2]
    is_image = torch.isin(batch["input_ids"], torch.tensor(processor.image_token_ids))
    per_image = 1 if family == "idefics3" else 4
    assert is_image.sum(dim=1).tolist() == [n * per_image for n in (1, 1, 0, 0, 2, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sequence_scores_as_it_does_alone(family):
    processor = tiny_processor(family)
    model = tiny_vision_model(processor, family)
    scorer = Scorer(model)

    def score(batch):
        scored = scorer.score(model, batch)
        return sum_by_sequence(scored.logps, scored.positions.sequence, len(batch["input_ids"]))

    found = score(DataCollatorForVisionPreference(processor)(ROWS))
    alone = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    expected = [
        score(alone([{"images": row["images"], "prompt": row["prompt"], "completion": row[side]}]))
        for row in ROWS
        for side in ("chosen", "rejected")
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=2e-5)


def test_both_sides_are_given_the_images_of_their_row(llava):
    batch = DataCollatorForVisionPreference(llava)(ROWS)
    seen = [llava.image_processor(tiny_image(seed), return_tensors="pt")["pixel_values"] for seed in (0, 0, 1, 2, 1, 2)]  # fmt: skip
    assert torch.equal(batch["pixel_values"], torch.cat(seen))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_both_begin_with_is_found(family):
    collate = DataCollatorForVisionPreference(tiny_processor(family))
    row = pair([0])
    whole = {
        "images": row["images"],
        **{side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")},
    }
    same(collate([whole]), collate([row]))
    same(collate([{**whole, "prompt": row["prompt"]}]), collate([row]))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_holds_the_placeholder_and_gets_an_eos_token(family):
    processor, mark = tiny_processor(family), PLACEHOLDERS[family]
    collate = DataCollatorForVisionPreference(processor)
    explicit = {
        "image": tiny_image(),
        "prompt": f"{mark}The sky is",
        "chosen": " blue.",
        "rejected": " grey today.",
    }
    batch = collate([explicit])
    assert scored_texts(processor, batch) == [" blue.<|im_end|>", " grey today.<|im_end|>"]
    whole = {side: explicit["prompt"] + explicit[side] for side in ("chosen", "rejected")}
    same(collate([{"image": tiny_image(), **whole}]), batch)


def test_images_stand_where_the_messages_say(llava):
    content = [{"type": "text", "text": "Of "}, PART, {"type": "text", "text": " and "}, PART]
    batch = DataCollatorForVisionPreference(llava)([pair([0, 1], prompt=[{**ASK, "content": content}])])
    texts = [llava.tokenizer.decode(ids) for ids in batch["input_ids"]]
    assert all("Of " + "<image>" * 4 + " and " + "<image>" * 4 in text for text in texts)


def test_tools_and_template_variables_reach_the_template():
    processor = tiny_processor("llava")
    processor.chat_template = "{{ tools | length if tools else 0 }}{{ tone }}" + processor.chat_template  # type: ignore[operator]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    row = {**pair([0]), "tools": [tool], "chat_template_kwargs": {"tone": "kind"}}

    def starts(row, **settings):
        batch = DataCollatorForVisionPreference(processor, **settings)([row])
        return [processor.tokenizer.decode(ids).split("<|im_start|>")[0] for ids in batch["input_ids"]]

    assert starts(row) == ["1kind"] * 2
    assert starts(row, tools=[tool, tool]) == ["2kind"] * 2
    assert starts(pair([0])) == ["0"] * 2


# ---- lengths


def cut_by_hand(whole, index, *, prompt=None, completion=None, total=None):
    """The tokens of a sequence under the limits."""
    ids = whole["input_ids"][index][whole["attention_mask"][index] == 1].tolist()
    start = int((whole["labels"][index] != -100).nonzero()[0])
    head = ids[:start] if prompt is None else ids[:start][-prompt:]
    return (head + ids[start:][:completion])[:total], min(len(head), total or len(head))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "prompt, completion, total", [(None, None, 35), (None, 3, None), (20, None, None), (20, 8, 26)]
)
def test_prompts_lose_their_start_and_completions_their_end(family, prompt, completion, total):
    processor = tiny_processor(family)
    question = {**ASK, "content": [{"type": "text", "text": "What is the colour of the sky?"}, PART]}
    rows = [pair([0], prompt=[question]), pair([], rejected=[BLUE, ASK, GREY])]
    whole = DataCollatorForVisionPreference(processor)(rows)
    collate = DataCollatorForVisionPreference(
        processor, max_prompt_length=prompt, max_completion_length=completion, max_length=total
    )
    batch = collate(rows)
    for name in set(batch) & OF_IMAGES:
        assert torch.equal(batch[name], whole[name]), name
    changed = 0
    for index in range(4):
        expected, start = cut_by_hand(whole, index, prompt=prompt, completion=completion, total=total)
        real = batch["attention_mask"][index] == 1
        assert batch["input_ids"][index][real].tolist() == expected
        assert real[: len(expected)].all() and not real[len(expected) :].any(), "padded on the right"
        assert batch["labels"][index][real].tolist() == [-100] * start + expected[start:]
        assert (batch["labels"][index][~real] == -100).all()
        assert (batch["input_ids"][index][~real] == processor.tokenizer.pad_token_id).all()
        changed += len(expected) < int(whole["attention_mask"][index].sum())
    assert collate.rows_cut == changed >= 1
    for name in {"mm_token_type_ids", "token_type_ids"} & set(batch):
        is_image = torch.isin(batch["input_ids"], torch.tensor(processor.image_token_ids))
        assert torch.equal(batch[name] != 0, is_image), name


@pytest.mark.parametrize("setting", ["max_prompt_length", "max_length"])
def test_an_image_loses_no_token(setting, llava):
    rows = [pair([]), pair([0])]
    with pytest.raises(ValueError, match=rf"row 1 of the batch, column 'chosen': .*{setting}=6"):
        DataCollatorForVisionPreference(llava, **{setting: 6})(rows)


def test_a_completion_of_which_nothing_is_left_is_refused(llava):
    row = pair([0])
    whole = DataCollatorForVisionPreference(llava)([row])
    start = int((whole["labels"][0] != -100).nonzero()[0])
    with pytest.raises(ValueError, match=rf"row 0 of the batch, column 'chosen': .*max_length={start}"):
        DataCollatorForVisionPreference(llava, max_length=start)([row])
    assert (DataCollatorForVisionPreference(llava, max_length=start + 1)([row])["labels"] != -100).sum() == 2


# ---- bad input

IMAGE = tiny_image()
GOOD = pair([0])
BAD = {
    "None for a list": ({"images": None}, ValueError, "column 'images': None, expected a list of images"),
    "an image too many": ({"prompt": [{**ASK, "content": [PART]}], "images": [IMAGE, IMAGE]}, ValueError, "column 'images': 2 images for 1"),
    "a place in one answer": ({"prompt": [{**ASK, "content": [PART]}], "rejected": [{**BLUE, "content": [PART]}]}, ValueError, "column 'images': 1 images for 2"),
    "a placeholder in an answer": ({"rejected": [{**BLUE, "content": "A <image>"}]}, ValueError, "column 'rejected': 1 images for 2 placeholders '<image>'"),
    "an unknown role": ({"chosen": [{**BLUE, "role": "assistent"}]}, ValueError, "column 'chosen', message 0: unknown role"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused(name, llava):
    changed, error, says = BAD[name]
    with pytest.raises(error, match="row 1 of the batch, " + re.escape(says)):
        DataCollatorForVisionPreference(llava)([GOOD, {**GOOD, **changed}])


@pytest.mark.parametrize("name", ["an image too many", "a placeholder in an answer", "an unknown role"])
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_of_a_data_set_are_named_before_the_first_step(name, streaming, llava):
    changed, error, says = BAD[name]
    base = {**GOOD, "prompt": [{**ASK, "content": [PART]}]} if name == "an image too many" else GOOD
    rows = [base] * 60 + [{**base, **changed}]
    data = IterableDataset.from_generator(lambda: iter(rows)) if streaming else Dataset.from_list(rows)
    with pytest.raises(error, match="dev dataset, row 60, " + re.escape(says)):
        check(data, llava, name="dev")


def test_late_rows_and_missing_files_are_found_too(llava):
    features = Features({"images": List(Image()), "chosen": Value("string"), "rejected": Value("string")})
    cells = [[{"bytes": None, "path": "no/cat.png"}] if row == 99 else [] for row in range(100)]
    texts = {"chosen": ["The sky is blue."] * 100, "rejected": ["The sky is grey."] * 100}
    data = Dataset.from_dict({"images": cells, **texts}, features=features)
    with pytest.raises(FileNotFoundError, match=r"train dataset, row 99, column 'images': there is no file 'no/cat.png'"):  # fmt: skip
        check(data, llava, name="train")
    placed = Dataset.from_dict({"images": [[]] * 99 + [[IMAGE]], **texts}, features=features)
    with pytest.raises(ValueError, match="row 99, column 'images': 1 images for 0 placeholders"):
        check(placed, llava, name="train")


def test_pairs_that_share_no_prompt_and_other_types_of_rows_are_refused(llava):
    with pytest.raises(ValueError, match=r"row 0, column 'chosen': .*begin differently"):
        check(Dataset.from_list([{"images": [], "chosen": "Blue.", "rejected": "Grey."}]), llava, name="train")
    with pytest.raises(ValueError, match="chosen"):
        check(Dataset.from_list([{"images": [], "text": "Blue."}]), llava, name="train")
    tokens = {"images": [], "prompt_input_ids": [1], "chosen_input_ids": [2], "rejected_input_ids": [3]}
    with pytest.raises(ValueError, match="tokens beside images"):
        check(Dataset.from_list([tokens]), llava, name="train")
    with pytest.raises(ValueError, match="no rows"):
        check(Dataset.from_list(ROWS).select([]), llava, name="train")


def test_equal_completions_are_counted(llava, caplog):
    rows = [GOOD, {**GOOD, "rejected": [BLUE]}, {**GOOD, "rejected": [BLUE]}]
    with caplog.at_level(logging.WARNING):
        check(Dataset.from_list(rows), llava, name="train")
    assert "in 2 of the rows 'chosen' equals 'rejected'" in caplog.text


def test_bad_settings_are_refused(llava):
    for name in ("max_prompt_length", "max_completion_length", "max_length", "pad_to_multiple_of"):
        with pytest.raises(ValueError, match=f"{name} must be .* got 0"):
            DataCollatorForVisionPreference(llava, **{name: 0})
    with pytest.raises(TypeError, match="processor must have an image_processor"):
        DataCollatorForVisionPreference(llava.tokenizer)
    with pytest.raises(ValueError, match="at least 1 row"):
        DataCollatorForVisionPreference(llava)([])
