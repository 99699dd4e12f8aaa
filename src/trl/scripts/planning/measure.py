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
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel
from transformers.training_args import OptimizerNames

from trl.data.teacher_columns import TEACHER_IDS
from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.decoders import OwnForward, fused_unsupported
from trl.generation.transformers.model_generate import cache_bytes
from trl.methods.method import Method, Scoring, Step
from trl.models.packed.layout import Inputs
from trl.models.packed.small_copy import keep_layers, layer_kinds
from trl.models.packed.support import packing_of
from trl.models.parts import causal_core, embedded_tokens, layers_of
from trl.models.reference import AdapterReference, FrozenModel
from trl.models.scoring.causal import Scorer
from trl.models.scoring.classifier import ClassificationScorer
from trl.models.switches import enable_gradient_checkpointing, holding
from trl.models.teacher import ColumnTeacher, FrozenTeacher, SelfTeacher, Teacher
from trl.reporting.metrics import Processes
from trl.scripts.planning.batches import batch_of
from trl.scripts.planning.live_bytes import Bytes, LiveBytes, WithoutNumbers
from trl.scripts.planning.run import Run
from trl.scripts.planning.state import make_optimizer, tensor_bytes
from trl.tensors import heads

FORWARD, HEAD, LAST_LAYER, FIRST_LAYER = (
    "forward", "logits and loss", "backward of the last layer", "backward of the first layer"
)  # fmt: skip
UPDATE, GENERATION = "optimiser step", "generation"

_LOGITS = 3  # copies of logits of which a token is chosen


def phases_of(run: Run) -> dict[str, Bytes]:
    """The peak of each phase of a micro-batch, measured once."""
    half = run.sharding.half
    run.phases[half] = run.phases.get(half) or _measured(run)
    return run.phases[half]


def _measured(run: Run) -> dict[str, Bytes]:
    """The phases for all layers of the run's config."""
    kinds = layer_kinds(run.config)
    total = Counter(kinds)
    base = sorted({*map(kinds.index, total)} | ({0, 1} if len(total) == 1 and len(kinds) > 1 else set()))
    fewest = Counter(kinds[place] for place in base)
    phases = _peaks(run, keep_layers(run.config, base))
    sums = dict(phases)
    for kind, count in (total - fewest).items():
        place = next(n for n, other in enumerate(kinds) if other == kind and n not in base)
        more = _peaks(run, keep_layers(run.config, sorted([*base, place])))
        for name, peak in phases.items():
            grown = zip(sums[name], more[name], peak, strict=True)
            sums[name] = Bytes(*(now + count * (large - small) for now, large, small in grown))
    return sums


def _peaks(run: Run, config: PretrainedConfig) -> dict[str, Bytes]:
    """The peak of each phase for one copy."""
    numberless, args, model, teacher = WithoutNumbers(), run.args, run.build(config), run.teacher()
    for parameter in model.parameters() if run.sharding.half else ():
        parameter.data = parameter.data.to(torch.bfloat16)
    models = [model] if teacher is None else [model, teacher]
    for part in models:
        packing_of(causal_core(part))  # runs a small copy, with numbers
        numberless.take(part, causal_core(part))
    # Chunks of logits are those of an accelerator, unless the run is on a CPU, which the tensors seem to be on.
    place, core = "CPU" if args.use_cpu else "ACCELERATOR", causal_core(model)
    size, rows = (getattr(heads, f"{place}_CHUNK_{unit}") for unit in ("BYTES", "ROWS"))
    with holding(heads, "CPU_CHUNK_BYTES", size), holding(heads, "CPU_CHUNK_ROWS", rows), numberless:
        scorer: Any = (Scorer if run.classifier is None else ClassificationScorer)(model)
        batch, model = batch_of(run, scorer), model.train()
        if args.gradient_checkpointing:
            enable_gradient_checkpointing(core, args.gradient_checkpointing_kwargs or {})
        live = LiveBytes([parameter for parameter in model.parameters() if parameter.requires_grad])
        for part in models:
            live.add([*part.parameters(), *part.buffers()])
        weights = live.now
        hooks = _mark_phases(core, live)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bool(args.bf16))
        for _ in range(1 + (args.gradient_accumulation_steps > 1)):  # gradients of an earlier micro-batch are there
            live.peaks.clear()
            live.begin(FORWARD)
            with live:
                step(run.loss, batch, model, scorer, teacher, lambda: autocast)
        for hook in hooks:  # with them generation would be another
            hook.remove()
        _update(run, live)
        phases = {name: peak._replace(others=peak.others - weights) for name, peak in live.peaks.items() if name}
        if run.generates:
            with autocast:
                phases[GENERATION] = Bytes(0, _generation(run, core, scorer))
    return phases


def step(
    method: Method, batch: Inputs, model: nn.Module, scorer: Any, teacher: nn.Module | None,
    autocast: Callable[[], Any],
) -> None:  # fmt: skip
    """Forward and backward pass of a method; `teacher`: a model beside the policy."""
    runs: Any = SimpleNamespace(autocast=autocast, num_processes=1)
    of_step = Step(True, Processes(runs), statistics=True, is_first=True)
    others: Teacher = ColumnTeacher() if TEACHER_IDS in batch else SelfTeacher(AdapterReference(scorer))
    if teacher is not None:
        others = FrozenTeacher(FrozenModel(teacher, Scorer(teacher)))
    scoring = Scoring(model, scorer, runs, of_step, _no_reference, others)
    scored = method.score(batch, scoring)
    outcome = method.terms(batch, scored, of_step)
    counts = method.count(batch)
    loss = outcome.loss(method.units, counts, counts.clamp(min=1), router_weight=scorer.router_weight)
    del scored, outcome
    loss.backward()


def _no_reference(_: object) -> Tensor:
    raise AssertionError("a batch has the reference's log-probs")


def _update(run: Run, live: LiveBytes) -> None:
    """Measure the second step of the optimiser, without its state; one of bitsandbytes needs numbers: AdamW's."""
    args = run.changed(optim=OptimizerNames.ADAMW_TORCH_FUSED).args if "bit" in run.optimizer else run.args
    trained = [weight for weight in live.trained if weight.grad is not None]
    gradients, optimizer = tensor_bytes(trained), make_optimizer(args, trained)
    if optimizer is None:
        return
    optimizer.step()
    live.begin(UPDATE)
    before = live.now
    live.add(value for state in optimizer.state.values() for value in state.values())
    state = live.now - before
    with live:
        optimizer.step()
    live.peaks[UPDATE] = Bytes(gradients, live.peaks[UPDATE].total - gradients - state)


@torch.no_grad()
def _generation(run: Run, core: PreTrainedModel, scorer: Scorer) -> float:
    """Bytes of keys and values, of a row of logits for each completion, and of the weights that are copied for it."""
    args, cache, copies = run.args, RolloutCache(), 0
    dtype = torch.bfloat16 if args.bf16 else None
    rows = prompts = run.rows * args.gradient_accumulation_steps
    if run.samples:
        rows = args.generation_batch_size // args.world_size
        prompts = -(-rows // args.num_generations)
    if scorer.packed:
        with rollout_attention_of(core, cache):
            per_token, per_row = OwnForward(core, cache).bytes_of_row().values()
    else:
        per_token, per_row = cache_bytes(core).values()
    if fused_unsupported(core, dtype) is None:
        parts: list[Any] = [*(layers_of(core) or []), core.get_output_embeddings()]
        matrices = [x.weight for part in parts for x in part.modules() if isinstance(x, nn.Linear)]
        copies = sum(matrix.numel() * (dtype or matrix.dtype).itemsize for matrix in matrices)
    cached = per_token * (prompts * run.lengths.prompt + rows * run.lengths.completion)
    return cached + rows * (per_row + _LOGITS * 4 * embedded_tokens(core)) + copies


def _mark_phases(core: PreTrainedModel, live: LiveBytes) -> list[RemovableHandle]:
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

    return [layer.register_forward_hook(partial(after, number)) for number, layer in enumerate(layers)]
