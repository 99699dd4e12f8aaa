"""Teachers behind servers: the most likely tokens of `/v1/completions`, put into batches as a teacher's columns."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.data.teacher_columns import LARGEST_LOGP, TEACHER, concatenated
from trl.generation.serving.connection import ServerConnection, ServerLost
from trl.models.packed.layout import IGNORED
from trl.options.checks import json_object
from trl.reporting.deadlines import ThreadedCalls

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "TRL_TEACHER_SERVER_TOKEN"
ROWS_PER_REQUEST = 8
GRACE_S = 10.0  # for an answer that arrives slowly
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between tries
_TOKEN_ID = re.compile(r"token_id:(\d+)")

Best = tuple[np.ndarray, np.ndarray]
"""Token ids and log-probs of the most likely tokens, `(T - 1, k)` each, for all tokens of a row but the first."""


class TeacherServer:
    """A teacher that an OpenAI-style server at `url` serves; its log-probs are at temperature 1.

    Requests have token ids as prompts and ask for log-probs in vLLM's form (`prompt_logprobs`), or, from a server that does
    not know it, in OpenAI's (`echo` and `logprobs`). Tokens that such a server names by their text need the `tokenizer`.
    Without `model` the server's first one is used. A request is repeated until the `deadline`, in seconds, while the server
    is not reachable or busy. The server's API key, if it needs one, is the environment's TRL_TEACHER_SERVER_TOKEN.

    Raises: ServerLost if it does not answer, ValueError for requests that it refuses, such as too large a `top_k`.
    """

    def __init__(
        self,
        url: str,
        *,
        top_k: int,
        tokenizer: PreTrainedTokenizerBase,
        model: str | None = None,
        deadline: float = 240.0,
    ) -> None:
        address = url.rstrip("/").removesuffix("/v1")
        self._http = ServerConnection(address, None, kind="teacher server", variable=TOKEN_VARIABLE)
        self.url, self.top_k, self.deadline, self._tokenizer = self._http.base_url, top_k, deadline, tokenizer
        self._ids_of_text: dict[str, list[int]] | None = None
        until = time.monotonic() + deadline
        if model is None:
            listed = self._repeated(partial(self._http.get, "/v1/models"), until, "its models").get("data")
            try:
                model = str(listed[0]["id"])  # type: ignore[index]
            except (TypeError, LookupError):
                raise RuntimeError(
                    f"{self._named('/v1/models')} lists no model: {str(listed)[:200]}."
                ) from None
        self.model, self._echoes = model, False
        probe = [[0, 0]]
        try:
            self._echoes = "prompt_logprobs" not in self._choices(probe, until, "the first request")[0]
        except ValueError:  # it refuses unknown settings
            self._echoes = True
        self.best(probe, ["the first request"])

    def best(self, rows: Sequence[Sequence[int]], names: Sequence[str]) -> list[Best]:
        """The most likely tokens of some rows of at least two token ids; `names` of the rows are for errors.

        Raises: ServerLost if no answer came in time; RuntimeError, which names the row, for an answer of another form.
        """
        until, where = time.monotonic() + self.deadline, f"{names[0]} to {names[-1]}"
        choices = self._choices(rows, until, where if len(names) > 1 else names[0])
        read = self._of_echo if self._echoes else self._of_prompt
        found = []
        for ids, name, choice in zip(rows, names, choices, strict=True):
            try:
                entries = read(list(ids), choice)
            except (KeyError, TypeError, ValueError, AttributeError, LookupError) as error:
                raise self._fault(
                    name, f"its answer is malformed ({type(error).__name__}: {error})"
                ) from error
            found.append(self._arrays(entries, name))
        return found

    def _choices(self, rows: Sequence[Sequence[int]], until: float, where: str) -> list[dict[str, Any]]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [list(row) for row in rows],
            "temperature": 0.0,
        }
        if self._echoes:
            extra = {
                "max_tokens": 0,
                "echo": True,
                "logprobs": self.top_k,
                "return_tokens_as_token_ids": True,
            }
        else:
            extra = {"max_tokens": 1, "prompt_logprobs": self.top_k}

        def ask(timeout_s: float) -> dict[str, Any]:
            return self._http.post("/v1/completions", {**body, **extra}, timeout_s=timeout_s)

        choices = self._repeated(ask, until, where).get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._fault(where, "its answer has no list of choices")
        ordered = {choice.get("index", number): choice for number, choice in enumerate(choices)}
        if sorted(ordered) != list(range(len(rows))):
            raise self._fault(where, f"it answered {len(choices)} of {len(rows)} prompts")
        return [ordered[number] for number in range(len(rows))]

    def _repeated(self, ask: Callable[..., dict[str, Any]], until: float, where: str) -> dict[str, Any]:
        """The answer to a request, which is repeated with growing pauses until the deadline."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                return ask(timeout_s=max(until - time.monotonic(), 0.1))
            except ServerLost as error:
                if time.monotonic() + pause >= until:
                    raise ServerLost(
                        f"{error} ({where}; no answer within {self.deadline:g} s.) Start it again and resume from the last "
                        "checkpoint, or raise teacher_server_timeout."
                    ) from error
                logger.warning("%s Trying again in %g s.", error, pause)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _of_prompt(self, ids: list[int], choice: Mapping[str, Any]) -> list[dict[int, float]]:
        """vLLM's form: for each token a dict from token ids to their log-probs, of the prompt's own token too."""
        given = choice["prompt_logprobs"]
        entries = [{int(key): float(each["logprob"]) for key, each in entry.items()} for entry in given[1:]]
        if len(given) != len(ids) or any(
            own not in entry for own, entry in zip(ids[1:], entries, strict=True)
        ):
            raise ValueError(f"{len(given)} positions that are not the {len(ids)} tokens of the prompt")
        return entries

    def _of_echo(self, ids: list[int], choice: Mapping[str, Any]) -> list[dict[int, float]]:
        """OpenAI's form: the tokens of the prompt, and for each a dict from tokens to their log-probs."""
        given = choice["logprobs"]
        tokens, entries = given["tokens"][: len(ids)], given["top_logprobs"][: len(ids)]
        if len(tokens) != len(ids) or any(
            own not in self._ids(text) for own, text in zip(ids, tokens, strict=True)
        ):
            raise ValueError(f"{len(tokens)} tokens that are not the {len(ids)} of the prompt")
        found = []
        for entry in entries[1:]:
            each = [(self._ids(text), float(logp)) for text, logp in entry.items()]
            if unclear := [text for text, (known, _) in zip(entry, each, strict=True) if len(known) != 1]:
                raise ValueError(
                    f"the text {unclear[0]!r} is not one token. Use a server that names tokens by id, such as vLLM"
                )
            found.append({known[0]: logp for known, logp in each})
        return found

    def _ids(self, token: str) -> list[int]:
        """The ids that a token of an answer may have."""
        if match := _TOKEN_ID.fullmatch(token):
            return [int(match[1])]
        if self._ids_of_text is None:
            self._ids_of_text = {}
            for number in range(len(self._tokenizer)):
                self._ids_of_text.setdefault(str(self._tokenizer.decode([number])), []).append(number)
        return self._ids_of_text.get(token, [])

    def _arrays(self, entries: list[dict[int, float]], name: str) -> Best:
        """The k largest of each entry; the prompt's own token may be there beside them."""
        fewest = min((len(entry) for entry in entries), default=self.top_k)
        if fewest < self.top_k:
            raise self._fault(
                name, f"it gave {fewest} tokens for a position, expected teacher_top_k={self.top_k}. Lower it"
            )
        best = [sorted(entry.items(), key=lambda item: -item[1])[: self.top_k] for entry in entries]
        found = np.array(best, float).reshape(len(entries), self.top_k, 2)
        ids, logps = found[..., 0].astype(np.int64), found[..., 1]
        if not (logps <= LARGEST_LOGP).all():
            raise self._fault(name, "it gave log-probs that are NaN or above 0")
        return ids, logps

    def _named(self, where: str) -> str:
        return f"The teacher server at {self.url}, {where}:"

    def _fault(self, where: str, what: str) -> RuntimeError:
        return RuntimeError(f"{self._named(where)} {what}.")


class TeacherServers:
    """One server for all rows, or several by the names that rows have in their column `teacher`.

    `vocabulary` is the number of tokens that the student has.
    """

    def __init__(self, servers: Mapping[str, TeacherServer] | TeacherServer, *, vocabulary: int) -> None:
        is_one = isinstance(servers, TeacherServer)
        self.names: tuple[str, ...] = () if is_one else tuple(servers)
        self.servers, self.vocabulary = [servers] if is_one else list(servers.values()), vocabulary

    def filled(self, batches: Sequence[Any], rows_of: Callable[[Any], Mapping[str, Tensor]]) -> list[Any]:
        """Batches with `teacher_ids` and `teacher_logps` `(K, k)` of their trained tokens; all are requested together.

        `rows_of` makes padded rows of a batch. A batch of several teachers has `teacher (B,)`, the number of each row's server.
        Raises: as `TeacherServer.best`.
        """
        rows = [
            (number, row, *each)
            for number, batch in enumerate(batches)
            for row, each in enumerate(_trained_rows(rows_of(batch), batch.get(TEACHER)))
        ]
        asked: dict[int, list[int]] = {}
        for place, (*_, positions, server) in enumerate(rows):
            if len(positions):
                asked.setdefault(server, []).append(place)
        calls, places = [], []
        for server, own in asked.items():
            for start in range(0, len(own), ROWS_PER_REQUEST):
                part = own[start : start + ROWS_PER_REQUEST]
                names = [f"row {rows[place][1]} of micro-batch {rows[place][0]}" for place in part]
                ids = [rows[place][2][: rows[place][3][-1] + 1] for place in part]
                calls.append(("teacher", partial(self.servers[server].best, ids, names)))
                places.append(part)
        found: dict[int, Best] = {}
        longest = max(server.deadline for server in self.servers) + GRACE_S
        for part, answer in zip(places, ThreadedCalls(most_left_behind=1).run(calls, longest), strict=True):
            if isinstance(answer, Exception):
                raise answer
            found |= dict(zip(part, answer, strict=True))
        columns: list[list[Best]] = [[] for _ in batches]
        for place, (number, row, _, positions, _) in enumerate(rows):
            if place in found:
                ids, logps = (part[np.array(positions) - 1] for part in found[place])
                if ids.max() >= self.vocabulary:
                    raise RuntimeError(
                        f"the teacher of row {row} of micro-batch {number} has token id {ids.max()}, the student {self.vocabulary} "
                        "tokens. Use a teacher with the student's tokenizer."
                    )
                columns[number].append((ids, logps))
        made = [
            {name: column.to(batch["input_ids"].device) for name, column in concatenated(own).items()}
            for batch, own in zip(batches, columns, strict=True)
        ]
        return [{**batch, **own} for batch, own in zip(batches, made, strict=True)]


def connected(urls: Any, args: Any, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int) -> TeacherServers:
    """The servers at an address, or at several by name (a dict, or a JSON object as text), with the settings of `args`.

    Raises: ValueError for a temperature other than 1, and as `TeacherServer`.
    """
    if args.temperature != 1:
        raise ValueError(
            f"temperature={args.temperature}: a teacher server gives log-probs at temperature 1. Set temperature=1.0, or write "
            "columns at another temperature with `trl teach`."
        )
    if isinstance(urls, str) and urls.lstrip().startswith("{"):
        urls = json_object("teacher_model_server_url", urls)
    options: Any = {
        "top_k": args.teacher_top_k, "deadline": args.teacher_server_timeout, "tokenizer": tokenizer
    }  # fmt: skip
    if isinstance(urls, str):
        one = TeacherServer(urls, model=args.teacher_model_name_or_path, **options)
        return TeacherServers(one, vocabulary=vocabulary)
    servers = {name: TeacherServer(url, **options) for name, url in urls.items()}
    return TeacherServers(servers, vocabulary=vocabulary)


def is_address(teacher: Any) -> bool:
    """Whether a teacher is given as the address of a server, or as those of several by name."""
    urls = teacher.values() if isinstance(teacher, Mapping) else [teacher]
    return all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in urls)


def _trained_rows(
    rows: Mapping[str, Tensor], teachers: Tensor | None
) -> list[tuple[list[int], list[int], int]]:
    """Token ids, trained positions and server of each padded row."""
    servers = [0] * len(rows["input_ids"]) if teachers is None else teachers.tolist()
    found = []
    columns = (rows[name] for name in ("input_ids", "labels", "attention_mask"))
    for ids, labels, mask, server in zip(*columns, servers, strict=True):
        real = mask != 0
        trained = labels[real] != IGNORED
        trained[:1] = False
        found.append((ids[real].tolist(), trained.nonzero()[:, 0].tolist(), server))
    return found
