"""`trl plan METHOD`: the memory of a run before anything but the model's config is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.reporting.tables import open_console
from trl.scripts.plain_parser import PlainParser

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trl.scripts.planning.plan import Plan
    from trl.scripts.planning.run import Run

METHODS = ("sft", "reward", "dpo", "orpo", "cpo", "kto", "bco", "gkd", "distillation", "grpo", "rloo", "online-dpo")
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
    from trl.scripts.planning.plan import planned
    from trl.scripts.running import CommandError, notes_shown, report, reporting_input_errors

    parser = make_parser()
    options, words = parser.parse_known_args(argv)
    try:
        with reporting_input_errors():
            run = run_for(options.method, words, options.gpus, options.memory)
            with notes_shown():
                made = planned(run, levers=not options.no_levers)
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
    from trl.scripts.planning.plan import as_words, planned

    is_named = isinstance(config, (str, Path))
    if is_named:
        options["config" if str(config).endswith((".yaml", ".yml")) else "model_name_or_path"] = config
    run = run_for(method, as_words(options), gpus, memory, None if is_named else config)
    return planned(run, levers=levers)


def run_for(
    method: str, words: list[str], gpus: int, memory: str | None = None, config: "PretrainedConfig | None" = None
) -> "Run":
    """What is planned, of the words of a command line; `config` is that of its model if that is at hand."""
    from transformers import training_args

    from trl.cli.launch import make_plan
    from trl.models.switches import holding
    from trl.options import training
    from trl.scripts.config_file import read_config, take_config_option
    from trl.scripts.planning.plan import memory_of
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
    split = make_plan(parser, words, None if path is None else read_config(path))
    with holding([training_args, training], "is_torch_bf16_gpu_available", lambda: True):  # on the GPU that is planned
        script_args, args, model_args, *_ = parser.parse_with(split.script, split.config)
    options = {**vars(model_args), **vars(script_args), **vars(args)}
    if refused := [name for name in _UNPLANNED if options.get(name)]:
        raise ValueError(f"{refused[0]} is not planned, got true. Leave it out.")
    if config is None and model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing. Give the folder of a model, or its name on the Hub.")
    config = config or _config(str(model_args.model_name_or_path), model_args)
    frozen = {
        what: _config(str(options[name]), model_args)
        for name, what in _MODELS.items()
        if options.get(name) not in (None, getattr(type(args), name, None))  # RLOO names a model that it does not load
    }
    if options.get("teacher_model_server_url"):
        frozen.pop("teacher", None)
    sharding = sharding_of(split.launch.get("config_file"), gpus, half=bool(args.bf16))
    size = None if memory is None else memory_of(memory)
    run = Run(method, config.get_text_config(), args, model_args, sharding, frozen, size)
    if run.vllm and size is None:
        raise ValueError(f"memory is missing: vLLM takes {run.vllm:.0%} of the GPU. Give its size, such as 80GB.")
    return run


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
    sharing, several = plan.sharding, plan.sharding.devices > 1
    over, on_each = (f"{sharing.devices} GPUs with {sharing.name}", " on each GPU") if several else (sharing.name, "")
    rows = f"{plan.rows} {'row' if plan.rows == 1 else 'rows'} of {plan.lengths.row:,} tokens{on_each}"
    console.print(f"{plan.method}, {plan.weights / 1e6:,.0f} million weights, {over}", style="bold")
    console.print(f"Micro-batches of {rows}; the peak is in the {plan.phase}.\n")
    width = max(map(len, plan.parts))
    for name, size in plan.parts.items():
        is_less = name == "gradients" and plan.gradients > 1.01 * size
        after = f"   {size_of(plan.gradients)} after the backward pass" if is_less else ""
        console.print(f"{name:<{width}} {size_of(size):>11}{after}", markup=False)
    console.print(f"{'together':<{width}} {size_of(plan.peak):>11}", style="bold")
    if plan.memory is not None:
        verdict, batch = "fits" if plan.fits else "does not fit", f"rows of a micro-batch{on_each}"
        console.print(f"\nIt {verdict} in {size_of(plan.memory)}. {_largest(plan)}", style="bold")
        sizes = {batch: plan.largest_batch, "tokens of a row": plan.largest_length}
        for name, number in sizes.items() if any(sizes.values()) else ():
            console.print(f"  {name:<{len(batch)}}  {f'{number:,}' if number else 'not even one'}")
    if plan.levers:
        console.print("\nLevers, each alone", style="bold")
        width = max(len(lever.name) for lever in plan.levers)
        for lever in plan.levers:
            console.print(f"  {lever.name:<{width}} {size_of(lever.frees):>10}  {lever.setting}", markup=False)
    console.print("\nNot counted: the driver's context, NCCL and fragmentation (1 to 2 GiB of a GPU).")
