import json
import os
import signal

import pytest

from trl.cli import launch as launch_module
from trl.cli.launch import exit_status, launch

TOY = "tests.cli.toy_script"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No launcher around this process, no saved accelerate configuration."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "no_default.yaml"))
    # torch's launcher (2.13) leaves handlers behind that make a later pool of workers impossible to stop.
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def records(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def config(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_a_plain_run_stays_in_this_process(tmp_path):
    assert launch("toy", TOY, ["--record", str(tmp_path), "--size", "3"]) == 0
    (seen,) = records(tmp_path)
    assert (seen["pid"], seen["size"]) == (os.getpid(), 3)


def test_inside_a_started_process_nothing_is_launched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    path = config(tmp_path, f"record: {tmp_path}\nnum_processes: 4\n")
    with pytest.warns(UserWarning, match="Ignored in a process that a launcher started: num_processes"):
        assert launch("toy", TOY, ["--config", path]) == 0
    assert records(tmp_path)[0]["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--sise", "1"], "Unknown option --sise. Did you mean --size?"),
        (["--num_proceses", "1"], "Unknown option --num_proceses. Did you mean --num_processes?"),
        (["--num_processes", "2", "--sise", "1"], "Unknown option --sise. Did you mean --size?"),
        (["--accelerate_config", "zero9"], "accelerate_config must be a profile (cpu, fsdp1,"),
        (["--config", "nowhere.yaml"], "The config file nowhere.yaml does not exist"),
    ],
)
def test_bad_input_is_one_message_and_status_2(capsys, monkeypatch, line, message):
    monkeypatch.setattr(launch_module, "run_through_accelerate", lambda *_: pytest.fail("was launched"))
    assert launch("toy", TOY, line) == 2
    assert capsys.readouterr().err.startswith(f"trl toy: error: {message}")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (["--accelerate_config", "fsdp1"], "FSDP"),
        (["--accelerate_config", "fsdp2", "--num_processes", "2"], "FSDP"),
        (["--accelerate_config", "zero3"], "DEEPSPEED"),
        (["--accelerate_config", "multi_gpu"], "MULTI_GPU"),
        (["--use_fsdp", "--num_processes", "2"], "FSDP"),
    ],
)
def test_what_needs_accelerators_is_refused_on_a_cpu(capsys, monkeypatch, line, kind):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda args: pytest.fail("was launched"))
    assert launch("toy", TOY, line) == 2
    assert f"{kind} training needs accelerators" in capsys.readouterr().err


def test_a_launch_option_with_a_bad_value_is_one_message_and_status_2(capsys, monkeypatch):
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda args: pytest.fail("was launched"))
    assert launch("toy", TOY, ["--num_processes", "two"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "trl toy: error: argument --num_processes/--num-processes: invalid int value: 'two'"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_launcher_that_is_told_to_stop_ends_with_that_status(monkeypatch, number, status):
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def stop(args):
        raise SignalException("told to stop", sigval=number)

    monkeypatch.setattr("accelerate.commands.launch.launch_command", stop)
    assert launch("toy", TOY, ["--num_processes", "1"]) == status


def test_the_process_of_a_script_says_itself_that_it_was_interrupted(monkeypatch):
    def stop(args):
        raise KeyboardInterrupt  # accelerate waits for one process with `subprocess`

    monkeypatch.setattr("accelerate.commands.launch.launch_command", stop)
    assert launch("toy", TOY, ["--num_processes", "1"]) == 130


def test_sharding_is_left_to_accelerate_where_there_are_accelerators(monkeypatch):
    launched = []
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", launched.append)
    assert launch("toy", TOY, ["--accelerate_config", "fsdp2", "--num_processes", "2", "--size", "4"]) == 0
    (args,) = launched
    assert (args.module, args.training_script, args.training_script_args) == (True, TOY, ["--size", "4"])
    assert args.config_file.endswith("fsdp2.yaml") and "ACCELERATE_USE_CPU" not in os.environ


def test_exit_status():
    assert [exit_status(code) for code in (0, 3, -9)] == [0, 3, 137]


@pytest.mark.slow
def test_launch_options_start_a_process_whose_status_comes_back(tmp_path):
    path = config(tmp_path, f"record: {tmp_path}\naccelerate_config: cpu\nmixed_precision: no\nsize: 5\n")
    assert launch("toy", TOY, ["--config", path, "--status", "7"]) == 7
    (seen,) = records(tmp_path)
    assert seen["pid"] != os.getpid()
    assert (seen["size"], seen["ACCELERATE_USE_CPU"].lower()) == (5, "true")


@pytest.mark.slow
@pytest.mark.distributed
def test_several_processes_on_the_cpu(tmp_path):
    line = ["--record", str(tmp_path), "--accelerate_config", "cpu", "--num_processes", "2"]
    assert launch("toy", TOY, [*line, "--main_process_port", "0"]) == 0
    seen = records(tmp_path)
    assert [(entry["LOCAL_RANK"], entry["WORLD_SIZE"]) for entry in seen] == [("0", "2"), ("1", "2")]
    assert all(entry["ACCELERATE_USE_CPU"] == "true" for entry in seen)
