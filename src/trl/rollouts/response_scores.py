"""Log-probabilities and values of responses, padded `(B, R)`: column t belongs to response token t."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trl.collators.preference import completion_batch
from trl.collators.seq2seq import seq2seq_batch
from trl.models.scoring.head import ScoreOptions


class ResponseScores(NamedTuple):
    """Scores of B responses, each `(B, R)`, 0 after a response's end; `entropies` and `logits (B, R, V)` on request."""

    logps: Tensor
    values: Tensor | None
    entropies: Tensor | None
    logits: Tensor | None


class ResponseScorer:
    """Scores responses with one model: on the packed row where the model takes it, equal queries standing there once."""

    def __init__(self, scorer: Any, *, is_encoder_decoder: bool) -> None:
        self.scorer, self.is_encoder_decoder = scorer, is_encoder_decoder

    def score(
        self,
        model: nn.Module,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        *,
        logits: bool = False,
        entropies: bool = False,
    ) -> ResponseScores:
        """Scores of one forward pass, with gradient unless it is off."""
        device = responses[0].device
        order = _by_query(queries)
        batch = self._batch([queries[i] for i in order], [responses[i] for i in order])
        batch = {name: value.to(device) for name, value in batch.items()}
        options = ScoreOptions(entropy="scored" if entropies else "none")
        whole = None
        if logits:
            scored, whole = self.scorer.score_with_logits(model, batch, options)
        else:
            scored = self.scorer.score(model, batch, options)
        lengths = torch.tensor([len(responses[i]) for i in order])
        back = torch.tensor(order).argsort().to(device)

        def padded(values: Tensor | None) -> Tensor | None:
            return None if values is None else _rows(values, lengths)[back]

        chosen = None if whole is None else self._response_logits(whole, queries, responses, order, lengths)
        logps = padded(scored.logps)
        assert logps is not None
        found = None if chosen is None else _rows(chosen, lengths)[back]
        return ResponseScores(logps, padded(scored.values), padded(scored.entropies), found)

    def _batch(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        if self.is_encoder_decoder:
            rows = [
                {"prompt_input_ids": query, "completion_input_ids": response}
                for query, response in zip(queries, responses, strict=True)
            ]
            return seq2seq_batch(
                rows, pad_token_id=self.scorer.pad_token_id, completions=("completion_input_ids",)
            )
        groups: list[tuple[Tensor, list[Tensor]]] = []
        for query, response in zip(queries, responses, strict=True):
            if self.scorer.shares_prefixes and groups and torch.equal(groups[-1][0], query):
                groups[-1][1].append(response)
            else:
                groups.append((query, [response]))
        batch = completion_batch(groups, prefix_sharing=self.scorer.shares_prefixes)
        return {name: value for name, value in batch.items() if name != "rows"}

    def _response_logits(
        self,
        logits: Tensor,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        order: list[int],
        lengths: Tensor,
    ) -> Tensor:
        """Of the model's logits `(B, T, V)` those that predict response tokens, `(K, V)`, in the order of the batch."""
        parts = []
        for row, index in enumerate(order):
            begin = 0 if self.is_encoder_decoder else len(queries[index]) - 1
            parts.append(logits[row, begin : begin + len(responses[index])])
        return torch.cat(parts)


def concatenated(parts: Sequence[ResponseScores]) -> ResponseScores:
    """The scores of several forward passes, one after another."""

    def joined(columns: Sequence[Tensor | None]) -> Tensor | None:
        present = [column for column in columns if column is not None]
        return join_rows(present) if present else None

    logps = joined([part.logps for part in parts])
    assert logps is not None
    rest = (joined([getattr(part, name) for part in parts]) for name in ResponseScores._fields[1:])
    return ResponseScores(logps, *rest)


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors `(b, r, ...)` to `(B, R, ...)`, padded with 0.

    >>> join_rows([torch.ones(1, 1), torch.ones(1, 2)])
    tensor([[1., 0.],
            [1., 1.]])
    """
    return pad_sequence([row for part in parts for row in part], batch_first=True)


def _by_query(queries: Sequence[Tensor]) -> list[int]:
    """An order of the rows in which equal queries are neighbours."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, query in enumerate(queries):
        groups.setdefault(tuple(query.tolist()), []).append(index)
    return [index for group in groups.values() for index in group]


def _rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Values of all tokens in a row, `(K, ...)`, as `(B, R, ...)`."""
    return pad_sequence(list(values.split(lengths.tolist())), batch_first=True)
