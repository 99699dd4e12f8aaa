"""Memory of a micro-batch: measured on copies of the model with few layers of real width and no numbers.

Two copies differ by one layer of one kind; what grows from one to the other grows with every layer of that kind.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from trl.data.teacher_columns import TEACHER_IDS, TEACHER_LOGPS
from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.decoders import OwnForward, fused_unsupported
from trl.generation.transformers.model_generate import cache_bytes
from trl.methods.method import Method, Scoring, Step
from trl.models.packed.layout import Inputs, scored_sequences
from trl.models.packed.small_copy import keep_layers, layer_kinds
from trl.models.packed.support import packing_of
from trl.models.parts import causal_core, embedded_tokens, layers_of
from trl.models.reference import AdapterReference, FrozenModel
from trl.models.scoring.causal import Scorer
from trl.models.switches import enable_gradient_checkpointing, holding
from trl.models.teacher import ColumnTeacher, FrozenTeacher, SelfTeacher, Teacher
from trl.reporting.metrics import Processes
from trl.scripts.planning.live_bytes import LiveBytes, WithoutNumbers
from trl.tensors import heads

FORWARD, HEAD, LAST_LAYER, MIDDLE, FIRST_LAYER = (
    "forward", "logits and loss", "backward of the last layer", "backward", "backward of the first layer"
)  # fmt: skip
UPDATE, GENERATION = "optimiser step", "generation"

_LOGITS = 3  # copies of logits of which a token is chosen
_STASHED = 5  # layers whose inputs are on their way to CPU memory


class Bytes(NamedTuple):
    """Of a phase at its peak: gradients, and all that is neither weight nor gradient."""

    gradients: float
    activations: float


class Rollouts(NamedTuple):
    """What is generated at once: `rows` completions of `prompts`, each of so many tokens, by `models` together."""

    rows: int
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    models: int = 1


@dataclass(frozen=True, slots=True)
class Probe:
    """What is measured: the model of a config, and a micro-batch with its method.

    `build` makes the model for training, on the meta device; `batch` gives the micro-batch for a scorer. `teach`: makes
    the teacher's model, or None for the student's base, or a number of tokens that a server answers. `half`: the products
    are in bfloat16. `on_cpu`: the sizes of chunks are those of a CPU.
    """

    build: Callable[[PretrainedConfig], nn.Module]
    method: Method
    batch: Callable[[Any], Inputs]
    scorer: Callable[[nn.Module], Any] = Scorer
    teach: Callable[[], nn.Module | int | None] | None = None
    checkpointing: Any = None  # its arguments; None: off
    half: bool = False
    on_cpu: bool = False
    optimizer: Callable[[list[nn.Parameter]], Any] = lambda parameters: None
    rollouts: Rollouts | None = None
    is_second: bool = False  # gradients of an earlier micro-batch are there
    offloads: bool = False  # what layers keep for the backward pass is in CPU memory, but for the last ones


def measured(probe: Probe, config: PretrainedConfig) -> dict[str, Bytes]:
    """The peak of each phase of a micro-batch, for all layers of the config."""
    kinds = layer_kinds(config)
    total = Counter(kinds)
    first = {kind: kinds.index(kind) for kind in total}
    base = sorted({*first.values()} | ({0, 1} if len(total) == 1 and len(kinds) > 1 else set()))
    fewest = Counter(kinds[place] for place in base)
    phases = _peaks(probe, keep_layers(config, base))
    sums = {name: [*peak] for name, peak in phases.items()}
    most = {"activations": _STASHED} if probe.offloads else {}
    for kind, count in total.items():
        if count == fewest[kind]:
            continue
        place = next(n for n, other in enumerate(kinds) if other == kind and n not in base)
        more = _peaks(probe, keep_layers(config, sorted([*base, place])))
        for name, peak in phases.items():
            for number, field in enumerate(Bytes._fields):
                layers = min(count - fewest[kind], most.get(field, count))
                sums[name][number] += layers * (more[name][number] - peak[number])
    return {name: Bytes(*values) for name, values in sums.items()}


def _peaks(probe: Probe, config: PretrainedConfig) -> dict[str, Bytes]:
    """The peak of each phase for one copy."""
    numberless, live = WithoutNumbers(), LiveBytes()
    model, answers = probe.build(config), None if probe.teach is None else probe.teach()
    core, others = causal_core(model), [answers] if isinstance(answers, nn.Module) else []
    for part in (model, *others):
        packing_of(causal_core(part))  # runs a small copy, with numbers
        numberless.take(part)
    with _sizes_of(on_cpu=probe.on_cpu), numberless:
        scorer = probe.scorer(model)
        batch = probe.batch(scorer)
        model.train()
        if probe.checkpointing is not None:
            enable_gradient_checkpointing(core, probe.checkpointing)
        runs: Any = SimpleNamespace(
            autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=probe.half), num_processes=1
        )
        step = Step(True, Processes(runs), statistics=True, is_first=True)
        scoring = Scoring(model, scorer, runs, step, _no_reference)
        if probe.teach is not None:
            scoring = replace(scoring, teacher=_teacher(answers, scorer))
        if isinstance(answers, int):
            shape = (len(scored_sequences(batch)), answers)
            batch = {**batch, TEACHER_IDS: torch.zeros(shape, dtype=torch.int64), TEACHER_LOGPS: torch.zeros(shape)}
        for part in (model, *others):
            live.add([*part.parameters(), *part.buffers()])
        static = weights = live.now
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda x: live.count_gradient(x.grad))
        with _phases(core, live):
            for _ in range(1 + probe.is_second):
                live.peaks.clear()
                live.begin(FORWARD)
                with live:
                    _step(probe.method, batch, scoring)
        static += _update(probe, model, live)
        live.peaks.pop(MIDDLE, None)
        phases = {
            name: Bytes(peak.gradients, peak.total - peak.gradients - (static if name == UPDATE else weights))
            for name, peak in live.peaks.items()
        }
        if probe.rollouts is not None:
            phases[GENERATION] = Bytes(0, _generation(probe, core, scorer))
    return phases


def _update(probe: Probe, model: nn.Module, live: LiveBytes) -> int:
    """Measure the second step of the optimiser; returns the bytes of its state."""
    optimizer = probe.optimizer([parameter for parameter in model.parameters() if parameter.grad is not None])
    if optimizer is None:
        return 0
    optimizer.step()
    live.begin(UPDATE)
    before = live.now
    live.add(value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    state = live.now - before
    with live:
        optimizer.step()
    return state


@torch.no_grad()
def _generation(probe: Probe, core: PreTrainedModel, scorer: Scorer) -> float:
    """Bytes of keys and values, of a row of logits for each completion, and of the weights that are copied for it."""
    assert probe.rollouts is not None
    rows, prompts, prompt_tokens, completion_tokens, models = probe.rollouts
    dtype = torch.bfloat16 if probe.half else None
    cache, copies = RolloutCache(), 0
    with torch.autocast("cpu", dtype, enabled=probe.half):
        if scorer.packed:
            with rollout_attention_of(core, cache):
                per_token, per_row = OwnForward(core, cache).bytes_of_row().values()
        else:
            per_token, per_row = cache_bytes(core).values()
    if fused_unsupported(core, dtype) is None:
        parts: list[Any] = [*(layers_of(core) or []), core.get_output_embeddings()]
        matrices = [x.weight for part in parts for x in part.modules() if isinstance(x, nn.Linear)]
        copies = sum(matrix.numel() * (dtype or matrix.dtype).itemsize for matrix in matrices)
    vocabulary = embedded_tokens(core)
    cached = per_token * (prompts * prompt_tokens + rows * completion_tokens)
    return models * (cached + rows * (per_row + _LOGITS * 4 * vocabulary) + copies)


def _no_reference(_: object) -> Tensor:
    raise AssertionError("a batch has the reference's log-probs")


def _teacher(answers: nn.Module | int | None, scorer: Scorer) -> Teacher:
    if isinstance(answers, nn.Module):
        return FrozenTeacher(FrozenModel(answers, Scorer(answers)))
    return SelfTeacher(AdapterReference(scorer)) if answers is None else ColumnTeacher()


def _step(method: Method, batch: Inputs, scoring: Scoring) -> None:
    scored = method.score(batch, scoring)
    outcome = method.terms(batch, scored, scoring.step)
    counts = method.count(batch)
    loss = outcome.loss(method.units, counts, counts.clamp(min=1), router_weight=scoring.scorer.router_weight)
    del scored, outcome
    loss.backward()


@contextmanager
def _sizes_of(*, on_cpu: bool) -> Iterator[None]:
    """Chunks of logits as on an accelerator, unless the run is on a CPU, which the tensors seem to be on."""
    with ExitStack() as block:
        for name in ("CHUNK_BYTES", "CHUNK_ROWS") if not on_cpu else ():
            block.enter_context(holding(heads, f"CPU_{name}", getattr(heads, f"ACCELERATOR_{name}")))
        yield


@contextmanager
def _phases(core: PreTrainedModel, live: LiveBytes) -> Iterator[None]:
    """Begin the phases of a forward and backward pass where the model's layers do."""
    layers = layers_of(core) or []
    handles = []

    def after(number: int) -> Callable[..., None]:
        phase = LAST_LAYER if number == len(layers) - 1 else FIRST_LAYER if number == 0 else MIDDLE

        def hook(_: nn.Module, __: object, output: Any) -> None:
            if live.phase != FORWARD:  # computed again
                return
            states = output if isinstance(output, Tensor) else output[0]
            if states.requires_grad:
                states.register_hook(lambda _: live.begin(phase))
            if number == len(layers) - 1:
                live.begin(HEAD)

        return hook

    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(after(number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
