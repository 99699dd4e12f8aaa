"""Batches, later rows and images that DPOTrainer refuses; rows and settings are those of test_preference_bad_input.py."""

import pytest
import torch
from datasets import Dataset

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.tiny_vision import tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.dpo_runs import make, pairs
from trl import DPOConfig, DPOTrainer, SyncRefModelCallback

GOOD = {"prompt": "The sky is", "chosen": " blue", "rejected": " brown"}


def text_trainer(rows, tmp_path, **given):
    settings = {name: given.pop(name) for name in list(given) if name in DPOConfig.__dataclass_fields__}
    args = DPOConfig(str(tmp_path), use_cpu=True, report_to="none", **settings)
    given = {"processing_class": tiny_tokenizer(), **given}
    return DPOTrainer(args=args, train_dataset=Dataset.from_list(rows), **given)


def test_a_batch_of_something_else():
    trainer = make()
    with pytest.raises(ValueError, match=r"a batch must have prompt_input_ids, chosen_input_ids.*'input_ids'"):
        trainer.compute_loss(trainer.model, {"input_ids": torch.ones(2, 3)})


def test_rows_of_later_without_what_was_asked_in_advance(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    trainer = make(precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match=r"ref_chosen_logps.*the reference was asked before the first step"):
        trainer.evaluate(Dataset.from_list(pairs()))


def test_a_callback_that_moves_a_reference_that_was_asked_in_advance(tmp_path):
    models = {"model": tiny_model("gpt2", vocab_size=400), "ref_model": tiny_model("gpt2", vocab_size=400, seed=1)}
    with pytest.raises(ValueError, match=r"precompute_ref_log_probs=True scores .* and a callback changes it"):
        text_trainer(
            [GOOD], tmp_path, **models, precompute_ref_log_probs=True, callbacks=[SyncRefModelCallback(None, None)]
        )


# ---- images


def image_trainer(rows, tmp_path, **given):
    processor = tiny_processor("llava")
    model = tiny_vision_model(processor)
    return text_trainer(rows, tmp_path, model=model, processing_class=processor, max_length=None, **given)


def images(count, **changes):
    text = [{"type": "image"}, {"type": "text", "text": "And then?"}]
    row = {
        "images": [tiny_image(seed) for seed in range(count)],
        "prompt": [{"role": "user", "content": text}],
    }
    answers = {side: [{"role": "assistant", "content": [{"type": "text", "text": t}]}] for side, t in (("chosen", "Up."), ("rejected", "Next."))}  # fmt: skip
    return {**row, **answers, **changes}


@pytest.mark.parametrize("count", [0, 2])
def test_images_that_are_missing_or_too_many(count, tmp_path):
    with pytest.raises(ValueError, match=rf"train dataset, row 1, column .*{count}"):
        image_trainer([images(1), images(count)], tmp_path)


def test_settings_are_refused_before_a_reference_is_loaded(monkeypatch):
    monkeypatch.setattr("trl.trainer.dpo_trainer.make_reference", lambda *args, **kwargs: pytest.fail("was loaded"))
    with pytest.raises(ValueError, match="prefix_sharing=True"):
        make(model=tiny_model("bloom"), prefix_sharing=True)
