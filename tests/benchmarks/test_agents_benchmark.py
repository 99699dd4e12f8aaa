"""The benchmark of agents runs; it stops if its two sides do different work."""

from benchmarks.agents import main


def test_a_tiny_run():
    found = main(["--tiny", "--cases", "engine", "http"])
    assert [result["case"] for result in found] == ["engine", "engine", "http"]
    assert all(result["value"] > 0 for result in found)
