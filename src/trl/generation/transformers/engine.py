"""The embedded engine: rollouts from the model that is trained, in the same process."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled

from trl.generation.engine import Generated, Numbers, Prompts, Sampling, check_requests
from trl.generation.live import Live, LiveCalls
from trl.generation.transformers.cache import RolloutCache, rollout_attention_of
from trl.generation.transformers.choosing import Processors
from trl.generation.transformers.decode_check import decode_unsupported
from trl.generation.transformers.decoders import FusedDecoder, OwnForward, fused_unsupported
from trl.generation.transformers.live import LiveRequests
from trl.generation.transformers.model_generate import MoreInputs, cache_bytes, generate_with_model
from trl.generation.transformers.requests import Requests, Rules, StopStrings, end_tokens, fresh_seed
from trl.generation.transformers.reuse import Reuse
from trl.generation.transformers.rollout_loop import RolloutLoop, default_rows, row_memory
from trl.models.distributed import FSDP2Module, fsdp2_modules, is_sharded, unwrap_model_for_generation
from trl.models.packed.support import is_bidirectional, packing_of
from trl.models.parts import causal_core, embedded_tokens, prompt_learning_unsupported
from trl.models.switches import disable_gradient_checkpointing, undisturbed, without_ddp
from trl.options.checks import check_at_least, check_one_of

logger = logging.getLogger(__name__)

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}
Route = Literal["auto", "fused", "forward", "generate"]


class TransformersEngine:
    """Completions by a transformers model: plain, with PEFT adapters, with a value head, or sharded.

    `route`: `"fused"` is our own decode step (Llama, Qwen2, Qwen3, Mistral), `"forward"` the model's own forward with
    our cache, `"generate"` the model's `generate`. `"auto"` uses the first that the model supports, by what a small
    copy of it does; `fallbacks` says why not an earlier one. `max_batch` rows are decoded at once (default: what fits
    in 2 GiB on a CPU, or half of a GPU's free memory). Mixed precision is that of the autocast context around
    `generate`, else of the `accelerator`. `gather_zero3=False` (`ds3_gather_for_generation`) leaves ZeRO-3 weights
    sharded, which requires `"generate"` and the same number of requests in all processes. Requests that come and go
    (`live`) reuse the keys and values of earlier ones that begin alike: `reuse_memory` bytes of them are kept (default:
    a quarter of that for rows).
    """

    def __init__(
        self, model: nn.Module, *, tokenizer: PreTrainedTokenizerBase | None = None,
        accelerator: Accelerator | None = None, route: Route = "auto", max_batch: int | None = None,
        gather_zero3: bool = True, reuse_memory: int | None = None,
    ) -> None:  # fmt: skip
        check_at_least("max_batch", max_batch, minimum=1)
        check_at_least("reuse_memory", reuse_memory, minimum=0)
        check_one_of("route", route, ("auto", "fused", "forward", "generate"))
        if is_bidirectional(core := causal_core(inner := without_wrappers(model))):
            raise ValueError(
                f"{type(core).__name__} attends to later tokens (is_causal=False): its log-probs of a completion are "
                "not those that it was sampled with. Generate with a causal model."
            )
        self.model, self.tokenizer, self.accelerator = model, tokenizer, accelerator
        self.route: Route = route
        self.max_batch, self.gather_zero3, self.reuse_memory = max_batch, gather_zero3, reuse_memory
        self.fallbacks: list[str] = []
        self._warn = cache(logger.warning)  # once for a message
        # A model, and why its forward cannot use our cache; of sharded weights when they are gathered.
        self._checked: tuple[PreTrainedModel | None, str | None] = (None, None)
        if route != "generate" and not core.config.is_encoder_decoder and not is_sharded(core):
            self._unsupported(inner, core)

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, streams: Numbers = None, limits: Numbers = None,
        more_inputs: MoreInputs | None = None, listener: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Generated]:  # fmt: skip
        """One completion for each prompt, in order; see `Engine.generate`.

        With `more_inputs` the route is `"generate"`. `listener(requests, ids)`, both `(R,)`, is called with each
        request's newest token. In float32 a draw may depend on rounding errors, which vary with the batch. Raises:
        ValueError for invalid prompts, FloatingPointError for logits that are not finite.
        """
        dtype = self._autocast_dtype()
        seed = fresh_seed() if sampling.seed is None else sampling.seed
        with generating(self.model, self.accelerator, gather_zero3=self.gather_zero3) as model:
            core = causal_core(model)
            begin = [core.config.decoder_start_token_id or 0] if core.config.is_encoder_decoder else None
            length, vocabulary = context_length_of(model), embedded_tokens(core)
            rows, names = check_requests(
                prompts, streams, context_length=length, vocabulary=vocabulary, room=0 if begin else 1
            )
            if not rows:
                return []
            rules = self._rules(sampling, core)
            if not len(rules.ends) and not sampling.stop_strings and sampling.stop_token_ids is None:
                self._warn("The model has no end token: completions have their maximum length. Set eos_token_id.")
            requests = Requests(context_length=length, device=core.device, begin=begin, listener=listener)
            requests.add(rows, names, sampling, rules, seed=seed, limits=limits)
            with nullcontext() if dtype is None else torch.autocast(core.device.type, dtype=dtype):
                self._run(model, core, requests, dtype, more_inputs)
        return requests.results()

    @contextmanager
    def live(self) -> Iterator[Live]:
        """Inside the block, requests come and go, with the weights at its beginning."""
        dtype = self._autocast_dtype()
        with generating(self.model, self.accelerator, gather_zero3=self.gather_zero3) as model:
            core = causal_core(model)
            route = "generate" if core.config.is_encoder_decoder else self._route(model, core, dtype)
            if route == "generate":
                yield LiveCalls(self)
                return
            length, vocabulary = context_length_of(model), embedded_tokens(core)
            requests = Requests(context_length=length, device=core.device)
            cache = RolloutCache()
            decoder = FusedDecoder(core, cache, dtype=dtype) if route == "fused" else OwnForward(core, cache)
            autocast = partial(torch.autocast, core.device.type, dtype=dtype, enabled=dtype is not None)

            @contextmanager
            def running(cache: RolloutCache) -> Iterator[None]:
                with torch.no_grad(), rollout_attention_of(core, cache), autocast():
                    yield

            memory, sizes = row_memory(core.device), {"vocabulary": vocabulary, "token_bytes": 0}
            if self.max_batch is None:
                with running(cache):
                    sizes |= decoder.bytes_of_row()
            kept = memory // 4 if self.reuse_memory is None else self.reuse_memory
            reuse = Reuse(kept) if kept and not packing_of(core).mixers else None  # their states cannot be cut
            loop = RolloutLoop(decoder, cache, requests, max_rows=self.max_batch or 1, reuse=reuse)
            live = LiveRequests(
                requests, loop, vocabulary=vocabulary,
                rows_for=lambda: self.max_batch or default_rows(requests, memory=memory, **sizes),
                rules_of=lambda sampling: self._rules(sampling, core),
                running=running,
            )  # fmt: skip
            try:
                yield live
            finally:
                # A circle, in which caches and fused weights would wait for the garbage collector.
                requests.listener = None

    def check_live(self) -> None:
        """Raise ValueError for weights that are sharded, of a model that generates by its own `generate`."""
        state = getattr(self.accelerator, "state", None)
        shards = getattr(state, "fsdp_plugin", None) is not None or is_deepspeed_zero3_enabled()
        model = without_wrappers(self.model)
        core = causal_core(model)
        if (shards or self.together) and (reason := decode_unsupported(model)) is not None:
            raise ValueError(
                f"{type(core).__name__} cannot be sharded while it generates, because {reason}. "
                "Train without FSDP and ZeRO-3."
            )

    @property
    def exact(self) -> bool:
        """Whether log-probs are those of the scoring forward; with transformers' caches they may not be.

        All processes ask: sharded weights are gathered where nothing was generated before, as when a run resumes.
        """
        model = without_wrappers(self.model)
        core = causal_core(model)
        if self.route == "generate" or core.config.is_encoder_decoder:
            return core.config.is_encoder_decoder
        if self._checked[0] is not core:
            with generating(self.model, self.accelerator, gather_zero3=self.gather_zero3) as gathered:
                return self._unsupported(gathered, causal_core(gathered)) is None
        return self._unsupported(model, core) is None

    @property
    def together(self) -> bool:
        """Whether weights are sharded over processes, which gather them for each call."""
        return is_sharded(self.model)

    def sync_weights(self, model: nn.Module, step: int) -> None:
        """Generate with `model` from now on; its weights are read anew by each `generate`."""
        self.model = model

    def close(self) -> None:
        """Nothing is kept between calls."""

    def _autocast_dtype(self) -> torch.dtype | None:
        first = next(self.model.parameters())
        if first.dtype == torch.float64:
            return None
        if torch.is_autocast_enabled(first.device.type):
            return torch.get_autocast_dtype(first.device.type)
        return MIXED.get(getattr(self.accelerator, "mixed_precision", "no"))

    def _run(
        self, model: nn.Module, core: PreTrainedModel, requests: Requests, dtype: torch.dtype | None,
        more_inputs: MoreInputs | None,
    ) -> None:  # fmt: skip
        route = "generate" if more_inputs is not None else self._route(model, core, dtype)
        vocabulary = embedded_tokens(core)
        if route == "generate":
            rows = self.max_batch or default_rows(requests, vocabulary=vocabulary, **cache_bytes(core))
            pads = (
                getattr(core.config.get_text_config(), "pad_token_id", None),
                getattr(self.tokenizer, "pad_token_id", None),
                0,
            )
            pad = next(int(token) for token in pads if token is not None)
            synced = not self.gather_zero3 and is_sharded(model)
            generate_with_model(model, requests, max_rows=rows, pad=pad, synced=synced, more_inputs=more_inputs)
            return
        cache = RolloutCache()
        with rollout_attention_of(core, cache):
            decoder = FusedDecoder(core, cache, dtype=dtype) if route == "fused" else OwnForward(core, cache)
            rows = self.max_batch or default_rows(requests, vocabulary=vocabulary, **decoder.bytes_of_row())
            RolloutLoop(decoder, cache, requests, max_rows=rows).run()

    def _rules(self, sampling: Sampling, core: PreTrainedModel) -> Rules:
        ends, texts = end_tokens(sampling.stop_token_ids, core), sampling.stop_strings
        processors = Processors(core, sampling, ends) if sampling.processors else None
        strings = StopStrings(texts, self.tokenizer) if texts else None
        tokens = torch.tensor(ends, dtype=torch.int64, device=core.device)
        return Rules(sampling, tokens, strings, processors)

    def _route(self, model: nn.Module, core: PreTrainedModel, dtype: torch.dtype | None) -> Route:
        """The first route that this model supports, or the requested one.

        Raises: ValueError if the model does not support the requested route.
        """
        if self.route == "generate":
            return "generate"
        reason = self._unsupported(model, core)
        fused = reason or fused_unsupported(core, dtype)
        reasons: dict[Route, str | None] = {"fused": fused, "forward": reason}
        for route in reasons if self.route == "auto" else (self.route,):
            if (why := reasons[route]) is None:
                return route
            if self.route != "auto":
                raise ValueError(f"route={route!r} needs another model: {why}. Use route='auto'.")
            if why not in self.fallbacks:
                self.fallbacks.append(why)
        self._warn(f"{type(core).__name__} generates with its own `generate`, because {reason}.")
        return "generate"

    def _unsupported(self, model: nn.Module, core: PreTrainedModel) -> str | None:
        """Why our cache is not used."""
        if self._checked[0] is not core:
            self._checked = core, decode_unsupported(model)
        stays_sharded = not self.gather_zero3 and is_sharded(core)
        return self._checked[1] or ("its weights stay sharded" if stays_sharded else None)


def context_length_of(model: nn.Module, at_most: int | None = None) -> int | None:
    """The number of positions of a model without those of virtual tokens, at most `at_most`; None for no limit.

    A decoder's positions are those of prompt and completion; an encoder-decoder has as many for each.
    """
    core = causal_core(model)
    config = core.config if core.config.is_encoder_decoder else core.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and prompt_learning_unsupported(model) is not None:
        positions -= getattr(model.active_peft_config, "num_virtual_tokens", None) or 0
    return min((limit for limit in (positions, at_most) if limit is not None), default=None)


@contextmanager
def generating(model: nn.Module, accelerator: Accelerator | None, *, gather_zero3: bool = True) -> Iterator[nn.Module]:
    """Yield the transformers model or `PeftModel` inside `model`, with whole weights, in eval mode, without gradients.

    Wrappers are removed (torch.compile, a value head; DDP, FSDP and DeepSpeed with the `accelerator`). Sharded weights
    are gathered once (ZeRO-3 not if `gather_zero3=False`). Modes and random states are restored.
    """
    model = getattr(model, "_orig_mod", model)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(undisturbed(model))
        if accelerator is None:
            inner = without_ddp(model)
            stack.enter_context(disable_gradient_checkpointing(inner))
        else:
            inner = stack.enter_context(unwrap_model_for_generation(model, accelerator, gather_zero3))
        if sharded := fsdp2_modules(inner):
            stack.enter_context(_whole(sharded))
        yield without_wrappers(inner)


def without_wrappers(model: nn.Module) -> nn.Module:
    """The transformers model or `PeftModel` inside training wrappers and a value head."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)  # type: ignore[assignment]
    inner = getattr(model, "pretrained_model", None)
    return inner if isinstance(inner, nn.Module) else model


@contextmanager
def _whole(sharded: Sequence[FSDP2Module]) -> Iterator[None]:
    """Unshard each FSDP2 module once, and disable its hooks meanwhile."""
    for module in sharded:
        module.unshard()
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in sharded]
    for module in sharded:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
            module.reshard()
