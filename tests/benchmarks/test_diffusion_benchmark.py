"""The benchmark of diffusion models runs, and both sides do the same work."""

import json

import pytest
from benchmarks.diffusion import PHASES, Ours, Plain, check_same_work, main, parse


def test_both_sides_have_the_same_rewards_and_gradients():
    args, found = parse(["--tiny"]), []
    for side in (Ours(args), Plain(args)):
        seconds = [side.epoch(number) for number in range(2)]
        assert all(list(each) == list(PHASES) and min(each.values()) >= 0 for each in seconds)
        found.append({"rewards": side.rewards, "norms": side.norms})
    check_same_work(*found)
    assert len(found[0]["norms"]) == 2 and min(found[0]["norms"]) > 0
    found[1]["norms"][1] *= 1.01
    with pytest.raises(ValueError, match="norms"):
        check_same_work(*found)


def test_truncation_is_measured_from_the_step_that_is_given(capsys, caplog):
    caplog.set_level("ERROR", logger="trl")  # as main does; put back at the end
    (found,) = main(["--tiny", "--only", "2"])
    assert found["first"] == 2 and found["seconds"] > 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
