"""Teachers behind servers: the most likely tokens of `/v1/completions`, put into batches as a teacher's columns."""

import logging
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trl.data.teacher_columns import LARGEST_LOGP, TEACHER, TEACHER_COLUMNS, concatenated
from trl.generation.serving.connection import Json, ServerConnection, ServerLost
from trl.models.packed.layout import IGNORED, Columns
from trl.models.scoring.causal import Scorer
from trl.models.teacher import ColumnTeacher
from trl.objectives.distillation import TeacherLoss
from trl.options.checks import json_object
from trl.reporting.deadlines import ThreadedCalls
from trl.tensors.vocabulary_loss import VocabularyLoss

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

    Requests have token ids as prompts and ask for log-probs in vLLM's form (`prompt_logprobs`), or else in OpenAI's
    (`echo` and `logprobs`). Tokens that such a server names by their text are found by the student's `tokenizer`;
    `vocabulary` is the number of tokens that the student has. Without `model` the server's first one is used. A request
    is repeated until the `deadline`, in seconds. The API key is the environment's TRL_TEACHER_SERVER_TOKEN. Raises:
    ServerLost if it does not answer, ValueError for requests that it refuses, such as too large a `top_k`.
    """

    def __init__(
        self, url: str, *, top_k: int, tokenizer: PreTrainedTokenizerBase, vocabulary: int, model: str | None = None,
        deadline: float = 240.0,
    ) -> None:  # fmt: skip
        address = url.rstrip("/").removesuffix("/v1")
        self._http = ServerConnection(address, None, kind="teacher server", variable=TOKEN_VARIABLE)
        self.top_k, self.vocabulary, self.deadline = top_k, vocabulary, deadline
        self._tokenizer, self._ids_of_text = tokenizer, dict[str, list[int]]()
        if model is None:
            listed = self._repeated(partial(self._http.get, "/v1/models"), "its models").get("data")
            if not isinstance(listed, list) or not listed or "id" not in listed[0]:
                raise self._fault("/v1/models", "it lists no model")
            model = str(listed[0]["id"])
        self.model, self._echoes = model, False
        probe, name = [[0, 0]], ["the first request"]
        try:
            self._echoes = "prompt_logprobs" not in self._choices(probe, name[0])[0]
        except ValueError:  # it refuses unknown settings
            self._echoes = True
        self.best(probe, name)

    def best(self, rows: Sequence[list[int]], names: Sequence[str]) -> list[Best]:
        """The most likely tokens of some rows of at least two token ids; `names` of the rows are for errors.

        Raises: ServerLost if no answer came in time; RuntimeError, which names the row, for an answer of another form.
        """
        choices = self._choices(rows, names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}")
        read = self._of_echo if self._echoes else self._of_prompt
        best = []
        for ids, name, choice in zip(rows, names, choices, strict=True):
            try:
                entries = read(ids, choice)
            except (TypeError, ValueError, AttributeError, LookupError) as error:
                reason = f"its answer is malformed ({type(error).__name__}: {error})"
                raise self._fault(name, reason) from error
            best.append(self._arrays(entries, name))
        return best

    def _choices(self, rows: Sequence[list[int]], where: str) -> list[Json]:
        body: Json = {"model": self.model, "prompt": rows, "temperature": 0.0}
        if self._echoes:
            body |= {"max_tokens": 0, "echo": True, "logprobs": self.top_k, "return_tokens_as_token_ids": True}
        else:
            body |= {"max_tokens": 1, "prompt_logprobs": self.top_k}
        choices = self._repeated(partial(self._http.post, "/v1/completions", body), where).get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._fault(where, "its answer has no list of choices")
        by_index = {choice.get("index", number): choice for number, choice in enumerate(choices)}
        if set(by_index) != set(range(len(rows))):
            raise self._fault(where, f"it answered {len(choices)} of {len(rows)} prompts")
        return [by_index[number] for number in range(len(rows))]

    def _repeated(self, ask: Callable[..., Json], where: str) -> Json:
        until, pause = time.monotonic() + self.deadline, FIRST_PAUSE_S
        while True:
            try:
                return ask(timeout_s=max(until - time.monotonic(), 0.1))
            except ServerLost as error:
                if time.monotonic() + pause >= until:
                    fault = f"{error} ({where}; no answer within {self.deadline:g} s.)"
                    remedy = "Start it again and resume from the last checkpoint, or raise teacher_server_timeout"
                    raise ServerLost(f"{fault} {remedy}.") from error
                logger.warning("%s Trying again in %g s.", error, pause)
            except (ValueError, RuntimeError) as error:
                raise type(error)(f"{error} ({where})") from error
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _of_prompt(self, ids: list[int], choice: Json) -> list[dict[int, float]]:
        """vLLM's form: for each token a dict from token ids to their log-probs, of the prompt's own token too."""
        places = choice["prompt_logprobs"]
        entries = [{int(key): float(token["logprob"]) for key, token in place.items()} for place in places[1:]]
        _check_tokens(ids, [[ids[0]], *entries] if places else [])
        return entries

    def _of_echo(self, ids: list[int], choice: Json) -> list[dict[int, float]]:
        """OpenAI's form: the tokens of the prompt, and for each a dict from tokens to their log-probs."""
        logprobs, by_id = choice["logprobs"], []
        # A generated token may follow.
        pairs = zip(logprobs["tokens"][: len(ids)], logprobs["top_logprobs"], strict=False)
        tokens, entries = zip(*pairs, strict=True)
        _check_tokens(ids, [self._ids(text) for text in tokens])
        for entry in entries[1:]:
            ids_of = {text: self._ids(text) for text in entry}
            if unclear := [text for text, known in ids_of.items() if len(known) != 1]:
                raise ValueError(f"the text {unclear[0]!r} is not one token. Use a server that gives ids, such as vLLM")
            by_id.append({ids_of[text][0]: float(logp) for text, logp in entry.items()})
        return by_id

    def _ids(self, token: str) -> list[int]:
        if match := _TOKEN_ID.fullmatch(token):
            return [int(match[1])]
        if not self._ids_of_text:
            for number in range(len(self._tokenizer)):
                self._ids_of_text.setdefault(str(self._tokenizer.decode([number])), []).append(number)
        return self._ids_of_text.get(token, [])

    def _arrays(self, entries: list[dict[int, float]], name: str) -> Best:
        """The k largest of each entry; the prompt's own token may be there beside them."""
        fewest, k = min((len(entry) for entry in entries), default=self.top_k), self.top_k
        if fewest < k:
            raise self._fault(name, f"it gave {fewest} tokens for a position, expected teacher_top_k={k}. Lower it")
        best = [sorted(entry.items(), key=lambda item: -item[1])[:k] for entry in entries]
        table = np.array(best, float).reshape(len(entries), k, 2)
        ids, logps = table[..., 0].astype(np.int64), table[..., 1]
        if not (logps <= LARGEST_LOGP).all():
            raise self._fault(name, "it gave log-probs that are NaN or above 0")
        if ids.max(initial=0) >= self.vocabulary:
            fault = f"it gave token id {ids.max()}, the student has {self.vocabulary} tokens"
            raise self._fault(name, f"{fault}. Use a teacher with its tokenizer")
        return ids, logps

    def _fault(self, where: str, what: str) -> RuntimeError:
        return RuntimeError(f"The teacher server at {self._http.base_url}, {where}: {what}.")


def _check_tokens(ids: list[int], answered: Sequence[Container[int]]) -> None:
    if len(answered) != len(ids) or any(token not in known for token, known in zip(ids, answered, strict=True)):
        raise ValueError(f"{len(answered)} tokens that are not the {len(ids)} of the prompt")


class _Row(NamedTuple):
    """A row of a micro-batch: its tokens up to the last trained one, the trained ones' positions, its teacher."""

    batch: int
    row: int
    ids: list[int]
    trained: np.ndarray
    server: int


class TeacherServers(ColumnTeacher):
    """One server for all rows, or several by the `names` that rows have in their column `teacher`.

    Batches without columns get them when their loss is computed; `filled` does it for several batches together.
    """

    def __init__(self, servers: Mapping[str, TeacherServer] | TeacherServer) -> None:
        is_one = isinstance(servers, TeacherServer)
        self.names: tuple[str, ...] = () if is_one else tuple(servers)
        self.servers = [servers] if is_one else list(servers.values())

    def divergence(
        self, scorer: Scorer, model: nn.Module, batch: Columns, loss: TeacherLoss, **options: Any
    ) -> VocabularyLoss:
        if TEACHER_COLUMNS[0] not in batch:
            (batch,) = self.filled([batch], scorer.padded_inputs)
        return super().divergence(scorer, model, batch, loss, **options)

    def filled(self, batches: Sequence[Columns], rows_of: Callable[[Columns], Mapping[str, Tensor]]) -> list[Columns]:
        """Batches with `teacher_ids` and `teacher_logps` `(K, k)` of their trained tokens; all are requested together.

        `rows_of` makes padded rows of a batch. A batch of several teachers has `teacher (B,)`, the number of each row's
        server. Raises: as `TeacherServer.best`.
        """
        rows = [row for number, batch in enumerate(batches) for row in _trained_rows(number, batch, rows_of(batch))]
        parts = []
        for server in range(len(self.servers)):
            served = [row for row in rows if row.server == server]
            parts += [served[start : start + ROWS_PER_REQUEST] for start in range(0, len(served), ROWS_PER_REQUEST)]
        calls = [("teacher", partial(self._best, part)) for part in parts]
        longest = max(server.deadline for server in self.servers) + GRACE_S
        answers: dict[tuple[int, int], Best] = {}
        for part, answer in zip(parts, ThreadedCalls(most_left_behind=1).run(calls, longest), strict=True):
            if isinstance(answer, BaseException):
                raise answer
            answers |= {row[:2]: best for row, best in zip(part, answer, strict=True)}
        filled = []
        for number, batch in enumerate(batches):
            columns = concatenated([answers[row[:2]] for row in rows if row.batch == number])
            device = batch["input_ids"].device
            filled.append({**batch, **{name: column.to(device) for name, column in columns.items()}})
        return filled

    def _best(self, rows: Sequence[_Row]) -> list[Best]:
        """The most likely tokens in place of the trained ones of each row, all of one server."""
        names = [f"row {row.row} of micro-batch {row.batch}" for row in rows]
        best = self.servers[rows[0].server].best([row.ids for row in rows], names)
        return [(ids[row.trained - 1], logps[row.trained - 1]) for row, (ids, logps) in zip(rows, best, strict=True)]


def served_teacher(
    teacher: Any, args: Any, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int
) -> TeacherServers | None:
    """The servers if `teacher` is an address, several by name, or what the config names as such; else None.

    Several are a dict, or a JSON object as text. Raises: ValueError for another teacher beside that of the config, for
    a temperature other than 1, and as `TeacherServer`.
    """
    urls = args.teacher_model_server_url
    if urls is not None and teacher is not urls:
        raise ValueError("teacher_model and teacher_model_server_url cannot be combined; set one.")
    if urls is None:
        urls, addresses = teacher, teacher.values() if isinstance(teacher, Mapping) else [teacher]
        if not all(isinstance(url, str) and url.startswith(("http://", "https://")) for url in addresses):
            return None
    if args.temperature != 1:
        fault = f"temperature={args.temperature}: a teacher server gives log-probs at temperature 1"
        raise ValueError(f"{fault}. Set temperature=1.0, or write columns at another with `trl teach`.")
    if isinstance(urls, str) and urls.lstrip().startswith("{"):
        urls = json_object("teacher_model_server_url", urls) or {}
    options: Json = {"top_k": args.teacher_top_k, "deadline": args.teacher_server_timeout}
    options |= {"tokenizer": tokenizer, "vocabulary": vocabulary}
    if isinstance(urls, str):
        model = None if urls is args.teacher_model_name_or_path else args.teacher_model_name_or_path
        return TeacherServers(TeacherServer(urls, model=model, **options))
    return TeacherServers({name: TeacherServer(url, **options) for name, url in urls.items()})


def _trained_rows(number: int, batch: Columns, rows: Mapping[str, Tensor]) -> Iterator[_Row]:
    servers = batch[TEACHER].tolist() if TEACHER in batch else [0] * len(rows["input_ids"])
    columns = (rows[name] for name in ("input_ids", "labels", "attention_mask"))
    for row, (ids, labels, mask, server) in enumerate(zip(*columns, servers, strict=True)):
        real = mask != 0
        trained = (labels[real][1:] != IGNORED).nonzero()[:, 0].cpu().numpy() + 1
        if len(trained):
            yield _Row(number, row, ids[real][: trained[-1] + 1].tolist(), trained, server)
