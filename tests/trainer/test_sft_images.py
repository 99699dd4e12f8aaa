"""SFTTrainer on rows with images: tiny vision-language models, exact normalisation, what is saved, what is refused."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, IterableDataset, List, Value
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.tiny_tokenizers import tiny_tokenizer
from tests.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.one_step import KeepGradients
from tests.trainer.sft_runs import AGAIN, BLUE, NEXT, USER, config, model_for
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, DataCollatorForVisionLanguageModeling

PART = {"type": "image"}
ROWS = [
    {"images": [tiny_image(0)], "messages": [USER, BLUE]},
    {"images": [tiny_image(1), tiny_image(2)], "messages": [USER, BLUE, AGAIN, NEXT]},
    {"images": [tiny_image(3)], "messages": [AGAIN, NEXT]},
    {"images": [], "messages": [USER, NEXT, AGAIN, BLUE]},
]
PAIRS = [{"images": row["images"], "prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in ROWS]  # fmt: skip


@pytest.fixture(scope="module")
def processor():
    return tiny_processor("llava")


def make(rows=ROWS, family="llava", *, processor=None, model=None, folder=None, trainer=None, **settings):
    processor = processor or tiny_processor(family)
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    model = model or tiny_vision_model(processor, family)
    args = config(folder, **{"max_length": None, **settings})
    return SFTTrainer(model, args, train_dataset=data, processing_class=processor, **(trainer or {}))


def stream(rows):
    features = Dataset.from_list(rows).features
    return IterableDataset.from_generator(lambda: iter(rows), features=features)


# ---- training


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss_and_moves_tower_and_text(family, tmp_path):
    trainer = make(family=family, folder=tmp_path, max_steps=12, learning_rate=3e-3)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert any("vision" in name or "visual" in name for name in moved)
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= set(trainer.state.log_history[0])


@pytest.mark.parametrize(("family", "rows"), [*((family, ROWS) for family in FAMILIES), ("llava", PAIRS)])
def test_the_gradient_is_the_same_for_every_split_into_micro_batches(family, rows):
    processor = tiny_processor(family)
    found = []
    for size in (4, 2, 1):
        keep = KeepGradients()
        model = tiny_vision_model(processor, family, dtype=torch.float64)
        trainer = make(
            rows, processor=processor, model=model, max_steps=1, per_device_train_batch_size=size, max_grad_norm=0.0,
            gradient_accumulation_steps=4 // size, trainer={"callbacks": [keep]},
        )  # fmt: skip
        trainer.train()
        found.append((keep.steps[0], trainer.state.log_history[0]["loss"]))
    (whole, loss), *others = found
    tolerance = 1e-4 if family == "gemma3" else 1e-9  # Gemma 3 normalises in float32 whatever its weights are
    for gradients, other_loss in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in whole.items():
            scale = float(gradient.abs().max()) + 1e-3
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=tolerance * scale, msg=name)


def test_one_image_a_row_streams_and_adapters(processor):
    rows = [{"image": tiny_image(seed), "prompt": [USER], "completion": [BLUE]} for seed in range(4)]
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trainer = make(stream(rows), processor=processor, trainer={"peft_config": lora}, max_steps=3)
    trainer.train()
    assert all("lora" in name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad)
    assert trainer.state.global_step == 3


def test_evaluation_sets_of_either_type(processor, monkeypatch):
    evaluation = {"pairs": Dataset.from_list(PAIRS), "chats": Dataset.from_list(ROWS)}
    trainer = make(processor=processor, trainer={"eval_dataset": evaluation}, per_device_eval_batch_size=3)
    checked: list[str] = []
    monkeypatch.setattr("trl.trainer.images._try_first_row", lambda *given: checked.append(given[-1]))
    metrics = trainer.evaluate()
    assert not checked  # the constructor has done it
    for name, rows in (("pairs", PAIRS), ("chats", ROWS)):
        batch = trainer.data_collator(rows)
        trainer.model.eval()
        with torch.no_grad():
            own = trainer.model(**batch).loss
        assert metrics[f"eval_{name}_loss"] == pytest.approx(float(own), abs=1e-5)
    assert trainer.evaluate(Dataset.from_list(ROWS[:2]))["eval_loss"] > 0
    assert checked == ["eval"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_model_loaded_by_name_moves_every_weight_that_has_a_gradient(family, tmp_path):
    processor, keep = tiny_processor(family), KeepGradients()
    for saved in (tiny_vision_model(processor, family, dtype=torch.bfloat16), processor):
        saved.save_pretrained(tmp_path / "saved")
    settings = {"max_length": None, "max_steps": 1, "learning_rate": 1e-6, "warmup_steps": 0}
    args = config(tmp_path / "run", **settings)
    trainer = SFTTrainer(
        str(tmp_path / "saved"),
        args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=processor,
        callbacks=[keep],
    )
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    trainer.train()
    after, (gradients,) = dict(trainer.model.named_parameters()), keep.steps
    assert any(("vision" in name or "visual" in name) and gradient.any() for name, gradient in gradients.items())
    for name, gradient in gradients.items():
        assert not ((gradient.abs() > 1e-6) & (after[name] == before[name])).any(), name
    trainer.save_model()
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_processor_and_model_are_saved_and_load_again(tmp_path):
    trainer = make(folder=tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model()
    processor = AutoProcessor.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    batch = DataCollatorForVisionLanguageModeling(processor)(ROWS[:2])
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).logits
        torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=1e-6)
    again = SFTTrainer(str(tmp_path), config(max_length=None), train_dataset=Dataset.from_list(ROWS))
    assert type(again.processing_class).__name__ == "LlavaProcessor"


def test_a_collator_of_ones_own_gets_raw_rows(processor):
    """As programs of the 0.9 to 0.15 levels do it: rows untouched, a function makes the batch."""
    ours = DataCollatorForVisionLanguageModeling(processor)
    seen = []

    def collate(rows):
        seen.append(set(rows[0]))
        return ours(rows)

    for own in ({"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}, {}):
        make(processor=processor, trainer={"data_collator": collate}, max_steps=1, **own).train()
    assert seen == [{"images", "messages"}] * 2


# ---- bad input


@dataclass(frozen=True)
class Bad:
    """What differs from a good run; the error, whose message has all of `says` in order."""

    error: type[Exception]
    says: tuple[str, ...]
    rows: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    model: Any = None
    processor: Any = None


GOOD, IMAGE = ROWS[0], tiny_image()
NESTED = Features({"images": List(Image()), "text": Value("string")})
ANY_PLACES = [{"role": "user", "content": [PART, {"type": "text", "text": "Look"}]}, {"role": "assistant", "content": [{"type": "text", "text": "up"}]}]  # fmt: skip
PAIR = PAIRS[0]


def files(path):
    return Dataset.from_dict({"images": [[], [{"bytes": None, "path": path}]], "text": ["a", "<image>b"]}, features=NESTED)  # fmt: skip


def holes():
    return Dataset.from_dict({"images": [[IMAGE, IMAGE], [IMAGE, None]], "text": ["<image><image>"] * 2}, features=NESTED)  # fmt: skip


def doubled(row):
    return [GOOD, {**GOOD, **row}]


BAD = {
    "None for a list": Bad(ValueError, ("train dataset, row 1, column 'images'", "None", "list of images", "Give []"), lambda: doubled({"images": None})),
    "None for an image": Bad(ValueError, ("row 1, column 'image'", "None", "expected an image", "Filter"), lambda: [{"image": IMAGE, "messages": [USER, BLUE]}, {"image": None, "messages": [USER, BLUE]}]),
    "None in a list": Bad(ValueError, ("row 1, column 'images'", "image 1 is None", "Leave it out"), holes),
    "all None": Bad(ValueError, ("row 0, column 'images'", "None"), lambda: [{"images": None, "messages": [USER, BLUE]}] * 2),
    "paths": Bad(TypeError, ("row 0, column 'images'", "string", "list of images", "cast_column"), lambda: [{"images": ["cat.png"], "messages": [USER, BLUE]}]),
    "a path": Bad(TypeError, ("row 0, column 'image'", "string", "an image", 'cast_column("image", Image())'), lambda: [{"image": "cat.png", "messages": [USER, BLUE]}]),
    "numbers": Bad(TypeError, ("row 0, column 'images'", "int64", "list of images"), lambda: [{"images": [1], "messages": [USER, BLUE]}]),
    "an image for a list": Bad(TypeError, ("row 0, column 'images'", "Image", "list of images"), lambda: [{"images": IMAGE, "messages": [USER, BLUE]}]),
    "a list for an image": Bad(TypeError, ("row 0, column 'image'", "List", "an image"), lambda: [{"image": [IMAGE], "messages": [USER, BLUE]}]),
    "a missing file": Bad(FileNotFoundError, ("row 1, column 'images'", "no file 'no/cat.png'"), lambda: files("no/cat.png")),
    "not decoded": Bad(TypeError, ("column 'images'", "decode=False", "cast_column"), lambda: Dataset.from_list(ROWS).cast_column("images", List(Image(decode=False)))),
    "both columns": Bad(ValueError, ("'images' and 'image'",), lambda: [{**GOOD, "image": IMAGE}]),
    "more places than images": Bad(ValueError, ("row 1, column 'images'", "0 images for 1 image parts"), lambda: [{"images": [IMAGE], "messages": ANY_PLACES}, {"images": [], "messages": ANY_PLACES}]),
    "more images than places": Bad(ValueError, ("row 1, column 'images'", "2 images for 1 image parts"), lambda: [{"images": [IMAGE], "messages": ANY_PLACES}, {"images": [IMAGE] * 2, "messages": ANY_PLACES}]),
    "more images than places in a late row": Bad(ValueError, ("row 100, column 'images'", "2 images for 1 image parts"), lambda: [*([{"images": [IMAGE], "messages": ANY_PLACES}] * 100), {"images": [IMAGE] * 2, "messages": ANY_PLACES}]),
    "places without a column": Bad(ValueError, ("row 0, column 'messages'", "0 images for 1 image parts"), lambda: [{"messages": ANY_PLACES}]),
    "placeholders without a column": Bad(ValueError, ("row 1, column 'text'", "'<image>'", "column 'images'"), lambda: [{"text": "Look up."}, {"text": "<image>Look up."}]),
    "text without placeholder": Bad(ValueError, ("row 0, column 'images'", "1 images for 0 placeholders '<image>'"), lambda: [{"images": [IMAGE], "text": "Look up."}]),
    "images in parts": Bad(ValueError, ("row 0, column 'messages'", "['image_url'] without a column 'images'"), lambda: [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Look"}]}, {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]}]}]),
    "placeholder in a message": Bad(ValueError, ("row 1, column 'messages'", "2 placeholders '<image>'"), lambda: doubled({"messages": [{**USER, "content": "<image>Look"}, BLUE]})),
    "no user": Bad(ValueError, ("row 1, column 'images'", "no user message"), lambda: doubled({"messages": [BLUE]})),
    "an unknown role": Bad(ValueError, ("row 1, column 'messages', message 0", "unknown role 'usr'"), lambda: doubled({"messages": [{**USER, "role": "usr"}, BLUE]})),
    "an empty completion": Bad(ValueError, ("row 0, column 'completion'", "an empty list"), lambda: [{**PAIR, "completion": []}]),
    "a prompt alone": Bad(ValueError, ("row 0", "GRPOTrainer"), lambda: [{"images": [IMAGE], "prompt": [USER]}]),
    "tokens": Bad(ValueError, ("row 0, column 'input_ids'", "tokens beside images"), lambda: [{"images": [IMAGE], "input_ids": [1, 2]}]),
    "images alone": Bad(ValueError, ("row 0, has columns ['images']", "dataset_text_field"), lambda: [{"images": [IMAGE]}]),
    "no rows": Bad(ValueError, ("no rows",), lambda: Dataset.from_list(ROWS).select([])),
    "a bad row of a stream": Bad(ValueError, ("row 1, column 'images'", "None"), lambda: stream(doubled({"images": None}))),
    "images longer than max_length": Bad(ValueError, ("max_length=5", "max_length=None"), settings={"max_length": 5}),
    "packing": Bad(ValueError, ("packing=True", "packing=False"), settings={"packing": True, "max_length": 64}),
    "eval_packing": Bad(ValueError, ("eval_packing=True", "eval_packing=False"), settings={"eval_packing": True, "max_length": 64}),
    "packing for a collator of one's own": Bad(ValueError, ("packing=True", "packing=False"), settings={"packing": True, "max_length": 64}, trainer={"data_collator": list}),
    "padding_free": Bad(ValueError, ("padding_free=True", "padding_free=False"), settings={"padding_free": True}),
    "assistant_only_loss": Bad(ValueError, ("assistant_only_loss=True", "completion"), settings={"assistant_only_loss": True}),
    "completion_only_loss": Bad(ValueError, ("row 0, column 'messages'", "completion_only_loss=True"), settings={"completion_only_loss": True}),
    "formatting_func": Bad(ValueError, ("formatting_func", "images"), trainer={"formatting_func": lambda row: "text"}),
    "untrained_rows": Bad(ValueError, ("dataset_kwargs", "untrained_rows"), settings={"dataset_kwargs": {"untrained_rows": "drop"}}),
    "a tokenizer": Bad(TypeError, ("processing_class", "expected a processor"), processor=tiny_tokenizer),
    "a text collator": Bad(TypeError, ("DataCollatorForLanguageModeling", "drops the images"), trainer={"data_collator": DataCollatorForLanguageModeling(0)}),
    "a text model": Bad(ValueError, ("LlamaForCausalLM", "takes no images"), model=lambda processor: model_for(architecture="llama", vocab_size=410)),
    "a model of other tokens": Bad(ValueError, ("row 0", "no token 399", "image_token_id"), model=lambda processor: tiny_vision_model(processor, image_token_index=399)),
    "a model of fewer tokens": Bad(ValueError, ("row 0", "token id 400", "expected 0 to 299"), model=lambda processor: small_model(processor)),
}  # fmt: skip


def test_the_placeholder_of_other_rows_is_refused():
    """LLaVA's rows, with a model whose images have another one: it would be trained as text."""
    rows = [{"images": [tiny_image(0)], "messages": [{**USER, "content": "<image>Look"}, BLUE]}]
    with pytest.raises(ValueError, match=r"row 0, column 'messages': '<image>', which is text for this processor"):
        make(rows, "qwen2_vl")


def small_model(processor):
    model = tiny_vision_model(processor)
    model.resize_token_embeddings(300)
    return model


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_first_step(name, processor):
    bad = BAD[name]
    rows = [GOOD] if bad.rows is None else bad.rows()
    own = processor if bad.processor is None else bad.processor()
    model = bad.model(processor) if bad.model else tiny_vision_model(processor)
    with pytest.raises(bad.error, match="(?s)" + ".*".join(map(re.escape, bad.says))) as caught:
        make(rows, processor=own, model=model, trainer=bad.trainer, **bad.settings)
    assert type(caught.value) is bad.error


def test_a_bad_row_that_only_the_stream_meets_is_refused_as_it_passes(processor):
    rows = [GOOD] * 70 + [{**GOOD, "images": [IMAGE, IMAGE, None]}]
    late = IterableDataset.from_generator(lambda: iter(rows))
    trainer = make(late, processor=processor, per_device_train_batch_size=1, max_steps=80)
    with pytest.raises(ValueError, match="row 0 of the batch, column 'images': image 2 is None"):
        trainer.train()
