"""Episodes of a model that calls tools in its text, for `PPOTrainer.step`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trl.generation.engine import Engine, Sampling
from trl.generation.main_process import any_process, first_rng_stream
from trl.generation.transformers.engine import TransformersEngine, context_length_of
from trl.generation.transformers.phase import without_wrappers
from trl.models.distributed import is_sharded
from trl.models.parts import causal_core, check_decoder_only
from trl.rewards.result import read_scores
from trl.rollouts.text_history import TextHistory

REQUEST, CALL, RESPONSE, SUBMIT = "<request>", "<call>", "<response>", "<submit>"
_NAME = re.compile(r"\s*<([^<>]+)>")


def named_tools(tools: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Callable[[str], Any]]:
    """Tools by name; those of a list are named after their function or class.

    Raises: TypeError for a tool that cannot be called, ValueError for invalid or equal names.
    """
    pairs = tools.items() if isinstance(tools, Mapping) else [(_own_name(tool), tool) for tool in tools or ()]
    found: dict[str, Callable[[str], Any]] = {}
    for name, tool in pairs:
        if not callable(tool):
            raise TypeError(f"tools[{name!r}] must be callable with a query, got {type(tool).__name__}.")
        if not _NAME.fullmatch(f"<{name}>") or name in found:
            raise ValueError(f"tools must have different names without < and >, got {name!r}. Use a dict.")
        found[name] = tool
    return found


def _own_name(tool: Any) -> str:
    while isinstance(tool, functools.partial):
        tool = tool.func
    return getattr(tool, "__name__", type(tool).__name__)


def parse_call(text: str) -> tuple[str, str] | None:
    """Tool and query of the last request in a text; None without a request or a tool's name.

    >>> parse_call("Let me see. <request><Calculator>13-3<call>")
    ('Calculator', '13-3')
    """
    before, called, _ = text.rpartition(CALL)
    _, requested, request = before.rpartition(REQUEST)
    name = _NAME.match(request)
    return (name[1], request[name.end() :]) if called and requested and name else None


def answer(tools: Mapping[str, Callable[[str], Any]], text: str) -> str:
    """The answer of the tool that a text calls, or the text of an error."""
    call = parse_call(text)
    if call is None or call[0] not in tools:
        wrong = "The request names no tool." if call is None else f"Unknown tool {call[0]}."
        return f"{wrong} Tools: {', '.join(tools) or 'none'}."
    try:
        return str(tools[call[0]](call[1]))
    except Exception as error:  # the model reads it
        return f"{type(error).__name__}: {error}"


class Episodes(NamedTuple):
    """The result of `TextEnvironment.run`: lists with one entry per query, as `PPOTrainer.step` takes them."""

    queries: list[Tensor]
    responses: list[Tensor]
    masks: list[Tensor]
    rewards: list[Any]
    histories: list[TextHistory]


class TextEnvironment:
    """Lets a model answer queries in turns: it calls tools in its text, their answers are put behind the
    call.

    The model's turn ends with `<request><Tool>query<call>`, with `<submit>`, with an end token or at its
    length. After a call `answer<response>` is appended and the model goes on. `tools` are callables from text
    to anything that can be text, by name or in a list. `reward_fn(texts, **columns)` scores the last text
    that the model wrote in each episode; it returns a number for each, or one for all. `prompt` is put in
    front of every query. `max_turns` (of model and tool), `max_length` (tokens of an episode; also at most
    the model's context length) and `max_tool_reponse` (characters of an answer; TRL's spelling, the attribute is `max_tool_response`) are
    limits. `generation_kwargs` are settings of `Sampling`. `engine` (default: a `TransformersEngine` around `model`) generates.

    Example:
        >>> env = TextEnvironment(model, tokenizer, {"Calculator": calculate}, reward_fn)  # doctest: +SKIP
        >>> queries, responses, masks, rewards, histories = env.run(["What is 13-3?"])  # doctest: +SKIP
    """

    request_token, call_token, response_token, submit_token = REQUEST, CALL, RESPONSE, SUBMIT

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Mapping[str, Callable[[str], Any]] | Sequence[Callable[[str], Any]] | None = None,
        reward_fn: Callable[..., Any] | None = None,
        prompt: str | None = None,
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        if engine is None and model is not None:
            engine = TransformersEngine(model, tokenizer=tokenizer)
        if tokenizer is None or engine is None:
            raise ValueError("TextEnvironment needs a model and its tokenizer, got None. Pass both.")
        limits = {"max_turns": max_turns, "max_tool_reponse": max_tool_reponse, "max_length": max_length}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.model, self.tokenizer, self.tools = model, tokenizer, named_tools(tools)
        self.reward_fn, self.prompt = reward_fn, prompt or ""
        self.max_turns, self.max_tool_response = max_turns, max_tool_reponse
        self.engine = engine
        self.max_length = _shorter(max_length, None if model is None else _context_length(model))
        self.generation_kwargs = dict(generation_kwargs or {})
        self.sampling = self._sampling()
        self._is_sharded = model is not None and is_sharded(model)

    def _sampling(self) -> Sampling:
        sampling = Sampling().updated(self.generation_kwargs)
        stops = (*sampling.stop_strings, self.call_token, self.submit_token)
        return replace(
            sampling,
            stop_strings=tuple(dict.fromkeys(stops)),
            max_new_tokens=sampling.new_tokens,
            max_length=_shorter(sampling.max_length, self.max_length),
        )

    def run(self, queries: Sequence[str], **rewards_kwargs: Any) -> Episodes:
        """Run one episode for each query; `rewards_kwargs` (one value per query each) are passed to the reward function.

        Returns the tokens of queries (with the prompt) and responses, the responses' masks (1 for the model's tokens, 0 for tools'),
        rewards (0-dim tensors; None without a reward function) and histories.
        """
        histories = self._begin(queries)
        for _ in range(self.max_turns):
            if self._all_done(histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = [self.step(history) for history in histories]
            histories = self.tasks_end_check(histories, model_turn=False)
        for history in histories:
            if not history.completed:
                history.complete(truncated=True)
        self.compute_reward(histories, **rewards_kwargs)
        tokens, responses, masks = zip(*[one.split_query_response_tokens() for one in histories], strict=True)
        return Episodes(
            list(tokens), list(responses), list(masks), [history.reward for history in histories], histories
        )

    def _all_done(self, histories: list[TextHistory]) -> bool:
        """Whether all histories are completed, for sharded models those of all processes."""
        done = all(history.completed for history in histories)
        return not any_process(not done) if self._is_sharded else done

    def _begin(self, queries: Sequence[str]) -> list[TextHistory]:
        if isinstance(queries, str) or not len(queries):
            raise ValueError(f"queries must be a list of one text or more, got {queries!r}.")
        histories = []
        for index, query in enumerate(queries):
            text = self.prompt + query
            history = TextHistory(text, self.tokenizer(text)["input_ids"], system=True)
            if self._room(history) == 0:
                raise ValueError(
                    f"queries[{index}] has {len(history.tokens)} tokens with the prompt, an episode has at "
                    f"most {self.max_length}. Shorten it, or raise max_length."
                )
            histories.append(history)
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Generate the model's next turn in every history that is not completed."""
        active = [index for index, history in enumerate(histories) if not history.completed]
        prompts = [histories[index].tokens.tolist() for index in active]
        found = self.engine.generate(
            prompts, self.sampling, streams=[first_rng_stream() + one for one in active]
        )
        for index, completion in zip(active, found, strict=True):
            histories[index].append_segment(self._text(completion.ids), completion.ids, system=False)
        return histories

    def _text(self, ids: list[int]) -> str:
        """The text of a turn without its end token."""
        marks = (self.request_token, self.call_token, self.submit_token)
        last = self.tokenizer.convert_ids_to_tokens(ids[-1])
        ids = ids[:-1] if ids[-1] in self.tokenizer.all_special_ids and last not in marks else ids
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """Name and query of the tool that a text calls; (None, None) without a call."""
        return parse_call(text) or (None, None)

    def step(self, history: TextHistory) -> TextHistory:
        """Answer the tool call that a history ends with, unless it is completed."""
        if history.completed:
            return history
        text, longest = answer(self.tools, history.last_text_segment), self.max_tool_response
        if len(text) > longest:
            text = text[: max(longest - 3, 0)] + "..."[:longest]
        text += self.response_token
        ids, room = self._ids(text), self._room(history)
        if room is not None and len(ids) > room:
            ids = ids[:room]
            text = self._decode(ids)
        history.append_segment(text, ids, system=True)
        return history

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _room(self, history: TextHistory) -> int | None:
        """Tokens left in an episode."""
        return None if self.max_length is None else max(self.max_length - len(history.tokens), 0)

    def tasks_end_check(self, histories: list[TextHistory], model_turn: bool = True) -> list[TextHistory]:
        """Complete the histories that have ended, after a turn of the model or of the tools."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn=model_turn)
            if ended:
                history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether a history has reached the maximum length, and whether it ends."""
        if history.completed:
            return False, False
        text = history.last_text_segment
        if model_turn and self.submit_token in text:
            return False, True
        if self._room(history) == 0:
            return True, True
        calls = self.request_token in text and self.call_token in text
        return False, model_turn and not calls

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: Any) -> list[TextHistory]:
        """Set the reward of every history.

        Raises: ValueError for a wrong number of rewards, and for rewards that are not finite.
        """
        if self.reward_fn is None:
            return histories
        rewards = self.reward_fn([history.last_model_text for history in histories], **reward_kwargs)
        if isinstance(rewards, (int, float)) or getattr(rewards, "ndim", 1) == 0:
            rewards = [rewards] * len(histories)
        found = read_scores(rewards, count=len(histories), name="reward_fn")
        for history, reward in zip(histories, found, strict=True):
            history.reward = torch.tensor(reward)
        return histories


def _context_length(model: Any) -> int | None:
    """The context length of the decoder inside a model.

    Raises: TypeError for an encoder-decoder.
    """
    inner = without_wrappers(model)
    check_decoder_only(causal_core(inner))
    return context_length_of(inner)


def _shorter(first: int | None, second: int | None) -> int | None:
    """The smaller of two limits; None means no limit."""
    return min([limit for limit in (first, second) if limit is not None], default=None)
