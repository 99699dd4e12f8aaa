"""Running a training command: in this process, or in those that accelerate starts."""

import argparse
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from trl.cli.slurm import submit, take_cluster
from trl.options.spelling import did_you_mean
from trl.scripts.config_file import ConfigFile, read_config, take_config_option

if TYPE_CHECKING:
    from trl.scripts.parser import TrlParser

PROFILES = Path(__file__).parent.parent / "accelerate_configs"
_RESERVED = ("help", "module", "no_python")  # options that are not the user's to give
_UNSAID = {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}  # else accelerate warns


class Plan(NamedTuple):
    """A training run: the script's arguments, the script's options in the config file, and the launch options."""

    script: list[str]
    config: ConfigFile | None
    launch: dict[str, Any]


def launch(name: str, module: str, argv: list[str]) -> int:
    """Run a training script in this process or, with launch options or devices, in those accelerate starts."""
    try:
        path, words = take_config_option(argv)
        config = None if path is None else read_config(path)
        if config is not None:
            config.apply_env()  # before torch and the Hub's client read the environment
        script = importlib.import_module(module)
        parser = script.make_parser()
        cluster, words, config = take_cluster(words, config)
        plan = make_plan(parser, words, config)
        if cluster is not None:
            parser.check_arguments(plan.script, plan.config)
            return submit(name, cluster, words, config, launched=plan.launch, known=parser._option_string_actions)
        args = None
        if needs_accelerate(plan):
            parser.check_arguments(plan.script, plan.config)
            args = accelerate_arguments(module, plan.launch)
    except (ValueError, FileNotFoundError, argparse.ArgumentError) as error:
        print(f"trl {name}: error: {error}", file=sys.stderr)
        return 2
    if args is not None:
        return run_through_accelerate(args, plan)
    from trl.scripts.running import run_script

    return run_script(parser, script.main, plan.script, config=plan.config)


def make_plan(parser: "TrlParser", words: list[str], config: ConfigFile | None) -> Plan:
    """The script's options and those of `accelerate launch`, apart; the command line wins over the file.

    Options that both or none know are the script's. Raises: argparse.ArgumentError, ValueError for launch options.
    """
    if {"-h", "--help"} & set(words):
        return Plan(words, config, {})
    launcher = launch_parser(parser._option_string_actions)
    known = launcher._option_string_actions
    parser.other_options.update(action.dest for action in known.values())
    parser.other_options.add("accelerate_config")
    from_file: list[str] = []
    if config is not None:
        for name, value in config.values.items():
            from_file += as_arguments(known[f"--{name}"], name, value) if f"--{name}" in known else []
        script_values = {name: value for name, value in config.values.items() if f"--{name}" not in known}
        config = dataclasses.replace(config, values=script_values)
    options, script = launcher.parse_known_args([*from_file, *words])
    return Plan(script, config, vars(options))


def launch_parser(script_options: Collection[str]) -> argparse.ArgumentParser:
    """A parser of the options of `accelerate launch` that are none of the script's, and of `--accelerate_config`."""
    from accelerate.commands.launch import launch_command_parser

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for action in launch_command_parser()._actions:
        action.option_strings = [text for text in action.option_strings if text not in script_options]
        if action.option_strings and action.dest not in _RESERVED:
            action.default = argparse.SUPPRESS
            parser._add_action(action)
    names = ("--accelerate_config", "--accelerate-config")
    parser.add_argument(*names, dest="config_file", type=profile_path, default=argparse.SUPPRESS)
    return parser


def as_arguments(action: argparse.Action, name: str, value: object) -> list[str]:
    """A value from a config file as it is written on the command line of `accelerate launch`."""
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be true or false, got {value!r}.")
        return [f"--{name}"] if value else []
    if isinstance(value, bool):  # YAML reads a bare `no` as false
        value = ("yes" if value else "no") if "no" in (action.choices or ()) else str(value).lower()
    return [f"--{name}", str(value)]


def profile_path(name_or_path: str) -> str:
    """The file of a built-in profile, or the path of the user's own; raises FileNotFoundError if it is neither."""
    profiles = {path.stem: str(path) for path in sorted(PROFILES.glob("*.yaml"))}
    if name_or_path in profiles:
        return profiles[name_or_path]
    if Path(name_or_path).is_file():
        return name_or_path
    allowed = f"a profile ({', '.join(profiles)}) or the path of a file"
    hint = did_you_mean(name_or_path, profiles)
    raise FileNotFoundError(f"accelerate_config must be {allowed}, got {name_or_path!r}.{hint}")


def needs_accelerate(plan: Plan) -> bool:
    """Whether the run needs `accelerate launch`: launch options, a saved default configuration, several devices."""
    if {"-h", "--help"} & set(plan.script):
        return False
    if "LOCAL_RANK" in os.environ:
        if plan.launch:
            names = ", ".join(sorted({*plan.launch} - {"nondefault"}))  # accelerate's note of what was given
            warnings.warn(f"Ignored in a process that a launcher started: {names}", stacklevel=2)
        return False
    if plan.launch:
        return True
    import torch

    return default_config() is not None or torch.accelerator.device_count() > 1


def default_config() -> str | None:
    """The file that `accelerate config` saved, if there is one."""
    from accelerate.commands.config.config_args import default_config_file

    return default_config_file if Path(default_config_file).is_file() else None


def accelerate_arguments(module: str, options: dict[str, Any]) -> argparse.Namespace:
    """The arguments of `accelerate launch` for a script; several CPU processes start with torchrun, over gloo.

    Raises: ValueError for sharded training on a CPU, where accelerate (1.15) trains unconnected models.
    """
    import torch
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(["--module", module])
    path = options.get("config_file") or default_config()
    vars(args).update({**(_UNSAID if path is None else {}), **options})
    saved: Any = None if path is None else load_config_from_file(path)
    if not (args.cpu or (saved is not None and saved.use_cpu) or torch.accelerator.device_count() == 0):
        return args
    flags = ("use_fsdp", "use_deepspeed", "use_megatron_lm", "multi_gpu")
    kind = "NO" if saved is None else saved.distributed_type.value
    kind = next((flag.removeprefix("use_").upper() for flag in flags if getattr(args, flag)), kind)
    if kind not in ("NO", "MULTI_CPU"):
        raise ValueError(f"{kind} training needs accelerators, got a CPU. Use --accelerate_config cpu.")
    processes = args.num_processes or (saved.num_processes if saved else 1)
    if processes > 1 and not args.mpirun_hostfile:
        args.num_processes, args.cpu, args.multi_gpu = processes, False, True
        os.environ["ACCELERATE_USE_CPU"] = "true"
        if args.num_cpu_threads_per_process is None and "OMP_NUM_THREADS" not in os.environ:
            args.num_cpu_threads_per_process = max(1, (os.cpu_count() or 1) // processes)
    return args


def run_through_accelerate(args: argparse.Namespace, plan: Plan) -> int:
    """Run the script in processes that accelerate starts; returns the exit status of the first that failed."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with config_arguments(plan.config) as from_file:
        args.training_script_args = [*from_file, *plan.script]
        try:
            launch_command(args)
        except subprocess.CalledProcessError as error:
            return exit_status(error.returncode)
        except ChildFailedError as error:
            return exit_status(error.get_first_failure()[1].exitcode)
        except SignalException as stop:  # torch's launcher was told to stop, and has ended the processes
            return 128 + stop.sigval
        except KeyboardInterrupt:  # the process of the script says how far it came
            return 128 + signal.SIGINT
    return 0


@contextmanager
def config_arguments(config: ConfigFile | None) -> Iterator[list[str]]:
    """`--config <file>` for the script: a file that holds its own options only, for as long as the script runs."""
    if config is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        path = Path(folder) / Path(config.path).name
        path.write_text(yaml.safe_dump(config.values, sort_keys=False), encoding="utf-8")
        yield ["--config", str(path)]


def exit_status(returncode: int) -> int:
    """The status to exit with for a child's return code; killed by signal n is 128 + n, as in a shell."""
    return 128 - returncode if returncode < 0 else returncode
