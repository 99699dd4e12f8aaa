"""Unknown options are told before missing ones and wrong values, by every command."""

import pytest

from trl.cli.main import COMMANDS, main
from trl.options.spelling import did_you_mean
from trl.scripts.plain_parser import PlainParser


def parser():
    made = PlainParser(prog="toy")
    made.add_argument("--model", required=True)
    made.add_argument("--size", type=int)
    made.add_argument("--save", choices=["no", "steps"])
    return made


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--modl", "x"], "toy: error: Unknown option --modl. Did you mean --model?"),
        (["--model", "x", "--siz", "1"], "toy: error: Unknown option --siz. Did you mean --size?"),
        (["--size", "1"], "toy: error: the following arguments are required: --model"),
        (
            ["--model", "x", "--save", "step"],
            "toy: error: argument --save: invalid choice: 'step' (choose from 'no', 'steps') Did you mean steps?\n",
        ),
        (["--model", "x", "stray"], "toy: error: Unexpected arguments: stray. "),
    ],
)
def test_errors_are_one_message_without_the_usage(capsys, line, said):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(line)
    assert stop.value.code == 2 and capsys.readouterr().err.startswith(said)


def test_what_is_required_stays_so(capsys):
    made = parser()
    for line in (["--modl", "x"], ["--help"]):
        with pytest.raises(SystemExit):
            made.parse_args(line)
        assert [action.dest for action in made._actions if action.required] == ["model"]
    assert "[-h] --model MODEL" in capsys.readouterr().out
    assert parser().parse_args(["--model", "m", "--size", "2"]).size == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_the_unknown_option_and_the_nearest(name, capsys):
    assert main([name, "--hlp", "x"]) == 2
    said = capsys.readouterr().err
    assert f"trl {name}: error: Unknown option --hlp. Did you mean --help?" in said
    assert "required" not in said and "missing" not in said


NAMES = [
    "lr_scheduler_type", "save_only_model", "model_init_kwargs", "model_name_or_path", "datasets", "dataset_name",
    "num_train_epochs", "per_device_train_batch_size", "learning_rate", "loss", "report_to",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--learning-rat", "--learning_rate"),
        ("--Epoch", "--num_train_epochs"),
        ("--lr", "--learning_rate or --lr_scheduler_type"),
        ("--dataset", "--dataset_name"),
        ("--batch_size", "--per_device_train_batch_size"),
    ],
)
def test_the_nearest_name_and_then_those_that_it_abbreviates(name, expected):
    assert did_you_mean(name, NAMES, prefix="--") == f" Did you mean {expected}?"
