"""Small names of `trl.trainer.utils` for loops of a user's own; those of models and generation are tested there."""

import os
import socket

import pytest

from trl.trainer.utils import (
    add_bos_token_if_needed,
    add_eos_token_if_needed,
    ensure_master_addr_port,
)


def prompt(ids):
    return {"prompt_input_ids": ids, "prompt_attention_mask": [1] * len(ids)}


def answer(ids):
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


@pytest.mark.parametrize(
    ("bos", "ids", "expected"),
    [(1, [[5], [1, 5], []], [[1, 5], [1, 5], [1]]), (None, [[5], [], [1]], [[5], [], [1]])],
)
def test_prompts_begin_with_the_begin_token_once(bos, ids, expected):
    given = [part for each in ids for part in (len(each), prompt(each))]
    assert list(add_bos_token_if_needed(bos, *given)) == [prompt(each) for each in expected]


def test_answers_end_with_the_end_token_once():
    found = add_eos_token_if_needed(2, answer([7, 2]), answer([]))
    assert found == (answer([7, 2]), answer([2]))


def test_a_place_to_meet(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ensure_master_addr_port()
    assert os.environ["MASTER_ADDR"] == "localhost"
    with socket.socket() as server:
        server.bind(("localhost", int(os.environ["MASTER_PORT"])))
    chosen = os.environ["MASTER_PORT"]
    ensure_master_addr_port()
    assert os.environ["MASTER_PORT"] == chosen
    ensure_master_addr_port("10.0.0.1", 4321)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "4321")
