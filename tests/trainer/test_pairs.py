"""Whether completions share their prompt is decided once, by what the model's attention can tell apart."""

import pytest

from tests.tiny import tiny_model
from trl.models.forward import Scorer
from trl.trainer.pairs import shares_prefix


def test_prompts_are_shared_where_the_model_takes_trees():
    scorer = Scorer(tiny_model("llama"))
    assert shares_prefix(scorer, "auto") and shares_prefix(scorer, True)
    assert not shares_prefix(scorer, False)


def test_flash_attention_of_the_users_choice_repeats_prompts(caplog):
    """It finds sequences by positions that restart at 0: a second branch would see the first one."""
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    scorer = Scorer(model)
    assert scorer.flat and not shares_prefix(scorer, "auto")
    assert "Each completion gets a prompt of its own" in caplog.text
    with pytest.raises(
        ValueError, match="cannot take shared prompts: its flash attention tells only plain sequences"
    ):
        shares_prefix(scorer, True)


def test_padded_rows_have_a_prompt_each():
    scorer = Scorer(tiny_model("bloom"))
    assert not shares_prefix(scorer, "auto")
    with pytest.raises(ValueError, match=r"cannot take shared prompts: .*bloom.* Use 'auto'"):
        shares_prefix(scorer, True)
