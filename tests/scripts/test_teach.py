"""`trl teach`: columns equal the teacher's own top k, a stopped run resumes, and other settings are refused."""

import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from trl.data.sources import load_source
from trl.scripts import teach
from trl.scripts.running import CommandError, run_script

ROWS = [
    {"prompt": "Q: How many?", "completion": f" {words}"}
    for words in ("Seven.", "Seven apples and 12 pears.", "Next.", "It is blue. Look up.", "Look.")
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path, model_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def command(*line):
        fixed = f"{data} --teacher {model_path} --output {tmp_path / 'taught'} --top_k 3 --rows_per_shard 2 --use_cpu --disable_tqdm true"
        return run_script(teach.make_parser(), teach.main, [*fixed.split(), *line])

    return command


def test_the_columns_are_the_teachers_most_likely_tokens(run, tmp_path, model_path, capsys):
    assert run("--temperature", "0.7") == 0, capsys.readouterr().err
    assert "trl gkd --dataset_name" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "taught").iterdir())[0] == "teacher.json"
    rows = load_source(str(tmp_path / "taught"), split="train")
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    assert len(rows) == len(ROWS)
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1] / 0.7
        best = logits[torch.tensor(row["completion_mask"][1:]) != 0].log_softmax(-1).topk(3)
        assert row["teacher_ids"] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor(row["teacher_logps"]), best.values, rtol=1e-5, atol=1e-6)


def test_a_stopped_run_resumes_after_the_last_whole_shard(run, tmp_path, monkeypatch):
    assert run() == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "taught").iterdir()}
    (tmp_path / "taught").rename(tmp_path / "other")
    write, shards = teach._with_columns, []

    def stops(shard, *given):
        shards.append(len(shard))
        if len(shards) == 2:
            raise KeyboardInterrupt
        return write(shard, *given)

    monkeypatch.setattr(teach, "_with_columns", stops)
    assert run() == 130
    assert not (tmp_path / "taught").exists()
    assert run() == 0
    assert shards == [2, 2, 2, 1]  # the first one was not written again
    assert {path.name: path.read_bytes() for path in (tmp_path / "taught").iterdir()} == whole
    assert run() == 0 and len(shards) == 4


def test_two_processes_write_all_shards_though_one_begins_late(tmp_path, monkeypatch):
    monkeypatch.setattr(teach, "_with_columns", lambda shard, *given: pa.table(shard.to_dict()))
    rows, settings = Dataset.from_dict({"x": range(9)}), teach.TeachScriptArguments(rows_per_shard=2)
    for rank in range(2):
        args = SimpleNamespace(process_index=rank, world_size=2, disable_tqdm=True)
        files: Any = teach._write_shards(tmp_path, rows, None, settings, args)
    teach._check_shards(files)
    assert load_source(str(tmp_path), split="train")["x"] == list(range(9))
    files[3].unlink()
    with pytest.raises(CommandError, match="train-00003-of-00005"):
        teach._check_shards(files)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--top_k 2", "top_k=3 (now 2)"),
        ("--temperature 1.0", "temperature=0.9 (now 1.0)"),
        ("--max_length 4", "max_length"),
        ("--dataset_streaming true", "dataset_streaming=True"),
        ("--output {folder}", "teacher.json"),
        ("--output {folder}/rows.jsonl/new", "rows.jsonl' is a file"),
        ("--top_k 0", "top_k"),
    ],
)
def test_other_settings_are_refused(run, tmp_path, line, words, capsys):
    assert run() == 0
    assert run(*line.format(folder=tmp_path).split()) == 2
    assert words in capsys.readouterr().err
