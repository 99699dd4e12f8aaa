"""`trl plan METHOD`: the memory of a run before anything but the model's config is loaded."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.cli.main import COMMANDS
from trl.options.spelling import did_you_mean
from trl.reporting.tables import open_console
from trl.scripts.plain_parser import PlainParser, unknown_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trl.scripts.planning.plan import Plan
    from trl.scripts.planning.run import Run

_NO_METHODS = ("gold", "nash-md", "prm", "teach", "xpo")
METHODS = tuple(name for name, command in COMMANDS.items() if command.kind == "training" and name not in _NO_METHODS)
_UNPLANNED = ("activation_offloading", "load_in_8bit")
_MODELS = {"ref_model_name_or_path": "reference", "teacher_model_name_or_path": "teacher",
    "reward_model_name_or_path": "reward model", "reward_model_path": "reward model"}  # fmt: skip


def make_parser() -> PlainParser:
    """The options of `trl plan` itself."""
    parser = PlainParser(
        prog="trl plan",
        usage="trl plan METHOD --model_name_or_path MODEL [--gpus N] [--memory 80GB] [options of the method]",
        description="Print the memory of a run on each GPU, what fits, and what each lever frees. Takes the options of "
        "`trl METHOD`, --config and --accelerate_config too. Loads the model's config only.",
    )
    parser.add_argument("method", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--gpus", type=int, default=1, help="processes with a GPU each (default: 1)")
    parser.add_argument("--memory", metavar="SIZE", help="of a GPU, as 80GB or 24GiB: also print what fits")
    parser.add_argument("--no_levers", action="store_true", help="leave the table of levers out: faster")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and print; returns the exit status: 1 for a run that does not fit in `--memory`, 2 for wrong options."""
    from trl.scripts.running import CommandError, notes_shown, report, reporting_input_errors

    parser = make_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, rest = parser.parse_known_args(arguments)
    if options.method.replace("_", "-") not in METHODS:
        names = [action.dest for action in parser._actions]
        if misspelt := [word for word in rest if did_you_mean(word, names)]:
            parser.error("\n".join(unknown_arguments(misspelt, names)))
    try:
        with reporting_input_errors():
            run = run_for(options.method, rest, options.gpus)
            with notes_shown():
                made = _planned(run, options.memory, levers=not options.no_levers)
    except CommandError as error:
        return report(parser.prog, error)
    print_plan(made)
    return int(made.fits is False)


def plan(
    config: "str | Path | PretrainedConfig", *, method: str = "sft", gpus: int = 1, memory: str | None = None,
    levers: bool = False, **options: object,
) -> "Plan":  # fmt: skip
    """The memory of a run on each GPU, from its model's config alone.

    `config` is a YAML file of `trl METHOD`, a model's folder or name on the Hub, or a model's config. `memory` is that
    of a GPU (`"80GB"`): the plan then says what fits. `levers` also measures what each lever frees. `options` are those
    of the method's command, and `accelerate_config`. Raises: ValueError for options that do not fit; FileNotFoundError.

    Example:
        >>> from transformers import LlamaConfig
        >>> small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        >>> trl.plan(small, max_length=128, use_cpu=True).parts["weights"]  # doctest: +SKIP
        16679424.0
    """
    from trl.scripts.planning.levers import as_words

    given = None if isinstance(config, (str, Path)) else config
    named = "--config" if str(config).endswith((".yaml", ".yml")) else "--model_name_or_path"
    words = [named, str(config)] if given is None else []
    return _planned(run_for(method, [*words, *as_words(options)], gpus, given), memory, levers=levers)


def _planned(run: "Run", memory: str | None, *, levers: bool) -> "Plan":
    from trl.scripts.planning.levers import levers_of, with_fits
    from trl.scripts.planning.plan import memory_of, plan_of

    run = replace(run, memory=None if memory is None else memory_of(memory))
    if run.vllm and run.memory is None:
        raise ValueError(f"memory is missing: vLLM takes {run.vllm:.0%} of the GPU. Give its size, such as 80GB.")
    made = plan_of(run) if run.memory is None else with_fits(plan_of(run), run)
    return replace(made, levers=levers_of(made, run)) if levers else made


def run_for(method: str, words: list[str], gpus: int, given: "PretrainedConfig | None" = None) -> "Run":
    """What is planned, of the words of a command line; `given` is the config of its model if that is at hand."""
    from trl.cli.launch import make_plan
    from trl.scripts.config_file import read_config, take_config_option
    from trl.scripts.planning.run import Run
    from trl.scripts.planning.state import sharding_of
    from trl.scripts.training import method_parser

    method = method.replace("_", "-")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}. `trl plan` takes it first.")
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}.")
    parser = method_parser(method, "trl plan")
    path, words = take_config_option(words)
    file = None if path is None else read_config(path)
    split = make_plan(parser, words, file)
    # As on a GPU, which this machine may not have: transformers refuses bf16 without one, except on a CPU.
    names = {word.partition("=")[0].removeprefix("--").removeprefix("no_") for word in words}
    names |= {*(file.values if file else ())}
    on_cpu = [] if "use_cpu" in names else ["--use_cpu", "true"]
    script_args, args, model_args, *_ = parser.parse_with([*split.script, *on_cpu], split.config)
    args.use_cpu = args.use_cpu and "use_cpu" in names
    args.bf16 = args.bf16 if "bf16" in names else not (args.use_cpu or args.fp16 or args.weights)
    sharding = sharding_of(split.launch.get("config_file"), gpus, half=bool(args.bf16))
    if given is None and model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing. Give the folder of a model, or its name on the Hub.")
    config = _config(str(model_args.model_name_or_path), model_args) if given is None else given
    options = {**vars(script_args), **vars(args)}
    if refused := [name for name in _UNPLANNED if {**vars(model_args), **options}.get(name)]:
        raise ValueError(f"{refused[0]} is not planned, got true. Leave it out.")
    frozen = {
        what: _config(str(options[name]), model_args)
        for name, what in _MODELS.items()
        if options.get(name) not in (None, getattr(type(args), name, None))  # RLOO names a model that it does not load
    }
    if "teacher" in frozen and options.get("teacher_model_server_url"):
        del frozen["teacher"]
    return Run(method, config.get_text_config(), args, model_args, sharding, frozen)


def _config(name: str, model_args: Any) -> "PretrainedConfig":
    from trl.models.loading import load_config

    options = {"revision": model_args.model_revision, "trust_remote_code": model_args.trust_remote_code}
    config = load_config(name, options)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"'{name}' is an encoder-decoder, which is not planned. Give a decoder.")
    return config


def size_of(number: float) -> str:
    """Bytes in a unit that leaves few digits."""
    unit, name = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if number >= pair[0] / 10), (2**10, "KiB"))
    return f"{number / unit:,.1f} {name}"


def _largest(plan: "Plan") -> str:
    """The sentence before the largest numbers that fit, or in place of them."""
    if plan.largest_batch or plan.largest_length:
        return "The largest that fit, each with all else as it is:"
    if plan.state <= (plan.memory or 0):
        return "No batch size or length fits with all else as it is."
    return f"No batch size fits: weights, gradients and the optimiser step alone need {size_of(plan.state)}."


def print_plan(plan: "Plan") -> None:
    """Print what is planned, the memory of a device, what fits, and the levers."""
    console = open_console(highlight=False, soft_wrap=True)
    sharing, rows = plan.sharding, "row" if plan.rows == 1 else "rows"
    over = f"{sharing.devices} GPUs with {sharing.name}" if sharing.devices > 1 else sharing.name
    tokens, several = f"{plan.lengths.row:,} tokens", " on each GPU" if sharing.devices > 1 else ""
    console.print(f"{plan.method}, {plan.weights / 1e6:,.0f} million weights, {over}", style="bold")
    console.print(f"Micro-batches of {plan.rows} {rows} of {tokens}{several}; the peak is in the {plan.phase}.\n")
    width = max(map(len, plan.parts))
    for name, size in plan.parts.items():
        after = f"   {size_of(plan.gradients)} after the backward pass"
        is_less = name == "gradients" and plan.gradients > 1.01 * size
        console.print(f"{name:<{width}} {size_of(size):>11}{after * is_less}", markup=False)
    console.print(f"{'together':<{width}} {size_of(plan.peak):>11}", style="bold")
    if plan.memory is not None:
        verdict = "fits" if plan.fits else "does not fit"
        console.print(f"\nIt {verdict} in {size_of(plan.memory)}. {_largest(plan)}", style="bold")
        batch = f"rows of a micro-batch{several}"
        sizes = {batch: plan.largest_batch, "tokens of a row": plan.largest_length}
        for name, number in sizes.items() if any(sizes.values()) else ():
            console.print(f"  {name:<{len(batch)}}  {f'{number:,}' if number else 'not even one'}")
    if plan.levers:
        console.print("\nLevers, each alone", style="bold")
        width = max(len(lever.name) for lever in plan.levers)
        for lever in plan.levers:
            console.print(f"  {lever.name:<{width}} {size_of(lever.frees):>10}  {lever.setting}", markup=False)
    console.print("\nNot counted: the driver's context, NCCL and fragmentation (1 to 2 GiB of a GPU).")
