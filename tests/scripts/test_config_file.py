import pytest

from trl.scripts.config_file import read_config, take_config_option


def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_values_lines_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_TEST_A", "old")
    path = written(tmp_path, "seed: 3\nenv:\n  TRL_TEST_A: 1\n\nnames: [a, b]\n")
    config = read_config(path)
    assert config.values == {"seed": 3, "names": ["a", "b"]}
    assert config.where("names") == f"{path}, line 5"
    config.apply_env()
    import os

    assert os.environ["TRL_TEST_A"] == "1"


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist"):
        read_config("nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "is not valid YAML"),
        ("a: 1\n b: 2\n", "run.yaml is not valid YAML: .* line 2, column 3"),
        ("- a\n- b\n", "must hold `option: value` lines, got list"),
        ("just text", "got str"),
        ("1: a", "must hold `option: value` lines"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_config(written(tmp_path, text))


def test_faults_of_a_file_are_kept_for_the_parser(tmp_path):
    config = read_config(written(tmp_path, "a: 1\nb: 2\na: 3\nenv: [A]\na: 4\n"))
    assert [fault.partition("run.yaml")[2] for fault in config.faults] == [
        ", line 3: `a` already stands on line 1. Keep one of them.",
        ", line 5: `a` already stands on line 1. Keep one of them.",
        ": `env` must map names of environment variables to plain values, got ['A'].",
    ]


def test_take_config_option():
    assert take_config_option(["--a", "1"]) == (None, ["--a", "1"])
    assert take_config_option(["--a", "--config", "x.yaml", "b"]) == ("x.yaml", ["--a", "b"])
    assert take_config_option(["--config=x.yaml"]) == ("x.yaml", [])


@pytest.mark.parametrize("args", [["--config"], ["--config", "--seed"], ["--config", "a", "--config=b"]])
def test_take_config_option_rejects(args):
    with pytest.raises(ValueError, match="--config"):
        take_config_option(args)
