"""Whether completions share their prompt is decided once, by what the model's attention can tell apart."""

import logging

import pytest
from datasets import Dataset

from tests.tiny import tiny_model
from tests.trainer import dpo_runs
from tests.trainer.preference_methods import METHODS
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scorer

PROMPT, ANSWER = [3, 4, 5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("name", ["cpo-sigmoid", "kto"])
def test_a_default_prompt_limit_leaves_completions_room(name, caplog):
    """Prompts of 7 tokens, completions of 6: max_length 10 cuts prompts to 5, where 512 would leave no completion."""
    make, settings = METHODS[name]
    if name in ("kto", "bco"):  # which keep two places for marks
        columns, room = ["prompt_input_ids", "completion_input_ids"], 3
        made = [{**dict(zip(columns, (PROMPT, ANSWER), strict=True)), "label": good} for good in (True, False)]
    else:
        columns, room = ["prompt_input_ids", "chosen_input_ids", "rejected_input_ids"], 5
        made = [dict(zip(columns, (PROMPT, ANSWER, ANSWER[1:]), strict=True))] * 2
    with caplog.at_level(logging.INFO, logger="trl"):
        trainer = make(**settings, train_dataset=Dataset.from_list(made * 4), max_length=10)
    assert trainer.args.max_prompt_length == 512
    row = trainer.train_dataset[0]
    assert (row[columns[0]], row[columns[1]]) == (PROMPT[-5:], ANSWER[:room])
    assert "truncated" in caplog.text
    assert trainer.train().global_step == 1


def test_a_default_prompt_limit_is_no_error_of_dpo():
    pair = {"prompt_input_ids": PROMPT, "chosen_input_ids": ANSWER, "rejected_input_ids": ANSWER[1:]}
    long = {**pair, "prompt_input_ids": PROMPT * 2}
    given = {"train_dataset": Dataset.from_list([pair, long] * 4), "max_length": 10}
    trainer = dpo_runs.make(**given, truncation_mode="keep_start")
    assert trainer.train_dataset["prompt_input_ids"] == [PROMPT] * 4  # of the others no completion is left
    assert trainer.train_dataset["chosen_input_ids"] == [ANSWER[:3]] * 4


def test_prompts_are_shared_if_the_model_supports_it():
    scorer = Scorer(tiny_model("llama"))
    assert shares_prefix(scorer, "auto") and shares_prefix(scorer, True)
    assert not shares_prefix(scorer, False)


def test_flash_attention_of_the_users_choice_repeats_prompts(caplog):
    """It finds sequences by positions that restart at 0: a second branch would see the first one."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    scorer = Scorer(model)
    assert scorer.packed and not shares_prefix(scorer, "auto")
    assert "prefix sharing is disabled" in caplog.text
    with pytest.raises(ValueError, match="cannot share prompts: its flash attention only separates"):
        shares_prefix(scorer, True)


def test_padded_rows_have_a_prompt_each():
    scorer = Scorer(tiny_model("bloom"))
    assert not shares_prefix(scorer, "auto")
    with pytest.raises(ValueError, match=r"prefix_sharing=True.*BloomModel"):
        shares_prefix(scorer, True)
