"""`trl data`: files that the training commands read."""

import json

from datasets import load_dataset

from trl.cli.main import main
from trl.data.arithmetic import make_rows


def test_rows_are_written_as_lines_of_json(tmp_path, capsys):
    assert main(["data", "tools", "--out", str(tmp_path / "new" / "tools"), "--rows", "16", "--seed", "2"]) == 0
    written = (tmp_path / "new" / "tools" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == make_rows("tools", rows=16, seed=2)["train"]
    assert "test.jsonl: 2 rows of messages, tools" in capsys.readouterr().out


def test_images_are_written_as_parquet(tmp_path):
    assert main(["data", "images", "--out", str(tmp_path), "--rows", "8"]) == 0
    rows = load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"))["train"]
    assert rows[0]["images"][0].size == (32, 32)


def test_a_wrong_name_or_size_is_one_line(tmp_path, capsys):
    assert main(["data", "problem", "--out", str(tmp_path)]) == 2
    assert "Did you mean problems?" in capsys.readouterr().err
    assert main(["data", "problems", "--out", str(tmp_path), "--rows", "3"]) != 0
    assert capsys.readouterr().err.strip() == "trl data: error: rows must be from 8 to 10000, got 3."
