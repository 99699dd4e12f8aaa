"""Samplers that only transformers has (`typical_p`, `no_repeat_ngram_size`, ...), as its logits processors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from trl.generation.choosing import Chosen, choose
from trl.generation.engine import Sampling


class Processors:
    """Changes logits as `core.generate` does with these settings, minimal lengths aside. Results do not depend on the batch.

    `ends` are the stop tokens. Temperature, cuts and the repetition penalty are among the processors, in transformers' order.
    """

    def __init__(self, core: Any, sampling: Sampling, ends: Sequence[int]) -> None:
        self._core = core
        self._config = GenerationConfig(
            do_sample=not sampling.greedy, temperature=sampling.temperature or 1.0, top_k=sampling.top_k,
            top_p=sampling.top_p, min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
            **dict(sampling.processors),
        )  # fmt: skip
        tokens = torch.tensor(sorted(ends), dtype=torch.int64, device=core.device)
        self._config._eos_token_tensor = tokens if len(tokens) else None  # pyright: ignore[reportAttributeAccessIssue]
        self._of: dict[tuple[int, ...], LogitsProcessorList] = {}
        self._drawn = Sampling(do_sample=not sampling.greedy)  # from the changed logits

    def choose(
        self,
        logits: Tensor,
        numbers: Tensor,
        prompts: Sequence[tuple[int, ...]],
        begin: Sequence[int] | None,
        ids: Tensor,
        counts: Tensor,
    ) -> Chosen:
        """One token per row of `logits` `(R, V)`, as `choose` draws it; of `ids` `(R, T)` `counts` `(R,)` are generated.

        `begin` is what an encoder-decoder's completions go on from, None for a decoder. The kept mass is that of the tokens
        that the processors leave.
        """
        together = defaultdict(list)
        for row, key in enumerate(zip(prompts, counts.tolist(), strict=True)):
            together[key].append(row)
        changed = torch.empty_like(logits)
        for (prompt, count), rows in together.items():
            start = ids.new_tensor(prompt if begin is None else begin).expand(len(rows), -1)
            seen: Any = torch.cat([start, ids[rows, :count]], dim=1)
            changed[rows] = self._processors(prompt, start.shape[1])(seen, logits[rows])  # type: ignore[arg-type]
        drawn = choose(changed.clone(), numbers, self._drawn)
        if self._drawn.greedy:
            return drawn
        whole = logits.to(drawn.logps) / self._config.temperature
        left = whole.masked_fill(changed == -torch.inf, -torch.inf)
        return drawn._replace(kept=left.logsumexp(dim=1) - whole.logsumexp(dim=1))

    def _processors(self, prompt: tuple[int, ...], start: int) -> LogitsProcessorList:
        if prompt not in self._of:
            # transformers (5.19) has no public function for it; some processors read the prompt or its length.
            self._of[prompt] = self._core._get_logits_processor(
                self._config, input_ids_seq_length=start, device=self._core.device,
                encoder_input_ids=torch.tensor([prompt], device=self._core.device), model_kwargs={},
            )  # fmt: skip
        return self._of[prompt]
