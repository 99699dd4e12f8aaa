"""What DPOTrainer needs for rows with images: collator, checks before the first step, settings that are refused."""

import pytest
from datasets import Dataset

from tests.collators.test_vision_pairs import GOOD, ROWS
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.tiny_vision import tiny_processor, tiny_vision_model
from trl.collators.images import DataCollatorForVisionPreference
from trl.collators.preference import DPODataCollatorWithPadding, PairCollator
from trl.models.policy import Policy
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.images import image_pair_sets


@pytest.fixture(scope="module")
def processor():
    return tiny_processor("llava")


@pytest.fixture(scope="module")
def model(processor):
    return tiny_vision_model(processor)


def config(folder, **settings):
    return DPOConfig(str(folder), use_cpu=True, bf16=False, **settings)


def sets_of(collator, args, processor, model):
    return image_pair_sets(collator, args, Policy(model, processor, None, None))


def test_the_collator_cuts_as_the_config_says(processor, model, tmp_path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    args = config(tmp_path, max_length=90, max_prompt_length=None, max_completion_length=7, tools=tools)
    collator = sets_of(None, args, processor, model).collator
    assert collator == DataCollatorForVisionPreference(processor, max_length=90, max_completion_length=7, tools=tools)
    assert sets_of(collator, args, processor, model).collator is collator
    assert sets_of(len, args, None, None).collator is len


@pytest.mark.parametrize(
    "settings, says",
    [({"padding_free": True}, "padding_free=False"), ({"prefix_sharing": True}, "prefix_sharing=False")],
)
def test_layouts_without_padding_are_refused(settings, says, processor, model, tmp_path):
    with pytest.raises(ValueError, match=says):
        sets_of(None, config(tmp_path, **settings), processor, model)


def test_collators_and_models_of_text_are_refused(processor, model, tmp_path):
    args = config(tmp_path)
    for given in (PairCollator(), DPODataCollatorWithPadding()):
        with pytest.raises(TypeError, match="drops the images"):
            sets_of(given, args, processor, model)
    with pytest.raises(TypeError, match="expected a processor"):
        sets_of(None, args, tiny_tokenizer(), model)
    with pytest.raises(ValueError, match="takes no images"):
        sets_of(None, args, processor, tiny_model("llama"))


def test_sets_are_checked_and_left_as_they_are(processor, model, tmp_path):
    collator = DataCollatorForVisionPreference(processor, max_length=60)
    sets, data = sets_of(collator, config(tmp_path), processor, model), Dataset.from_list(ROWS)
    assert sets.train(data) is data and sets.evaluation(data) is data and sets.later(data) is data
    assert sets.evaluation({"dev": data}) == {"dev": data} and sets.later(None) is None
    assert collator.rows_cut == 0, "trying the first row does not count"
    bad = Dataset.from_list([GOOD, {**GOOD, "rejected": []}])
    for check, name in ((sets.train, "train"), (sets.evaluation, "eval"), (sets.later, "eval")):
        with pytest.raises(ValueError, match=f"{name} dataset, row 1, column 'rejected': an empty list"):
            check(bad)
    with pytest.raises(ValueError, match="dev dataset, row 1"):
        sets.evaluation({"dev": bad})
    with pytest.raises(TypeError, match="train_dataset must be"):
        sets.train(ROWS)
