from dataclasses import dataclass, field
from typing import Literal

import pytest

from trl.data.sources import DatasetConfig, DatasetMixtureConfig
from trl.scripts.arguments import SFTScriptArguments
from trl.scripts.parser import TrlParser


@dataclass
class Model:
    path: str
    use_adapter: bool = False
    names: list[str] | None = None
    extra: dict | str | None = None


@dataclass
class Training:
    rate: float = field(default=0.1, metadata={"help": "Rate."})
    steps: int = 10
    loss: Literal["nll", "dft"] = "nll"
    save: Literal["no", "steps"] = "steps"
    verbose: bool = True
    half: bool | None = None

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"steps must be >= 0, got {self.steps}")


def parser():
    return TrlParser((Model, Training), prog="toy")


@pytest.fixture
def run(tmp_path):
    def parse(*line, config=None, **kwargs):
        if config is not None:
            path = tmp_path / "run.yaml"
            path.write_text(config)
            line = ("--config", str(path), *line)
        return parser().parse_args_and_config(line, **kwargs)

    return parse


def test_the_command_line_alone(run):
    model, training = run("--path", "m", "--rate", "2e-5", "--use_adapter", "--names", "a", "b", "--no_verbose")
    assert model == Model("m", use_adapter=True, names=["a", "b"])
    assert training == Training(rate=2e-5, verbose=False)


def test_the_file_gives_defaults_and_required_options(run):
    model, training = run("--steps", "7", config="path: m\nsteps: 3\nrate: 0.5\n")
    assert (model.path, training.steps, training.rate) == ("m", 7, 0.5)


def test_yaml_values_become_what_the_command_line_would_have_read(run):
    model, training = run(
        config="path: 7\nrate: 2e-5\nsave: no\nnames: one\nextra: {a: {b: 1}}\nhalf: true\nuse_adapter: 'yes'\n"
    )
    assert (training.rate, training.save, training.half) == (2e-5, "no", True)
    assert (model.path, model.names, model.extra, model.use_adapter) == ("7", ["one"], {"a": {"b": 1}}, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("path: m\nstps: 3\n", r"run\.yaml, line 2: unknown option `stps`\. Did you mean steps\?"),
        ("path: m\nsteps: many\n", r"line 2: `steps` must be a whole number, got 'many'"),
        ("path: m\nsteps: 1.5\n", r"`steps` must be a whole number, got '1\.5'"),
        ("path: m\nsteps: true\n", "`steps` must be a whole number, got 'true'"),
        ("path: m\nrate: [1]\n", r"`rate` must be a number, got \[1\]"),
        ("path: m\nverbose: 3\n", "`verbose` must be true or false, got '3'"),
        ("path: m\nloss: dtf\n", r"`loss` must be one of nll, dft; got 'dtf'\. Did you mean dft\?"),
        ("path: {a: 1}\n", "`path` must be a plain value"),
        ("path: m\nsteps: -1\n", "steps must be >= 0, got -1"),
    ],
)
def test_bad_files(run, config, message):
    with pytest.raises(ValueError, match=message):
        run(config=config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--path", "m", "--step", "3"], r"Unknown option --step\. Did you mean --steps\?"),
        (["--path", "m", "--use-adaptr"], r"Did you mean --use_adapter\?"),
        (["--path", "m", "--zzz=3"], r"^Unknown option --zzz\.$"),
        (["--path", "m", "stray"], "Unexpected arguments: stray"),
    ],
)
def test_unknown_options_suggest_the_nearest(run, line, message):
    with pytest.raises(ValueError, match=message):
        run(*line)


def test_all_faults_of_a_file_are_reported_at_once(run):
    with pytest.raises(ValueError) as caught:
        run("--stray", config="steps: many\nstps: 3\nloss: dtf\nrate: 1\nrate: 2\nenv: [A]\nverbose: 3\n")
    messages = str(caught.value).split("\n")
    assert len(messages) == 7
    for part in (
        "line 1: `steps` must be a whole number, got 'many'.",
        "line 2: unknown option `stps`. Did you mean steps?",
        "line 3: `loss` must be one of nll, dft; got 'dtf'.",
        "line 5: `rate` already stands on line 4.",
        "`env` must map names",
        "line 7: `verbose` must be true or false, got '3'.",
        "Unknown option --stray.",
    ):
        assert sum(part in message for message in messages) == 1


@pytest.fixture
def command(tmp_path):
    """As `trl` of 0.26 parses: a parser without dataclasses, with one subparser per command."""

    def parse(*line, config, **kwargs):
        path = tmp_path / "run.yaml"
        path.write_text(config)
        main = TrlParser(prog="trl")
        commands = main.add_subparsers(dest="command", parser_class=TrlParser)
        commands.add_parser("train", dataclass_types=(Model, Training))
        commands.add_parser("show", dataclass_types=(Other,))
        return main.parse_args_and_config([*line, "--config", str(path)], **kwargs)

    return parse


@dataclass
class Other:
    steps: float = 1.0
    width: int = 80


def test_subparsers_take_a_file_and_arguments_override_it(command):
    given, remaining = command(
        "train",
        "--steps",
        "7",
        "--num",
        "2",
        config="path: m\nsteps: 3\nrate: 2e-5\n",
        return_remaining_strings=True,
    )
    assert (given.command, given.path, given.steps, given.rate) == ("train", "m", 7, 2e-5)
    assert remaining == ["--num", "2"]
    (given,) = command("show", config="steps: 3\n")
    assert (given.steps, given.width) == (3, 80)


def test_a_file_is_held_to_the_options_of_the_command_that_is_named(command):
    with pytest.raises(ValueError) as caught:
        command("train", config="path: m\nwidth: 3\nsteps: 1.5\n")
    assert "line 2: unknown option `width`" in str(caught.value)
    assert "line 3: `steps` must be a whole number, got '1.5'." in str(caught.value)
    with pytest.raises(ValueError, match=r"unknown option `rate`"):
        command("show", config="rate: 1\n")


def test_defaults_reach_every_subparser():
    main = TrlParser()
    commands = main.add_subparsers(dest="command")
    commands.add_parser("train", dataclass_types=(Model, Training))
    commands.add_parser("show", dataclass_types=(Other,))
    assert main.set_defaults_with_config(path="m", steps=4, odd=1) == ["--odd", "1"]
    assert main.parse_args(["train"]).path == "m"
    assert [main.parse_args([name]).steps for name in ("train", "show")] == [4, 4]


def test_unknown_options_can_be_returned(run):
    *_, remaining = run("--b", "2", config="path: m\na: [1, 2]\nflag: true\n", return_remaining_strings=True)
    assert remaining == ["--a", "1", "2", "--flag", "True", "--b", "2"]


def test_unknown_options_can_be_passed_over_with_a_warning(run):
    with pytest.warns(UserWarning, match="Ignored: Unknown option --b"):
        model, _ = run("--path", "m", "--b", "2", fail_with_unknown_args=False)
    assert model.path == "m"


def test_wrong_types_on_the_command_line_exit_with_2_and_no_usage(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("--path", "m", "--steps", "many")
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("toy: error: argument --steps: must be a whole number, got 'many'.\n")
    with pytest.raises(SystemExit):
        run("--path", "m", "--use_adapter", "maybe")
    assert ": must be true or false, got 'maybe'." in capsys.readouterr().err


def test_a_field_must_not_be_called_config():
    @dataclass
    class Other:
        config: str = ""

    with pytest.raises(ValueError, match="field `config`"):
        TrlParser(Other)


def mixture(tmp_path, text):
    path = tmp_path / "mixture.yaml"
    path.write_text(text)
    return TrlParser((SFTScriptArguments, DatasetMixtureConfig)).parse_args_and_config(["--config", str(path)])


def test_mixtures_and_column_mappings(tmp_path):
    script, mixed = mixture(
        tmp_path,
        "column_mapping: {question: prompt, answer: completion}\ntest_split_size: 0.1\n"
        "datasets:\n  - path: a.jsonl\n  - path: b\n    data_files: [x.csv]\n    columns: [text]\n",
    )
    assert script.renames() == {"question": "prompt", "answer": "completion"}
    assert mixed.datasets == [
        DatasetConfig("a.jsonl"),
        DatasetConfig("b", data_files=["x.csv"], columns=["text"]),
    ]
    assert mixed.test_split_size == 0.1
