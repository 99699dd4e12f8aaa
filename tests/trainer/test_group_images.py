"""GRPO and RLOO on prompts with images: what the model sees, what is trained, resumed, learnt and refused."""

import json
import re

import pytest
import torch
from datasets import Dataset, Json, List

from tests.tiny import tiny_model
from tests.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model
from tests.trainer.grpo_runs import logs
from tests.trainer.image_prompt_runs import QUESTION, make, rows, run
from tests.trainer.one_step import assert_same_steps
from tests.two_processes import launch
from trl.data.prompts import IMAGE_KEY
from trl.rollouts.experience import OLD, SAMPLING_LOGPS


def completions(trainer, numbers, streams=None):
    """Completions of some rows of the training set."""
    maker = trainer.rollouts
    maker.follow(trainer.model_wrapped, trainer.state)
    return maker.completer(maker, maker.prompts.rows[numbers], streams=streams or range(len(numbers))).experience


def scored(trainer, experience):
    """What the scoring forward says of the completions' tokens."""
    batch = trainer.batch_of(experience)
    with torch.no_grad():
        return trainer.score_rollout(batch, [OLD])[OLD]


# ---- generation and scoring


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_and_scoring_see_the_same(family):
    trainer, _ = make(family=family)
    found = completions(trainer, [0, 0, 1, 2, 3, 4])
    trainer.model.eval()
    torch.testing.assert_close(scored(trainer, found), found.per_token[SAMPLING_LOGPS], rtol=1e-5, atol=1e-5)
    other = found.with_rows(**{IMAGE_KEY: torch.tensor([1, 1, 0, 2, 3, 4])})
    moved = (scored(trainer, other) - found.per_token[SAMPLING_LOGPS]).abs()
    first = found.completions.row_index < 3  # these see another image
    assert moved[first].max() > 1e-3 and moved[~first].max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_does_not_depend_on_the_others_of_its_batch(family):
    trainer, _ = make(family=family)
    together = completions(trainer, [0, 1, 0, 2, 3, 4])
    texts = [row.tolist() for row in together.prompts.split()]
    assert texts[0] == texts[1], "told apart by their image alone"
    for row, number in enumerate([0, 1, 0, 2, 3, 4]):
        alone = completions(trainer, [number], streams=[row])
        assert torch.equal(alone.completions.values, together.completions.split()[row])
        own = together.ragged(SAMPLING_LOGPS).split()[row]
        torch.testing.assert_close(alone.per_token[SAMPLING_LOGPS], own, rtol=1e-5, atol=1e-5)


def test_null_of_columns_stored_as_json_is_in_the_tokens_and_in_what_the_model_sees():
    processor = tiny_processor("llava")
    processor.chat_template = "{{ tools | tojson }}" + processor.chat_template
    tool = {"type": "function", "function": {"name": "look", "default": None}}
    data = Dataset.from_list([{**row, "tools": [tool]} for row in rows()]).cast_column("tools", List(Json()))
    trainer, _ = make(data=data, given={"processing_class": processor})
    prompts = trainer.rollouts.prompts.rows
    for row in range(len(prompts)):
        ids, (text, images) = prompts[row]["input_ids"], trainer.images._read_row(row)
        assert '"default": null' in text
        seen = processor(text=[text], images=[images] if images else None)["input_ids"][0]
        assert list(seen)[-len(ids) :] == ids


def test_prompts_of_text_keep_their_end_but_never_lose_a_part_of_an_image():
    processor = tiny_processor("llava")
    long = {"images": [tiny_image(0)], "prompt": "word " * 20 + "<image> what?"}
    trainer, _ = make(data=Dataset.from_list([long] * 2), max_prompt_length=12)
    whole, _ = make(data=Dataset.from_list([long] * 2))
    kept, ids = trainer.rollouts.prompts.rows["input_ids"][0], whole.rollouts.prompts.rows["input_ids"][0]
    assert kept == ids[-12:] and kept.count(processor.image_token_id) == 4
    found = completions(trainer, [0, 1])
    trainer.model.eval()
    torch.testing.assert_close(scored(trainer, found), found.per_token[SAMPLING_LOGPS], rtol=1e-5, atol=1e-5)
    words = "do not fit max_prompt_length=6, and an image cannot lose tokens"
    with pytest.raises(ValueError, match=words):
        make(data=Dataset.from_list([long] * 2), max_prompt_length=6)


# ---- training


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_splits_into_micro_batches(method):
    settings = {"dtype": "float64", "max_steps": 3, "num_iterations": 2, "max_completion_length": 4}
    trainer, expected = run(method, **settings)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    other, found = run(method, **settings, **split)
    assert_same_steps(found.steps, expected.steps)
    assert logs(other)[-1]["kl"] == pytest.approx(logs(trainer)[-1]["kl"], abs=1e-9)


@pytest.mark.slow
def test_two_processes(tmp_path):
    settings = {"dtype": "float64", "max_steps": 2, "num_iterations": 2, "max_completion_length": 4}
    trainer, expected = run(**settings)
    out = tmp_path / "two.pt"
    halves = json.dumps({**settings, "per_device_train_batch_size": 4})
    launch("tests.trainer.image_prompt_runs", str(out), halves)
    found = torch.load(out)
    assert_same_steps(found["gradients"], expected.steps)
    assert found["logs"][-1]["kl"] == pytest.approx(logs(trainer)[-1]["kl"], abs=1e-9)
    assert found["eval"]["eval_reward"] == pytest.approx(
        trainer.evaluate(Dataset.from_list(rows()[1:4]))["eval_reward"]
    )


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_run_goes_on_within_a_window_to_the_same_bits(method, tmp_path):
    settings = {
        "num_iterations": 2, "steps_per_generation": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 3,
        "max_completion_length": 4,
    }  # fmt: skip
    whole, _ = run(method, folder=str(tmp_path / "whole"), **settings)
    saved = (tmp_path / "whole" / "checkpoint-3" / "rollout_0.safetensors").stat().st_size
    assert saved < 8000, "no pixels in a checkpoint"
    again, _ = make(method, folder=str(tmp_path / "again"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert logs(again)[-1] == logs(whole)[-1]


def test_what_reward_functions_are_handed_and_what_is_logged():
    seen = []

    def reward(prompts, completions, images, **columns):
        seen.append((prompts, completions, images, set(columns)))
        return [float(len(given)) for given in images]

    trainer, _ = make(
        reward_funcs=reward,
        max_steps=1,
        log_completions=True,
        top_entropy_quantile=0.5,
        shuffle_dataset=False,
    )
    trainer.train()
    prompts, answers, images, columns = seen[0]
    assert prompts[0] == rows()[0]["prompt"] and answers[0][0]["role"] == "assistant"
    assert [len(given) for given in images] == [1] * 8 and images[0][0].size == (16, 16)
    assert columns == {"completion_ids", "trainer_state"}
    assert logs(trainer)[0]["reward"] == 1.0
    found = trainer.evaluate(Dataset.from_list(rows()[2:4]))
    assert found["eval_reward"] == 1.0 and {"eval_kl", "eval_loss"} <= set(found)


# ---- what is refused


def without(name):
    return [{key: value for key, value in row.items() if key != name} for row in rows()]


def with_row(**changed):
    return [rows()[0], {**rows()[1], **changed}]


BAD = {
    "a missing image": (with_row(images=None), ValueError, "row 1, column 'images': None, expected a list of images"),
    "more places than images": (
        [{"images": [tiny_image(0)], "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]}], ValueError,
        "row 0, column 'images': 1 images for 2",
    ),
    "a placeholder in a message": (
        with_row(prompt=[{"role": "user", "content": "<image> what?"}]), ValueError, "images for 2 placeholders '<image>'",
    ),
    "placeholders of text": (
        [{"images": [tiny_image(0)], "prompt": "what?"}], ValueError, "1 images for 0 placeholders '<image>' in the text",
    ),
    "tokens": ([{"images": [tiny_image(0)], "input_ids": [3, 4]}], ValueError, "tokens beside images"),
    "no prompt": (without("prompt"), ValueError, "expected 'prompt' beside the images"),
    "two columns": (
        [{**row, "image": tiny_image(0)} for row in rows()], ValueError, "columns 'images' and 'image'",
    ),
    "no image": ([{"image": "cat", "prompt": [QUESTION]}], TypeError, "expected an image"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_trained_on(name):
    data, error, words = BAD[name]
    with pytest.raises(error, match=re.escape(words)):
        make(data=Dataset.from_list(data))


def test_parts_that_take_no_images():
    processor = tiny_processor("llava")
    tokenizer = processor.tokenizer
    with pytest.raises(TypeError, match="but the data set has a column of images, expected a processor"):
        make(given={"processing_class": tokenizer, "model": tiny_vision_model(processor)})
    with pytest.raises(ValueError, match="which takes no images, but the rows have some"):
        make(given={"model": tiny_model("llama", vocab_size=len(tokenizer))})
    with pytest.raises(ValueError, match="a rollout_func or completer was given with rows of images"):
        make(given={"rollout_func": lambda prompts, trainer: {}})
