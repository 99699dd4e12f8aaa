"""`--launch slurm`: a training command as a job of SLURM, which is written beside the run and submitted."""

import argparse
import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from trl.scripts.config_file import ConfigFile

_SET_BY_JOB = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
_RESUMED = {"enable_jit_checkpoint": "true", "resume_from_checkpoint": "true", "hang_timeout": "7200"}
"""Of a job that is stopped and queued again: it saves at SIGTERM, goes on from there, and does not wait for ever."""

_COUNTS = {"nodes": (1, 1, 10**4), "gpus_per_node": (0, 8, 64), "vllm_nodes": (0, 0, 1), "vllm_gpus": (0, 0, 63)}
"""The least, the default and the most of the options that count."""


class Cluster(NamedTuple):
    """Where a job runs: machines that train, GPUs of each (0: a process on its CPUs), a machine or some GPUs of the
    only one for vLLM, and options of `sbatch`; with `is_dry` the job is not submitted."""

    nodes: int
    gpus: int
    vllm_nodes: int
    vllm_gpus: int
    sbatch: list[str]
    is_dry: bool


def take_cluster(words: list[str], config: ConfigFile | None) -> tuple[Cluster | None, list[str], ConfigFile | None]:
    """The cluster of `--launch slurm` (None without it), and the words and the config without these options.

    Raises: argparse.ArgumentError, ValueError for values that are not allowed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--launch", choices=["slurm"])
    for name, (_, default, _) in _COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sbatch", type=shlex.split, default=[])
    parser.add_argument("--dry_run", nargs="?", const="true", default="false")
    names = {action.dest for action in parser._actions}
    if "--sbatch" in words[:-1]:  # its value begins as an option does
        place = words.index("--sbatch")
        words = [*words[:place], f"--sbatch={words[place + 1]}", *words[place + 2 :]]
    values = {} if config is None else config.values
    from_file = [f"--{name}={values[name]}" for name in names & values.keys()]
    options, rest = parser.parse_known_args([*from_file, *words])
    if options.launch is None:
        return None, words, config
    if config is not None:
        config = dataclasses.replace(config, values={name: values[name] for name in values if name not in names})
    for name, (least, _, most) in _COUNTS.items():
        if not least <= getattr(options, name) <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {getattr(options, name)}.")
    is_dry = options.dry_run.lower() in ("true", "yes", "1")
    return Cluster(*[getattr(options, name) for name in _COUNTS], sbatch=options.sbatch, is_dry=is_dry), rest, config


def submit(
    name: str, cluster: Cluster, words: list[str], config: ConfigFile | None, *, launched: Collection[str],
    known: Collection[str],
) -> int:  # fmt: skip
    """Write the job into `slurm/` of the output folder and submit it; returns the exit status of `sbatch`.

    `launched` are the names of options that are accelerate's, `known` the spellings of the script's.

    Raises: ValueError for options that a job sets itself, no `output_dir`, vLLM for a method that does not generate.
    """
    values = _values(words, config)
    if taken := [option for option in _SET_BY_JOB if option in launched]:
        raise ValueError(f"A SLURM job sets {', '.join(taken)} by itself. Leave it out, and give --nodes.")
    if not values.get("output_dir"):
        raise ValueError("--launch slurm needs --output_dir: the job and its logs are written there.")
    serves = "vllm_nodes" if cluster.vllm_nodes else "vllm_gpus" if cluster.vllm_gpus else None
    if serves and "--use_vllm" not in known:
        raise ValueError(f"trl {name} does not generate. Leave {serves} out.")
    if serves and not (cluster.gpus and values.get("model_name_or_path")):
        raise ValueError(f"{serves} needs --model_name_or_path and --gpus_per_node of at least 1.")
    if cluster.vllm_gpus and (cluster.nodes + cluster.vllm_nodes > 1 or cluster.vllm_gpus >= cluster.gpus):
        raise ValueError(
            f"vllm_gpus must be less than gpus_per_node={cluster.gpus} of one machine, got {cluster.vllm_gpus} with "
            f"nodes={cluster.nodes} and vllm_nodes={cluster.vllm_nodes}. For several machines give --vllm_nodes 1 "
            "alone."
        )
    folder = Path(values["output_dir"]).absolute() / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    line = list(words)
    if config is not None:
        path, settings = folder / "config.yaml", {**config.values, **({"env": config.env} if config.env else {})}
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        line = ["--config", str(path), *line]
    if "config_file" not in launched:
        line += ["--accelerate_config", "multi_gpu" if cluster.gpus else "cpu"]
    for option, value in _RESUMED.items():
        line += [f"--{option}", value] if f"--{option}" in known and option not in values else []
    path = folder / "job.sh"
    path.write_text(job_script(name, cluster, line, values, folder), encoding="utf-8")
    print(f"The job is in {path}, its logs will be beside it.")
    if cluster.is_dry:
        print("Dry run: nothing was submitted.")
        return 0
    if shutil.which("sbatch") is None:
        print(f"trl {name}: error: sbatch is not on this machine. On a login node: sbatch {path}", file=sys.stderr)
        return 2
    return subprocess.run(["sbatch", str(path)], check=False).returncode


def job_script(name: str, cluster: Cluster, line: list[str], values: Mapping[str, str], folder: Path) -> str:
    """The text of a job that runs `trl NAME` with the options of `line`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(loader=PackageLoader("trl", "cli"), undefined=StrictUndefined)
    return jinja.get_template("slurm.sh").render(
        name=name, job=shlex.quote(values.get("run_name") or f"trl-{name}"), folder=shlex.quote(str(folder)),
        here=shlex.quote(str(Path.cwd())), trl=f"{shlex.quote(sys.executable)} -m trl.cli", words=shlex.join(line),
        model=shlex.quote(values.get("model_name_or_path", "")), per_node=max(cluster.gpus - cluster.vllm_gpus, 1),
        **cluster._asdict(),
    )  # fmt: skip


def _values(words: list[str], config: ConfigFile | None) -> dict[str, str]:
    """The options of the config file and the command line by name, as they are written."""
    values = {} if config is None else {name: str(value) for name, value in config.values.items()}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, is_joined, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            values[option.replace("-", "_")] = value if is_joined else after
    return values
