"""What sessions tell clients of the OpenAI-style API: errors, and log-probs of prompts. It needs no FastAPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trl.generation.live import PromptLogps


class APIError(Exception):
    """An error that the client is told: an HTTP status, a text, and OpenAI's `code` and `param`."""

    def __init__(self, status: int, text: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The content of `error`."""
        kinds = {
            401: "authentication_error",
            404: "not_found_error",
            503: "server_error",
            500: "server_error",
        }
        kind = kinds.get(self.status, "invalid_request_error")
        return {"message": str(self), "type": kind, "param": self.param, "code": self.code}


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Log-probs of a prompt's tokens, its text, and the text of each of the tokens."""

    logps: PromptLogps
    text: str
    texts: Mapping[int, str]

    def in_vllms_form(self) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token but the first those at its place, by their ids."""
        return [None, *(self._entries(place) for place in range(len(self.logps.logps)))]

    def _entries(self, place: int) -> dict[str, Any]:
        best = zip(self.logps.best[place], self.logps.best_logps[place], strict=True)
        ranked = [(token, logp, rank) for rank, (token, logp) in enumerate(best, 1)]
        own = self.logps.ids[place + 1], self.logps.logps[place], self.logps.ranks[place]
        return {
            str(token): {"logprob": logp, "rank": rank, "decoded_token": self.texts[token]}
            for token, logp, rank in [*ranked, own]
        }

    def tokens(self) -> list[tuple[str, float | None, dict[str, float] | None]]:
        """OpenAI's form: the text and log-prob of each token, and the most likely texts at its place."""
        found: list[Any] = [(self.texts[self.logps.ids[0]], None, None)]
        ids, logps, _, best, best_logps = self.logps
        for token, logp, *several in zip(ids[1:], logps, best, best_logps, strict=True):
            entry = {self.texts[each]: value for each, value in zip(*several, strict=True)}
            found.append((self.texts[token], logp, entry))
        return found
