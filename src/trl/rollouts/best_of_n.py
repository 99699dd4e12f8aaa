"""Best-of-n sampling: several completions of a query, of which the best are returned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trl.generation.engine import Engine, Sampling
from trl.generation.main_process import first_rng_stream
from trl.generation.transformers.engine import TransformersEngine, without_wrappers
from trl.generation.transformers.requests import fresh_seed
from trl.models.parts import causal_core
from trl.rewards.result import read_scores

Queries = Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor] | Tensor


class BestOfNSampler:
    """Samples `sample_size` completions of each query and returns the `n_candidates` with the highest scores.

    `queries_to_scores(texts)` scores the texts of one query: query and completion, or the completion of an
    encoder-decoder. `length_sampler()` draws the maximum of new tokens of each query. `generation_config` and the
    keywords of `generate` are settings of `Sampling`. With a `seed` results depend on it, the number of the call and
    the process, otherwise on torch's global generator. `engine` is a `TransformersEngine` by default.

    Raises: ValueError unless 1 <= n_candidates <= sample_size.

    Example:
        >>> best = BestOfNSampler(model, tokenizer, score, LengthSampler(8, 16), seed=0)  # doctest: +SKIP
        >>> best.generate(tokenizer("It was")["input_ids"])  # doctest: +SKIP
        [['It was a great film ...']]
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        queries_to_scores: Callable[[list[str]], Sequence[float] | Tensor],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: GenerationConfig | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        if not 1 <= n_candidates <= sample_size:
            raise ValueError(f"n_candidates must be in [1, sample_size={sample_size}], got {n_candidates}.")
        self.model, self.tokenizer = model, tokenizer
        self.queries_to_scores, self.length_sampler = queries_to_scores, length_sampler
        self.sample_size, self.n_candidates = sample_size, n_candidates
        self.generation_config = generation_config
        self.engine = TransformersEngine(model, tokenizer=tokenizer) if engine is None else engine
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed)

    def generate(
        self,
        tokenized_query: Queries,
        skip_special_tokens: bool = True,
        device: str | torch.device | None = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """The best texts of each query, best first; `device` moves the model.

        One query is a list or 1-D tensor of token ids, several are a list of those or a 2-D tensor.

        Raises: ValueError for unsupported settings, and for a wrong number of scores or scores that are not finite.
        """
        if device is not None:
            self.model.to(device)
        queries = _rows(tokenized_query)
        if not queries:
            return []
        lengths = [int(self.length_sampler()) for _ in queries]
        rows = self._complete(queries, lengths, generation_kwargs)
        if not causal_core(without_wrappers(self.model)).config.is_encoder_decoder:
            rows = [[*queries[at // self.sample_size], *ids] for at, ids in enumerate(rows)]
        every = self.tokenizer.batch_decode(rows, skip_special_tokens=skip_special_tokens)
        best = []
        for at in range(0, len(every), self.sample_size):
            texts = every[at : at + self.sample_size]
            scores = read_scores(self.queries_to_scores(texts), count=len(texts), name="queries_to_scores")
            order = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
            best.append([texts[index] for index in order[: self.n_candidates]])
        return best

    def _complete(
        self, queries: list[list[int]], lengths: list[int], generation_kwargs: dict[str, Any]
    ) -> list[list[int]]:
        """`sample_size` completions of each query, one after another, each cut to its query's length."""
        seed = fresh_seed() if self._seeds is None else int(torch.randint(2**62, (), generator=self._seeds))
        base = Sampling(seed=seed).updated(self.generation_config)
        sampling = replace(base, max_new_tokens=max(lengths), max_length=None).updated(generation_kwargs)
        if "max_new_tokens" in generation_kwargs:
            lengths = [sampling.max_new_tokens or max(lengths)] * len(queries)
        prompts = [query for query in queries for _ in range(self.sample_size)]
        first = first_rng_stream()
        completions = self.engine.generate(prompts, sampling, streams=range(first, first + len(prompts)))
        return [done.ids[: lengths[at // self.sample_size]] for at, done in enumerate(completions)]


def _rows(queries: Queries) -> list[list[int]]:
    """One list of token ids per query; a list of numbers is one query."""
    parts = [torch.as_tensor(part, dtype=torch.int64) for part in queries]
    if parts and all(part.ndim == 0 for part in parts):
        return [[int(part) for part in parts]]
    return [part.flatten().tolist() for part in parts]
