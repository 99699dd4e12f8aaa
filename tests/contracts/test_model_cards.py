"""The card of every trainer names the method's paper, with its citation."""

import importlib
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest

from trl._names import NAMES, places
from trl.reporting.model_card import card_of_run

WITHOUT_PAPER = {"BaseTrainer", "PreferenceTrainer", "SFTTrainer", "RewardTrainer", "IterativeSFTTrainer"}


def trainers() -> dict[str, Any]:
    """Every class with a model card, by its name and module."""
    values = [
        getattr(importlib.import_module(module), name)
        for module in NAMES
        for name in places(module)
        if name.endswith("Trainer")
    ]
    return {
        f"{each.__module__}.{each.__name__}": each
        for each in values
        if inspect.isclass(each) and hasattr(each, "_paper")
    }


@pytest.mark.parametrize("name", TRAINERS := trainers())
def test_the_card_has_the_paper_and_its_citation(name: str) -> None:
    kind = TRAINERS[name]
    fields = {field: getattr(kind, field) for field in ("_paper", "_name", "_tag_names")}
    given = {"base_model": None, "model_name": "m", "hub_model_id": ".", "dataset_name": None, "tags": None}
    text = card_of_run(SimpleNamespace(**fields), **given).text
    if kind.__name__ in WITHOUT_PAPER:
        assert kind._paper is None and "papers/" not in text and text.count("```bibtex") == 1
        return
    title, number = kind._paper
    assert re.fullmatch(r"\d{4}\.\d{5}", number)
    assert f"from [{title}](https://huggingface.co/papers/{number})" in text
    citation = text.split("```bibtex")[1].split("```")[0]
    assert title in citation.replace("{", "").replace("}", "") and text.count("```bibtex") == 2
    assert f"20{number[:2]}" in citation


def test_the_card_of_a_subclass_written_for_trl_reads_its_dict_of_the_paper() -> None:
    paper = {"title": "A method of mine", "id": "2601.00001"}
    trainer = SimpleNamespace(_paper=paper, _name="Mine", _tag_names=[])
    text = card_of_run(trainer, base_model=None, model_name="m", hub_model_id=".", dataset_name=None, tags=None).text
    assert "from [A method of mine](https://huggingface.co/papers/2601.00001)" in text


def test_there_are_all_trainers() -> None:
    assert len(TRAINERS) >= 28
