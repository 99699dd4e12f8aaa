"""GKD without a model of the teacher: columns that `trl teach` wrote, and servers; and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset

from tests.contracts.methods import gkd, gkd_columns
from tests.teacher_server import TinyTeacher, serving
from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_runs import run as run_on_prompts
from tests.trainer.one_step import assert_same_gradient, fixed_rows, trainer_of
from trl import GKDConfig, GKDTrainer
from trl.data.teacher_columns import WithTeacherColumns
from trl.generation import teacher_servers
from trl.scripts import teach
from trl.scripts.running import run_script

V = 96


def double(name: str, **settings: Any) -> Any:
    return tiny_model(name, dtype=torch.float64, **settings)


def steps(trainer: Any) -> list[dict[str, torch.Tensor]]:
    trainer.train()
    return trainer.keep.steps


def columns(**changes: Any) -> Dataset:
    return Dataset.from_list([{**row, **changes} for row in gkd_columns().train_dataset])


@pytest.mark.parametrize("settings", [{}, {"padding_free": True}, {"packing": True, "max_length": 40}])
def test_all_columns_give_the_gradient_of_the_model(settings: dict[str, Any]) -> None:
    trainer = gkd_columns(**settings)
    assert (len(trainer.train_dataset) < 8) == ("packing" in settings)
    assert_same_gradient(steps(trainer)[0], steps(gkd(max_length=40))[0])
    few = columns()
    few = few.map(lambda row: {name: [x[:64] for x in row[name]] for name in ("teacher_ids", "teacher_logps")})
    trainer = gkd_columns(train_dataset=few)
    loss, whole = (each.evaluate(each.train_dataset)["eval_loss"] for each in (trainer, gkd_columns()))
    assert 0 < whole - loss < 1e-2


CHATS = [
    {
        "messages": [
            {"role": "user", "content": "What colour is the sky?"},
            {"role": "assistant", "content": text},
        ]
    }
    for text in ("Blue.", "It is blue. Look up.", "Next.", "Seven apples and 12 pears.")
]


@pytest.fixture
def taught(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows that `trl teach` wrote, the teacher and the tokenizer."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer("chatml")
    teacher = tiny_model("llama", vocab_size=len(tokenizer))
    for part in (teacher, tokenizer):
        part.save_pretrained(tmp_path / "teacher")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    line = f"{tmp_path / 'rows.jsonl'} --teacher {tmp_path / 'teacher'} --output {tmp_path / 'out'} --top_k {len(tokenizer)}"
    line += " --rows_per_shard 3 --use_cpu --disable_tqdm true"
    assert run_script(teach.make_parser(), teach.main, line.split()) == 0
    return load_dataset(str(tmp_path / "out"), split="train"), teacher, tokenizer


def of_chats(tokenizer: Any, rows: Dataset, **settings: Any) -> Any:
    return trainer_of(
        GKDTrainer, GKDConfig, None, {"lmbda": 0.0, "per_device_train_batch_size": 4, **settings}, processing_class=tokenizer,
        model=tiny_model("gpt2", vocab_size=len(tokenizer)), train_dataset=rows,
    )  # fmt: skip


def test_what_teach_writes_trains_as_the_teacher_does(taught: Any) -> None:
    rows, teacher, tokenizer = taught
    settings = {"eval_dataset": rows, "per_device_eval_batch_size": 3}
    trainer = of_chats(tokenizer, rows, **settings)
    with_model = of_chats(tokenizer, Dataset.from_list(CHATS), teacher_model=teacher)
    assert trainer.teacher.model is None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        with_model.evaluate(Dataset.from_list(CHATS))["eval_loss"], rel=1e-5
    )
    trainer.train(), with_model.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(with_model.state.log_history[0]["loss"], rel=1e-5)


def test_columns_of_other_settings_are_refused(taught: Any) -> None:
    rows, _, tokenizer = taught
    other = tiny_tokenizer("chatml")
    other.add_tokens(["<new>"])
    student = {"model": tiny_model("gpt2", vocab_size=len(other))}
    for settings, words in (
        ({"lmbda": 0.5}, "lmbda=0.5"),
        ({"packing": True, "packing_strategy": "wrapped", "max_length": 200}, "wrapped"),
        ({"temperature": 1.0}, "temperature=1.0"),
        ({"max_length": 20}, "max_length=20 truncates"),
        ({"completion_only_loss": False}, "truncated or prepared"),
        ({"processing_class": other, **student}, "another tokenizer"),
        ({"eval_dataset": rows.remove_columns("teacher_ids")}, "eval dataset: no columns"),
        ({"seq_kd": True}, "seq_kd"),
        (
            {"packing": True, "train_dataset": rows.add_column("teacher", ["a"] * len(rows))},
            "several teachers; packing",
        ),
        (
            {"teacher_model": {"a": "http://user:SECRET@h/v1", "b": tiny_model("llama")}},
            "^'http://<REDACTED>@h/v1' is an address",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            of_chats(tokenizer, rows, **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_ids": [[V]]}, "vocabulary of 96"),
        ({"teacher_ids": [[-1]]}, "token ids from -1"),
        ({"teacher_logps": [[0.5]]}, "above 0"),
        ({"teacher_logps": [[float("nan")]]}, "NaN"),
        ({"teacher_ids": [[3, 4]]}, r"\(1, 2\) and \(1, 1\)"),
        ({"teacher_ids": [[3, 4]], "teacher_logps": [[-1.0, -2.0]]}, "one top_k"),
    ],
)
def test_wrong_columns_are_refused(changes: dict[str, Any], words: str) -> None:
    good = {"input_ids": [5, 6], "completion_mask": [0, 1], "teacher_ids": [[3]], "teacher_logps": [[-1.0]]}
    trainer = gkd_columns(train_dataset=Dataset.from_list([good] * 7 + [{**good, **changes}]))
    with pytest.raises(ValueError, match=words):
        trainer.train()


def test_a_token_behind_padding_is_not_predicted() -> None:
    padded = {"labels": torch.tensor([[-100, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    rows = [{"teacher_ids": [[3]], "teacher_logps": [[-1.0]]}]
    assert WithTeacherColumns(lambda rows: padded, vocabulary=V)(rows)["teacher_ids"].tolist() == [[3]]


def test_streamed_columns_are_checked_as_they_pass() -> None:
    rows = columns()
    trainer = gkd_columns(train_dataset=rows.to_iterable_dataset(), max_steps=1, max_length=64)
    stored = gkd_columns(train_dataset=rows, max_length=max(map(len, rows["input_ids"])))  # none is cut
    assert_same_gradient(steps(trainer)[0], steps(stored)[0])
    cut = rows.map(lambda row: {"completion_mask": [0, *row["completion_mask"][1:-1], 0]})
    with pytest.raises(ValueError, match="other settings"):
        gkd_columns(train_dataset=cut.to_iterable_dataset(), max_length=64).train()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(teacher_servers, "FIRST_PAUSE_S", 0.01)
    with serving(TinyTeacher(double("llama"))) as running:
        yield running


SERVED = {
    "temperature": 1.0,
    "teacher_top_k": V,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_a_server_gives_the_gradient_of_the_model(server: Any, lmbda: float) -> None:
    settings = {**SERVED, "lmbda": lmbda, "padding_free": bool(lmbda)}
    trainer = gkd(teacher_model=server.url, **settings)
    (found,) = steps(trainer)
    assert [len(body["prompt"]) for body in server.requests if body["prompt"] != [[0, 0]]] == [
        8
    ]  # of all micro-batches together
    assert_same_gradient(found, steps(gkd(**settings))[0])
    trainer = gkd(teacher_model=None, teacher_model_server_url=server.url, **settings)
    rows = Dataset.from_list(fixed_rows())
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(gkd(**settings).evaluate(rows)["eval_loss"], rel=1e-9)


@pytest.mark.parametrize("lmbda", [0.0, 1.0])
def test_rows_choose_among_servers(server: Any, lmbda: float) -> None:
    with serving(TinyTeacher(double("llama", seed=4))) as second:
        urls = {"one": server.url, "two": second.url}
        rows = [{**row, "completion_mask": [0, *row["completion_mask"][1:]], "teacher": "one"} for row in fixed_rows()]
        settings = {**SERVED, "lmbda": lmbda}
        all_one = Dataset.from_list(rows)
        found = steps(gkd(teacher_model=urls, train_dataset=all_one, **settings))[0]
        assert_same_gradient(found, steps(gkd(train_dataset=all_one, **settings))[0])
        before = len(server.requests), len(second.requests)
        for row in rows[:3]:
            row["teacher"] = "two"
        trainer = gkd(
            teacher_model=None,
            teacher_model_server_url=json.dumps(urls),
            train_dataset=Dataset.from_list(rows),
            **settings,
        )
        (served,) = steps(trainer)
        models = {"one": double("llama"), "two": double("llama", seed=4)}
        assert_same_gradient(
            served, steps(gkd(teacher_model=models, train_dataset=trainer.train_dataset, **settings))[0]
        )
        asked = [each.requests[start + 2 :] for each, start in zip((server, second), before, strict=True)]
        assert [sum(len(body["prompt"]) for body in bodies) for bodies in asked] == [5, 3]
        rows[7]["teacher"] = "three"
        odd = Dataset.from_list(rows)
        for given, words in (
            (odd, "'three', expected one of one, two"),
            (odd.remove_columns("teacher"), "None"),
        ):
            with pytest.raises(ValueError, match=f"train dataset: column 'teacher' has {words}"):
                gkd(teacher_model=urls, train_dataset=given, **settings)
        stream = gkd(teacher_model=urls, train_dataset=odd.to_iterable_dataset(), max_length=64, **settings)
        with pytest.raises(ValueError, match="of the batch: column 'teacher' has 'three'"):
            stream.train()


def test_a_server_that_dies_stops_the_run(server: Any) -> None:
    trainer = gkd(teacher_model=server.url, teacher_server_timeout=1.0, **SERVED)
    server.fault = lambda body, answer: None
    with pytest.raises(ConnectionError, match="row 0 of micro-batch 0"):
        trainer.train()
    for settings, words in (({"temperature": 0.9}, "temperature=0.9"), ({"seq_kd": True}, "seq_kd")):
        server.fault = None
        with pytest.raises(ValueError, match=words):
            gkd(teacher_model=server.url, **{**SERVED, **settings})


def test_a_server_teaches_the_completions_of_prompts(server: Any) -> None:
    settings = {
        "max_steps": 1,
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "beta": 0.5,
        "temperature": 1.0,
    }
    _, expected = run_on_prompts("distillation", teacher="llama", **settings)
    served = {"teacher_model_server_url": server.url, "teacher_top_k": V}
    trainer, found = run_on_prompts("distillation", **settings, **served)
    assert_same_gradient(found.steps[0], expected.steps[0])
    assert trainer.teacher.model is None
