"""Running a training command: in this process, or in those that accelerate starts."""

import argparse
import dataclasses
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from trl.scripts.config_file import ConfigFile, read_config, take_config_option

if TYPE_CHECKING:
    from trl.scripts.parser import TrlParser


class Plan(NamedTuple):
    """A training run: the script's arguments, the script's options in the config file, and the launch arguments."""

    script: list[str]
    config: ConfigFile | None
    launch: list[str]


def launch(name: str, module: str, argv: list[str]) -> int:
    """Run the training script `module` with the arguments of `trl <name>`; returns the exit status.

    A run on one device, without launch options, stays in this process; so does one inside a process that a launcher
    has started already. Anything else goes through `accelerate launch`, once the arguments have been checked here.
    """
    try:
        path, given = take_config_option(argv)
        config = None if path is None else read_config(path)
        if config is not None:
            config.apply_env()  # before torch and the Hub's client read the environment
        script = importlib.import_module(module)
        parser = script.make_parser()
        plan = make_plan(parser, given, config)
        here = not needs_accelerate(plan)
        if not here:
            parser.check_arguments(plan.script, plan.config)
    except (ValueError, FileNotFoundError) as error:
        print(f"trl {name}: error: {error}", file=sys.stderr)
        return 2
    # An error from here on is the run's own, or has been reported by it.
    if not here:
        return run_through_accelerate(module, plan)
    from trl.scripts.running import run_script

    return run_script(parser, script.main, plan.script, config=plan.config)


def make_plan(parser: "TrlParser", given: list[str], config: ConfigFile | None) -> Plan:
    """Sort what was given into the script's options and those of `accelerate launch`; the command line wins."""
    if "-h" in given or "--help" in given:
        return Plan(given, config, [])
    from trl.cli.launch_options import launch_actions, split_arguments, split_config

    known = set(parser.spellings())
    actions = launch_actions()
    parser.other_options.update([action.dest for action in actions.values()], ["accelerate_config"])
    split = split_arguments(given, script_options=known, launch=actions)
    if config is None:
        return Plan(split.script, None, split.launch)
    values, from_file = split_config(config.values, script_options=known, launch=actions)
    return Plan(split.script, dataclasses.replace(config, values=values), [*from_file, *split.launch])


def needs_accelerate(plan: Plan) -> bool:
    """Whether the run needs `accelerate launch`: launch options, a saved default configuration, several devices."""
    if "-h" in plan.script or "--help" in plan.script:
        return False
    if "LOCAL_RANK" in os.environ:
        if plan.launch:
            warnings.warn(
                f"Ignored in a process that a launcher started: {' '.join(plan.launch)}", stacklevel=2
            )
        return False
    if plan.launch:
        return True
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file).is_file() or torch.accelerator.device_count() > 1


def run_through_accelerate(module: str, plan: Plan) -> int:
    """Run the script in processes that accelerate starts; returns the exit status of the first that failed."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with config_arguments(plan.config) as from_file:
        command = [*plan.launch, "--module", module, *from_file, *plan.script]
        launcher = launch_command_parser()
        launcher.exit_on_error = False  # it would print all of its options first
        try:
            args = launcher.parse_args(command)
            spread_over_cpu(args)
            name_defaults(args)
        except (ValueError, argparse.ArgumentError) as error:
            print(f"trl {module.rpartition('.')[2]}: error: {error}", file=sys.stderr)
            return 2
        try:
            with own_signal_handlers():
                launch_command(args)
        except subprocess.CalledProcessError as error:
            return exit_status(error.returncode)
        except ChildFailedError as error:
            return exit_status(error.get_first_failure()[1].exitcode)
        except SignalException as stop:  # torch's launcher was told to stop, and has ended the processes
            return 128 + stop.sigval
    return 0


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Put this process's signal handlers back afterwards.

    torch's launcher (2.13) leaves handlers that raise an exception. A pool of workers forked later inherits them, and
    a busy worker that is told to stop swallows the exception and waits for ever.
    """
    known = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"} & set(signal.Signals.__members__)
    before = {name: signal.getsignal(signal.Signals[name]) for name in known}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in before.items():
                signal.signal(signal.Signals[name], handler or signal.SIG_DFL)


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


def spread_over_cpu(args: Any) -> None:
    """Start several CPU processes with torchrun (they talk over gloo); accelerate itself would ask for MPI.

    Changes the parsed launch arguments, for data-parallel runs on a CPU.

    Raises:
        ValueError: for GPU or sharded training on a CPU. accelerate (1.15) would start processes that each train a
            model of their own, or train with plain data parallelism, and report success.
    """
    import torch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    path = args.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    saved: Any = None if path is None else load_config_from_file(path)
    if not (args.cpu or (saved is not None and saved.use_cpu) or torch.accelerator.device_count() == 0):
        return
    asked = requested_kind(args, saved)
    if asked is not None:
        raise ValueError(
            f"{asked} training needs accelerators, and this run is on the CPU. Use --accelerate_config cpu, with "
            "--num_processes for several processes."
        )
    processes = args.num_processes or (saved.num_processes if saved else 1)
    if processes < 2 or args.mpirun_hostfile:
        return
    args.num_processes, args.cpu, args.multi_gpu = processes, False, True
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if args.num_cpu_threads_per_process is None and "OMP_NUM_THREADS" not in os.environ:
        args.num_cpu_threads_per_process = max(1, (os.cpu_count() or 1) // processes)


def name_defaults(args: Any) -> None:
    """Set what accelerate would set where nobody said otherwise; it would tell the user to pass each of these.

    Changes the parsed launch arguments, unless they come with a configuration.
    """
    from accelerate.commands.config.config_args import default_config_file

    if args.config_file or Path(default_config_file).is_file():
        return
    for name, value in (("num_machines", 1), ("mixed_precision", "no"), ("dynamo_backend", "no")):
        if getattr(args, name) is None:
            setattr(args, name, value)


def requested_kind(args: Any, saved: Any) -> str | None:
    """The kind of distributed training that only accelerators can do, if that was asked for."""
    flags = {
        "FSDP": args.use_fsdp,
        "DEEPSPEED": args.use_deepspeed,
        "MEGATRON_LM": args.use_megatron_lm,
        "MULTI_GPU": args.multi_gpu,
    }
    flagged = next((kind for kind, on in flags.items() if on), None)
    kind = flagged or (saved.distributed_type.value if saved is not None else "NO")
    return None if kind in ("NO", "MULTI_CPU") else kind


def exit_status(returncode: int) -> int:
    """The status to exit with for a child's return code; killed by signal n is 128 + n, as in a shell."""
    return 128 - returncode if returncode < 0 else returncode
