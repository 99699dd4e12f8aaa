"""Tables in the terminal show what they were given, and nothing is read as markup."""

import codecs
import io
import sys

import pytest
from tqdm import tqdm

from trl.reporting.tables import print_prompt_completions_sample

ROWS = 6


def sample(num_samples):
    print_prompt_completions_sample(
        [f"p{i}" for i in range(ROWS)],
        [[{"role": "assistant", "content": f"c{i}"}] for i in range(ROWS)],
        {"length": [None, 1.0, 2.0, 3.0, 4.0, 5.0]},
        [0.125] * ROWS,
        step=42,
        num_samples=num_samples,
    )


def test_a_sample_is_printed(capsys):
    sample(2)
    out = capsys.readouterr().out
    assert sum(f"p{i} " in out for i in range(ROWS)) == 2
    sample(2)
    assert capsys.readouterr().out == out
    sample(0)
    assert capsys.readouterr().out == ""


def test_long_names_leave_room_for_the_texts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    scores = {name: [1.0] for name in ("math_reward_func", "coding_reward_func", "length_reward_func")}
    print_prompt_completions_sample(["question"], ["answered"], scores, [-123456.789], step=1)
    out = capsys.readouterr().out
    assert all(word in out for word in ("question", "answered", "-123456.79", "1.00"))


def test_messages_of_every_kind(capsys):
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "look"}, {"type": "image"}],
        "tool_calls": [{"function": {"name": "add", "arguments": "1"}}],
    }
    print_prompt_completions_sample([[message]], ["[red]x"], {}, [0.0], 1)
    out = capsys.readouterr().out
    assert all(word in out for word in ("User", "look", "<image>", "add(1)", "[red]x"))


def test_a_table_begins_on_a_line_of_its_own_under_a_progress_bar(capsys):
    with tqdm(total=2, file=sys.stdout, mininterval=0) as bar:
        bar.update()
        capsys.readouterr()
        sample(1)
        out = capsys.readouterr().out
    before, panel, _ = out.partition("\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}")
    assert panel and not before.rpartition("\r")[2].strip()  # the bar was wiped before the panel's first corner
    assert "50%" in out  # and is shown again behind it


@pytest.mark.parametrize(
    ("encoding", "shown"), [("cp1252", "?\u00e9?"), ("ascii", "???"), ("utf-8", "\u6c34\u00e9\u2713")]
)
def test_a_character_that_the_console_lacks_is_replaced(encoding, shown, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    print_prompt_completions_sample(["water"], ["\u6c34\u00e9\u2713"], {}, [0.0], 1)
    stdout.flush()
    assert shown in stdout.buffer.getvalue().decode(encoding)


def test_a_stdout_of_another_kind_is_left_as_it_is(monkeypatch):
    stdout = codecs.getwriter("utf-8")(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", stdout)
    print_prompt_completions_sample(["water"], ["\u6c34"], {}, [0.0], 1)
    assert "\u6c34" in stdout.getvalue().decode()
