"""The benchmark of agents runs; it stops if its two sides do different work."""

from multiprocessing import get_context

from benchmarks.agents import main

from benchmarks import agents


def test_a_tiny_run():
    found = main(["--tiny", "--cases", "engine", "http"])
    assert [result["case"] for result in found] == ["engine", "engine", "http"]
    assert all(result["value"] > 0 for result in found)


def test_growth_is_measured_by_two_processes_in_turn(monkeypatch):
    monkeypatch.setattr(agents, "get_context", lambda _: get_context("fork"))  # of what this process has imported
    found = main(["--tiny", "--cases", "growth"])
    assert [result["case"] for result in found] == ["growth"] * 3
    assert all(result["value"] > 0 for result in found)
