"""What sessions tell clients of the OpenAI-style API: errors, and log-probs of prompts. It needs no FastAPI."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trl.generation.live import Scored
from trl.generation.serving.connection import Json

EchoedToken = tuple[str, float | None, dict[str, float] | None]
_KINDS = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class APIError(Exception):
    """An error that the client is told: an HTTP status, a text, and OpenAI's `code` and `param`."""

    def __init__(self, status: int, text: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.param = status, code, param

    def body(self) -> Json:
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"message": str(self), "type": kind, "param": self.param, "code": self.code}


def check_text(value: object) -> None:
    """Raise ValueError for a JSON value with half of a surrogate pair, which no tokenizer reads."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"text has {half!r}, half of a surrogate pair. Send the whole character") from None


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A prompt's tokens and text, the log-probs `at` each place but the first, and the texts of all tokens."""

    ids: Sequence[int]
    text: str
    at: Sequence[Scored]
    texts: Mapping[int, str]

    def in_vllms_form(self) -> list[Json | None]:
        """vLLM's `prompt_logprobs`: for each token but the first those at its place, by their ids."""

        def entry(token: int, logp: float, rank: int) -> Json:
            return {"logprob": logp, "rank": rank, "decoded_token": self.texts[token]}

        return [None, *({str(scored[0]): entry(*scored) for scored in place} for place in self.at)]

    def tokens(self) -> list[EchoedToken]:
        """OpenAI's form: the text and log-prob of each token, and the most likely texts at its place."""
        tokens: list[EchoedToken] = [(self.texts[self.ids[0]], None, None)]
        for *best, (token, logp, _) in self.at:
            tokens.append((self.texts[token], logp, {self.texts[other]: value for other, value, _ in best}))
        return tokens
