"""The commands of `trl`, and how one is picked."""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

from trl import __version__


class Command(NamedTuple):
    """One command: its module, what `trl --help` says of it, and how it is run.

    A "plain" module has `main(argv) -> int`, a "training" one `make_parser()` and a `main` that takes its dataclasses.
    """

    module: str
    help: str
    kind: Literal["plain", "training"] = "plain"


_TRAINING = {
    "sft": "fine-tune a model on text, prompts with answers, or conversations",
    "reward": "train a reward model on preferred and rejected answers",
    "dpo": "train a model on preferred and rejected answers (DPO and its family)",
    "orpo": "train a model on preferred and rejected answers, without a reference (ORPO)",
    "cpo": "train a model on preferred and rejected answers, without a reference (CPO, SimPO)",
    "kto": "train a model on answers that are marked good or bad",
    "bco": "train a model on answers that are marked good or bad (BCO)",
    "prm": "train a reward model on solutions whose steps are marked right or wrong",
    "gkd": "train a student on a teacher's distributions (distillation)",
    "gold": "train a student on a teacher's distributions, also with another tokenizer (GOLD)",
    "distillation": "train a student on a teacher's distributions, on its own completions of prompts",
    "teach": "write a teacher's most likely tokens beside each row, to distil without the teacher",
    "grpo": "train a model on rewards of its own answers, group by group (GRPO)",
    "rloo": "train a model on rewards of its own answers (REINFORCE leave-one-out)",
    "online-dpo": "train a model on comparisons of its own answers (online DPO)",
    "nash-md": "train a model to be preferred to a mixture of itself and its reference (Nash-MD)",
    "xpo": "train a model on comparisons with its reference's answers, with optimism (XPO)",
}
_PLAIN = {
    "inspect": "show a data set as training would see it: trained tokens, lengths, faults",
    "report": "show a run, or several, on a page: curves, completions, what went wrong",
    "plan": "print the memory of a run before it is started, what fits, and what each lever frees",
    "compare": "let a judge compare the answers of two models",
    "merge": "add an adapter to its base model and save the result",
    "consolidate": "save the sharded weights of a checkpoint as a model",
    "chat": "talk to a model",
    "serve": "serve a model with OpenAI's API, for agents and as a teacher",
    "vllm-serve": "serve a model with vLLM, for training commands that generate with it",
    "data": "make a small data set to try a method with; nothing to download",
    "quickstart": "train a tiny model to sort digits, in stages; nothing to download",
    "env": "print versions and hardware, for bug reports",
    "completion": "print a completion script for bash, zsh or fish",
}
_OTHER_NAMES = {"vllm-serve-async": "vllm-serve", "online_dpo": "online-dpo", "nash_md": "nash-md"}
_GRPO = "use trl grpo with --loss_type and other options (docs/methods/grpo_variants.md)"
# Methods without a command: what to run instead.
_ELSEWHERE = {
    "ppo": "run examples/scripts/ppo/ppo.py, or build PPOTrainer (docs/methods/ppo_dataset.md)",
    "ddpo": "run examples/scripts/ddpo.py, or build DDPOTrainer (docs/methods/ddpo.md)",
    "alignprop": "run examples/scripts/alignprop.py, or build AlignPropTrainer (docs/methods/alignprop.md)",
    "diffusion-grpo": "run examples/small_diffusion.py, or build DiffusionGRPOTrainer (docs/methods/diffusion_grpo.md)",
    "iterative-sft": "build IterativeSFTTrainer (docs/methods/iterative_sft.md)",
    "minillm": "build MiniLLMTrainer (docs/methods/distillation.md)",
    "papo": "build PAPOTrainer (docs/methods/papo.md)",
    "sdft": "run examples/self_distillation.py, or build SDFTTrainer (docs/methods/distillation.md)",
    "sdpo": "run examples/self_distillation.py, or build SDPOTrainer (docs/methods/distillation.md)",
    "gfpo": "build GFPOTrainer (docs/methods/grpo_variants.md)",
    **dict.fromkeys(("gspo", "dr-grpo", "dapo", "bnpo", "cispo", "sapo"), _GRPO),
    "simpo": "use trl cpo with --loss_type simpo --cpo_alpha 0 (docs/methods/cpo.md)",
    **dict.fromkeys(("ipo", "mpo", "rdpo"), "use trl dpo with --loss_type (docs/methods/dpo.md)"),
    **dict.fromkeys(("rm", "reward-modeling", "reward_modeling"), "use trl reward"),
    **dict.fromkeys(("train", "pt", "pretrain"), "use trl sft, or the method's command"),
}
COMMANDS = {
    name: Command(f"trl.scripts.{name.replace('-', '_')}", text, "training" if name in _TRAINING else "plain")
    for name, text in {**_TRAINING, **_PLAIN}.items()
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the process's arguments if None) names; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, rest = _OTHER_NAMES.get(arguments[0], arguments[0]), arguments[1:]
    if name not in COMMANDS:
        from trl.options.spelling import did_you_mean

        if (way := _ELSEWHERE.get(name.replace("_", "-"))) is not None:
            print(f"trl: error: {name} has no command: {way}.", file=sys.stderr)
            return 2
        near = did_you_mean(name, COMMANDS, prefix="trl ")
        listing = ", ".join(COMMANDS)
        print(f"trl: error: unknown command {name!r}: the commands are {listing}.{near}", file=sys.stderr)
        return 2
    # A log file has no bars of loaded weights, downloads and maps.
    if argv is None and not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    # On import bitsandbytes warns of a kernel for 4-bit products on CPUs, in every command.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # The process is ours, and ends with the help text or the script.
    if argv is None and (name == "completion" or {"-h", "--help"} & set(rest)):
        _leave_out_peft()
    try:
        return _run(name, rest)
    finally:
        if argv is None:  # a second Ctrl-C while the process ends prints no traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run(name: str, rest: list[str]) -> int:
    try:
        if COMMANDS[name].kind == "training":
            from trl.cli.launch import launch

            return launch(name, COMMANDS[name].module, rest)
        return importlib.import_module(COMMANDS[name].module).main(rest) or 0
    except KeyboardInterrupt:  # while modules are imported or the launcher starts
        is_training = COMMANDS[name].kind == "training"
        print(f"trl {name}: interrupted{', no step was trained' if is_training else ''}.", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse ends the process on --help and on bad arguments
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def overview() -> str:
    """What `trl --help` prints."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return f"""usage: trl <command> [options]

Post-train transformer language models.

commands:
{lines}

`trl <command> --help` lists the options of a command. Training commands read options from a YAML file
with --config, take any option of `accelerate launch` and --accelerate_config <profile or file>, and are submitted as
a job by --launch slurm."""


def _leave_out_peft() -> None:
    """Keep transformers from importing PEFT in this process, which only prints a help text.

    `transformers.training_args` (5.19) imports it for a type check: two thirds of the time to the help text. Remove
    once `transformers.trainer_utils` imports PEFT where it uses it.
    """
    utils = importlib.import_module("transformers.utils")
    setattr(utils, "is_peft_available", lambda *_, **__: False)  # noqa: B010 - the module's own name, replaced
