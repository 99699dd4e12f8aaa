"""A run and what it leaves behind: checkpoints, the best one, resuming, the model card, and what a user reads."""

import json
import logging
import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.tiny_tokenizers import QWEN3_LIKE, tiny_tokenizer
from tests.trainer.sft_runs import BLUE, USER, config, logged, make, model_for
from trl import SFTTrainer

ROWS = [
    {"messages": [USER, {"role": "assistant", "content": text}]} for text in ("Look up.", "It is blue.", "Next.")
] * 4  # 12 rows


class Poison(TrainerCallback):
    """Makes the model's loss not a number at the beginning of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step - 1:
            with torch.no_grad():
                model.lm_head.weight.fill_(math.nan)


def state_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())


def test_saved_and_loaded_again(tmp_path):
    trainer = make(ROWS, tokenizer=tiny_tokenizer("qwen3_like"), folder=tmp_path, assistant_only_loss=True, max_steps=3)
    trainer.train()
    trainer.save_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert tokenizer.chat_template == QWEN3_LIKE  # not the one with marks that training used
    assert tokenizer("It is blue.")["input_ids"] == trainer.processing_class("It is blue.")["input_ids"]
    assert model.config._attn_implementation == "sdpa"
    assert json.loads((tmp_path / "config.json").read_text()).get("attn_implementation") is None
    text = model.generate(**tokenizer("It is", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    again = trainer.model.generate(**tokenizer("It is", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert torch.equal(text, again)


def test_model_card_and_tags(tmp_path, monkeypatch, capsys):
    trainer = make(ROWS, folder=tmp_path / "my-run", save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "my-run" / "README.md").read_text()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "my-run")
        exec(card.split("```python\n")[1].split("\n```")[0], {})
    assert capsys.readouterr().out
    header = card.split("---")[1]
    assert all(f"- {tag}\n" in header for tag in ("trl", "sft", "generated_from_trainer"))
    assert "# my-run" in card
    assert "| optimiser steps | 2 |" in card
    trainer.create_model_card(model_name="Other", dataset_name="me/sums", tags="mine")
    card = (tmp_path / "my-run" / "README.md").read_text()
    assert "# Other" in card
    assert "- mine\n" in card
    assert "me/sums" in card


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path):
    trainer = make(
        ROWS, folder=tmp_path, max_steps=4, learning_rate=0.3, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, save_total_limit=1, trainer={"eval_dataset": Dataset.from_list(ROWS)},
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "eval_loss")
    best = 1 + losses.index(min(losses))
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == sorted({f"checkpoint-{best}", "checkpoint-4"})
    assert state_of(tmp_path / "checkpoint-4")["best_model_checkpoint"] == str(tmp_path / f"checkpoint-{best}")
    assert state_of(tmp_path / "checkpoint-4")["best_metric"] == min(losses)
    assert not list(tmp_path.glob("_run-*"))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_resuming_without_a_checkpoint(tmp_path):
    trainer = make(ROWS, folder=tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(
        FileNotFoundError, match=r"resume_from_checkpoint=True needs a checkpoint.*none in .*leave it out"
    ):
        trainer.train(resume_from_checkpoint=True)
    trainer.train()
    with pytest.raises(
        FileNotFoundError,
        match=r"resume_from_checkpoint='.*nowhere' is no folder.*checkpoint-2",
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    trainer = make(
        ROWS,
        folder=tmp_path,
        max_steps=5,
        save_strategy="steps",
        save_steps=2,
        trainer={"callbacks": [Poison(4)]},
    )
    with pytest.raises(
        FloatingPointError, match=r"got nan in optimiser step 4\..*Lower learning_rate.*data of this step"
    ):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    again = make(ROWS, folder=tmp_path, max_steps=5)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 5
    assert all(math.isfinite(loss) for loss in logged(again, "loss"))


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path):
    trainer = make(ROWS, folder=tmp_path, max_steps=3)
    norm = trainer.model.model.norm.weight

    def spoil(gradient):
        return gradient * math.inf if trainer.state.global_step == 1 else gradient

    norm.register_hook(spoil)
    with pytest.raises(
        FloatingPointError, match=r"gradient's norm must be finite, got (nan|inf) in optimiser step 2\."
    ):
        trainer.train()
    assert torch.isfinite(norm).all()


def test_a_plain_run_prints_no_complaint(tmp_path, caplog, recwarn):
    """What a user sees of a run as in the README: progress and metrics, no warning."""
    model = model_for(eos_token_id=tiny_tokenizer().eos_token_id, bos_token_id=tiny_tokenizer().bos_token_id)
    args = config(
        tmp_path, gradient_checkpointing=True, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    data = Dataset.from_list([{"messages": [USER, BLUE]}] * 8)
    with caplog.at_level(logging.WARNING):
        trainer = SFTTrainer(model, args, train_dataset=data, eval_dataset=data, processing_class=tiny_tokenizer())
        trainer.train()
        trainer.save_model()
    assert [record.getMessage() for record in caplog.records] == []
    spoken = [w for w in recwarn if not issubclass(w.category, (DeprecationWarning, ResourceWarning))]
    assert [str(w.message) for w in spoken] == []
