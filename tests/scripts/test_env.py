import torch

from trl.scripts import env


def test_prints_versions_to_paste(capsys):
    assert env.main([]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == "Copy-paste the following information when reporting an issue:"
    entries = dict(line.removeprefix("- ").split(": ", 1) for line in lines[2:] if line.startswith("- "))
    assert list(entries)[:5] == [
        "Platform",
        "Python version",
        "TRL version",
        "Accelerator(s)",
        "PyTorch version",
    ]
    assert entries["PyTorch version"] == torch.__version__


def test_an_accelerator_that_is_built_in_but_not_there_is_not_listed(monkeypatch):
    def found(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    assert env.accelerators() == "none (CPU)"


def test_the_saved_accelerate_config_is_listed(tmp_path, monkeypatch):
    saved = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(saved))
    assert env.accelerate_config() == "not found"
    saved.write_text("num_processes: 2\n")
    assert env.accelerate_config() == "\n  - num_processes: 2"
