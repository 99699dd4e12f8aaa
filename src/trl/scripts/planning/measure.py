"""Memory of a micro-batch: measured on copies of the model with few layers of real width and no numbers.

Two copies differ by one layer of one kind; what grows from one to the other grows with every layer of that kind.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from trl.collators.language_modelling import DataCollatorForLanguageModeling
from trl.collators.preference import PairCollator
from trl.collators.reward import RewardCollator
from trl.collators.unpaired import UnpairedCollator
from trl.data.preference_rows import SIDES
from trl.experimental.ppo.ppo_method import ADVANTAGES
from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.decoders import OwnForward, fused_unsupported
from trl.generation.transformers.model_generate import cache_bytes
from trl.methods.method import Method, Scoring, Step
from trl.methods.online import ROLLOUT
from trl.models.packed.layout import Inputs
from trl.models.packed.small_copy import keep_layers, layer_kinds
from trl.models.packed.support import packing_of
from trl.models.parts import embedded_tokens, layers_of
from trl.models.reference import AdapterReference, FrozenModel
from trl.models.scoring.base import shares_prefix
from trl.models.scoring.causal import Scorer
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.scoring.values import PolicyAndValue, PolicyValueScorer
from trl.models.switches import enable_gradient_checkpointing, holding
from trl.models.teacher import FrozenTeacher, SelfTeacher
from trl.reporting.metrics import Processes
from trl.rollouts import experience as columns
from trl.rollouts.experience import Experience
from trl.scripts.planning.live_bytes import Bytes, LiveBytes, WithoutNumbers
from trl.scripts.planning.run import Run, core_of, meta_model, saved_dtype
from trl.tensors import heads
from trl.tensors.ragged import Ragged

FORWARD, HEAD, LAST_LAYER, FIRST_LAYER = (
    "forward", "logits and loss", "backward of the last layer", "backward of the first layer"
)  # fmt: skip
GENERATION = "generation"

_TOKEN = 5  # any
_LOGITS = 3  # copies of logits of which a token is chosen


def phases_of(run: Run) -> dict[str, Bytes]:
    """The peak of each phase of a micro-batch for all layers of the run's config, measured once."""
    half, kinds = run.sharding.half, layer_kinds(run.config)
    if half in run.phases:
        return run.phases[half]
    total = Counter(kinds)
    base = sorted({*map(kinds.index, total)} | ({0, 1} if len(total) == 1 and len(kinds) > 1 else set()))
    phases = _peaks(run, keep_layers(run.config, base))
    sums = dict(phases)
    for kind, count in (total - Counter(kinds[place] for place in base)).items():
        place = next(n for n, other in enumerate(kinds) if other == kind and n not in base)
        more = _peaks(run, keep_layers(run.config, sorted([*base, place])))
        for name, peak in phases.items():
            grown = zip(sums[name], more[name], peak, strict=True)
            sums[name] = Bytes(*(now + count * (large - small) for now, large, small in grown))
    run.phases[half] = sums
    return sums


def _peaks(run: Run, config: PretrainedConfig) -> dict[str, Bytes]:
    """The peak of each phase for one copy."""
    numberless, args, model, frozen = WithoutNumbers(), run.args, run.build(config), run.frozen.get("teacher")
    # One layer of the teacher, as one layer's activations are there at a time.
    teacher = None if frozen is None else meta_model(keep_layers(frozen, [0]), saved_dtype(frozen))
    for parameter in model.parameters() if run.sharding.half else ():
        parameter.data = parameter.data.to(torch.bfloat16)
    models = [model] if teacher is None else [model, teacher]
    core, value = core_of(model), getattr(model, "value_model", None)
    cores = [core] if value is None else [core, value]  # that train
    for part in (*cores, *map(core_of, models[1:])):
        packing_of(part)  # runs a small copy, with numbers
    for part in models:
        numberless.take(part, core_of(part))
    # Chunks of logits are those of an accelerator, unless the run is on a CPU, which the tensors seem to be on.
    place = "CPU" if args.use_cpu else "ACCELERATOR"
    size, rows = (getattr(heads, f"{place}_CHUNK_{unit}") for unit in ("BYTES", "ROWS"))
    with holding(heads, "CPU_CHUNK_BYTES", size), holding(heads, "CPU_CHUNK_ROWS", rows), numberless:
        (scorer, batch), phases = scorer_and_batch(run, model), dict[str, Bytes]()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bool(args.bf16))
        if not getattr(args, "use_vllm", False) if run.samples else getattr(args, "lmbda", 0):
            with autocast:
                phases[GENERATION] = Bytes(0, _generation(run, core, scorer))
        model.train()
        if args.gradient_checkpointing:
            for part in cores:
                enable_gradient_checkpointing(part, args.gradient_checkpointing_kwargs or {})
        live = LiveBytes([parameter for parameter in model.parameters() if parameter.requires_grad])
        for part in models:
            live.add([*part.parameters(), *part.buffers()])
        weights = live.now
        _mark_phases(core, live)
        for _ in range(1 + (args.gradient_accumulation_steps > 1)):  # gradients of an earlier micro-batch are there
            live.peaks.clear()
            live.begin(FORWARD)
            with live:
                step(run.loss, batch, model, scorer, teacher, lambda: autocast)
    return {name: peak._replace(others=peak.others - weights) for name, peak in live.peaks.items() if name} | phases


def scorer_and_batch(run: Run, model: nn.Module) -> tuple[Any, Inputs]:
    """What scores rows with a model, and rows as the method's collator makes them, all completion tokens trained."""
    if isinstance(model, PolicyAndValue):
        scorer: Any = PolicyValueScorer(model, Scorer(model.policy), ClassificationScorer(model.value_model))
    else:
        scorer = (Scorer if run.classifier is None else ClassificationScorer)(model)
    shares = shares_prefix(scorer, getattr(run.args, "prefix_sharing", False))
    return scorer, _rollouts(run, shares) if run.samples else _rows(run, shares, packed=scorer.packed)


def _rows(run: Run, shares: bool, *, packed: bool) -> Inputs:
    rows, lengths = run.rows, run.lengths
    prompt, completion = ([_TOKEN] * length for length in lengths)
    if run.method == "reward":  # whole sequences that begin alike
        sides = {f"{side}_input_ids": [*prompt, number, *completion[1:]] for number, side in enumerate(SIDES)}
        return RewardCollator(prefix_sharing=shares, packed=packed)([sides] * rows)
    if run.method in ("dpo", "orpo", "cpo"):
        pair = {"prompt_input_ids": prompt, **{f"{side}_input_ids": completion for side in SIDES}}
        return {**PairCollator(shares)([pair] * rows), "ref_logps": torch.zeros(2 * rows)}
    if run.method in ("kto", "bco"):
        single = {"prompt_input_ids": prompt, "completion_input_ids": completion}
        labelled = [{**single, "label": number % 2 == 0} for number in range(rows)]
        return {**UnpairedCollator(shares)(labelled), "ref_logps": torch.zeros(rows)}
    mask = [int(getattr(run.args, "lmbda", 0.0) < 1)] * lengths.prompt + [1] * lengths.completion
    row = {"input_ids": prompt + completion, "completion_mask": mask}
    return DataCollatorForLanguageModeling(pad_token_id=0)([row] * rows)


def _rollouts(run: Run, shares: bool) -> Inputs:
    """Completions of prompts, `num_generations` of each, with all columns that a loss may read."""
    rows, group = getattr(run.args, "device_rows", run.rows), getattr(run.args, "num_generations", None) or 1
    prompts = Ragged.of([[_TOKEN + place // group] * run.lengths.prompt for place in range(rows)])
    completions = Ragged.of([[_TOKEN] * run.lengths.completion] * rows)
    tokens, numbers = torch.zeros(rows * run.lengths.completion), torch.ones(rows)
    per_token = {columns.OLD: tokens, columns.TRAINED: tokens == 0}
    if getattr(run.args, "beta", 0):
        per_token[columns.REF] = tokens
    if run.loss.needs_values:
        per_token |= dict.fromkeys((ADVANTAGES, columns.VALUES, columns.RETURNS), tokens)
    per_row = dict.fromkeys((columns.ADVANTAGE, columns.REWARD, columns.STOPPED), numbers)
    per_row |= {columns.SCORES: torch.arange(rows) / rows}
    per_row |= dict.fromkeys((columns.LENGTH, columns.MEAN_LENGTH), numbers * run.lengths.completion)
    experience = Experience(prompts, completions, per_token, per_row)
    return {**experience.as_batch(prefix_sharing=shares), ROLLOUT: experience}


def step(
    method: Method, batch: Inputs, model: nn.Module, scorer: Any, teacher: nn.Module | None,
    autocast: Callable[[], Any],
) -> None:  # fmt: skip
    """Forward and backward pass of a method; `teacher`: a model beside the policy."""
    runs: Any = SimpleNamespace(autocast=autocast, num_processes=1)
    no_reference: Any = None  # the batch has its log-probs
    of_step = Step(True, Processes(runs), statistics=True, is_first=True)
    base = SelfTeacher(AdapterReference(scorer))
    teaches = base if teacher is None else FrozenTeacher(FrozenModel(teacher, Scorer(teacher)))
    scored = method.score(batch, Scoring(model, scorer, runs, of_step, no_reference, teaches))
    outcome = method.terms(batch, scored, of_step)
    counts = method.count(batch)
    loss = outcome.loss(method.units, counts, counts.clamp(min=1), router_weight=scorer.router_weight)
    del scored, outcome
    loss.backward()


@torch.no_grad()
def _generation(run: Run, core: PreTrainedModel, scorer: Scorer) -> float:
    """Bytes of keys and values, of a row of logits for each completion, and of the weights that are copied for it."""
    args, cache, copies = run.args, RolloutCache(), 0
    dtype = torch.bfloat16 if args.bf16 else None
    rows = prompts = run.rows * args.gradient_accumulation_steps * (getattr(args, "num_mini_batches", None) or 1)
    if run.samples and run.method != "ppo":
        rows = args.generation_batch_size // args.world_size
        prompts = -(-rows // args.num_generations)
    if scorer.packed:
        with rollout_attention_of(core, cache):
            per_token, per_row = OwnForward(core, cache).bytes_of_row().values()
    else:
        per_token, per_row = cache_bytes(core).values()
    if not run.model_args.load_in_4bit and fused_unsupported(core_of(run.model), dtype) is None:
        parts: list[Any] = [*(layers_of(core) or []), core.get_output_embeddings()]
        matrices = [x.weight for part in parts for x in part.modules() if isinstance(x, nn.Linear)]
        copies = sum(matrix.numel() * (dtype or matrix.dtype).itemsize for matrix in matrices)
    cached = per_token * (prompts * run.lengths.prompt + rows * run.lengths.completion)
    return cached + rows * (per_row + _LOGITS * 4 * embedded_tokens(core)) + copies


def _mark_phases(core: PreTrainedModel, live: LiveBytes) -> None:
    """Begin the phases of a forward and backward pass where the model's layers do; those between have no name."""
    layers = layers_of(core) or []
    backward = {0: FIRST_LAYER, len(layers) - 1: LAST_LAYER}

    def after(number: int, _: nn.Module, __: object, output: Any) -> None:
        if live.phase != FORWARD:  # computed again
            return
        states = output if isinstance(output, Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(lambda _: live.begin(backward.get(number, "")))
        if number == len(layers) - 1:
            live.begin(HEAD)

    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(after, number))
