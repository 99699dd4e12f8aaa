"""Episodes of a model that calls tools in its text, for `PPOTrainer.step`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.data.rendering import Fields
from trl.generation.engine import Engine, Sampling
from trl.generation.main_process import any_process, first_rng_stream
from trl.generation.transformers.engine import TransformersEngine, context_length_of, without_wrappers
from trl.models.distributed import is_sharded
from trl.models.parts import causal_core, check_decoder_only
from trl.reporting.tables import open_console
from trl.rewards.functions import name_of
from trl.rewards.result import read_scores, refusing_exit

REQUEST, CALL, RESPONSE, SUBMIT = "<request>", "<call>", "<response>", "<submit>"
TextTool = Callable[[str], object]
Tools = Mapping[str, TextTool] | Sequence[TextTool] | None
_NAME = re.compile(r"\s*<([^<>]+)>")
STYLES = {
    "Prompt": "black on grey85",
    "System": "black on cyan3",
    "Model": "black on deep_sky_blue1",
    "Reward": "black on plum1",
}


def named_tools(tools: Tools) -> dict[str, TextTool]:
    """Tools by name, by default of the function or class. Raises: TypeError or ValueError for unusable ones."""
    pairs = tools.items() if isinstance(tools, Mapping) else [(name_of(tool), tool) for tool in tools or ()]
    by_name: dict[str, TextTool] = {}
    for name, tool in pairs:
        if not callable(tool):
            raise TypeError(f"tools[{name!r}] must be callable with a query, got {type(tool).__name__}.")
        if not _NAME.fullmatch(f"<{name}>") or name in by_name:
            raise ValueError(f"tools must have different names without < and >, got {name!r}. Use a dict.")
        by_name[name] = tool
    return by_name


def parse_call(text: str) -> tuple[str, str] | None:
    """Tool and query of the last request in a text; None without a request or a tool's name.

    >>> parse_call("Let me see. <request><Calculator>13-3<call>")
    ('Calculator', '13-3')
    """
    before, called, _ = text.rpartition(CALL)
    _, requested, request = before.rpartition(REQUEST)
    name = _NAME.match(request)
    return (name[1], request[name.end() :]) if called and requested and name else None


def answer(tools: Mapping[str, TextTool], text: str) -> str:
    """The answer of the tool that a text calls, or the text of an error."""
    call = parse_call(text)
    if call is None or call[0] not in tools:
        wrong = "The request names no tool." if call is None else f"Unknown tool {call[0]}."
        return f"{wrong} Tools: {', '.join(tools) or 'none'}."
    try:
        return str(tools[call[0]](call[1]))
    except Exception as error:  # the model reads it
        return f"{type(error).__name__}: {error}"


class TextHistory:
    """Segments of the model or the system (prompt, tools), one after another.

    `text` and `tokens` `(T,)` are those of all segments, `text_spans` and `token_spans` their (begin, end),
    `system_spans` who wrote them. `token_masks` `(T,)` is 1 for the model's tokens.
    """

    def __init__(self, text: str, tokens: Tensor | Sequence[int], system: bool = True) -> None:
        self.text = ""
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.token_masks = torch.empty(0, dtype=torch.int64)
        self.system_spans: list[bool] = []
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.completed = self.truncated = False
        self.reward: Any = None
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor | Sequence[int], system: bool = True) -> None:
        """Add a segment; a `system` one is not trained on. Raises: ValueError without tokens or after the end."""
        tokens = torch.as_tensor(tokens, dtype=torch.int64).flatten().cpu()
        if len(tokens) == 0:
            raise ValueError(f"a segment needs at least one token, got none with the text {text!r}.")
        if self.completed:
            raise ValueError("the history is completed, so nothing can be added.")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        self.token_masks = torch.cat([self.token_masks, torch.full_like(tokens, 0 if system else 1)])

    def complete(self, truncated: bool = False) -> None:
        """Mark the history as ended, by a limit where `truncated`."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the newest segment, whoever wrote it."""
        return self.text[slice(*self.text_spans[-1])]

    @property
    def last_model_text(self) -> str:
        """The text of the newest segment that the model wrote; empty where it wrote none."""
        spans = [span for span, system in zip(self.text_spans, self.system_spans, strict=True) if not system]
        return self.text[slice(*spans[-1])] if spans else ""

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the first segment, tokens behind it, and their mask: 1 on the model's tokens."""
        border = self.token_spans[0][1]
        return self.tokens[:border], self.tokens[border:], self.token_masks[border:]

    def show_text(self, show_legend: bool = False) -> None:
        """Print the text, coloured by who wrote it, and the reward."""
        self._show([self.text[slice(*span)] for span in self.text_spans], show_legend)

    def show_tokens(self, tokenizer: PreTrainedTokenizerBase, show_legend: bool = False) -> None:
        """Print the tokens, coloured by who wrote them, and the reward."""
        parts = [self.tokens[slice(*span)].tolist() for span in self.token_spans]
        self._show([" ".join([*tokenizer.convert_ids_to_tokens(part), ""]) for part in parts], show_legend)

    def show_colour_legend(self) -> None:
        legend = Text("|").join(Text(name, style) for name, style in STYLES.items())
        open_console(highlight=False).print(legend)

    def _show(self, segments: list[str], show_legend: bool) -> None:
        shown = Text()
        for index, (system, segment) in enumerate(zip(self.system_spans, segments, strict=True)):
            shown.append(segment, STYLES["Model" if not system else "System" if index else "Prompt"])
        if self.reward is not None:
            shown.append(f"\n\nReward: {float(self.reward):.4g}", STYLES["Reward"])
        open_console(highlight=False).print(shown)
        if show_legend:
            self.show_colour_legend()


class Episodes(NamedTuple):
    """The result of `TextEnvironment.run`: lists with one entry per query, as `PPOTrainer.step` takes them."""

    queries: list[Tensor]
    responses: list[Tensor]
    masks: list[Tensor]
    rewards: list[Any]
    histories: list[TextHistory]


class TextEnvironment:
    """Lets a model answer queries in turns: it calls tools in its text, whose answers follow the call.

    The model's turn ends with `<request><Tool>query<call>`, with `<submit>`, with an end token or at its length. After
    a call `answer<response>` is appended and the model continues. `tools` are callables of a text, by name or in a
    list. `reward_fn(texts, **columns)` scores the last text that the model wrote in each episode: a number for each, or
    one for all. `prompt` precedes every query. `max_turns`, `max_length` (tokens of an episode) and `max_tool_reponse`
    (characters of an answer; TRL's spelling, the attribute is `max_tool_response`) are limits. `generation_kwargs` are
    settings of `Sampling`. `engine` (default: a `TransformersEngine` around `model`) generates.

    Example:
        >>> env = TextEnvironment(model, tokenizer, {"Calculator": calculate}, reward_fn)  # doctest: +SKIP
        >>> queries, responses, masks, rewards, histories = env.run(["What is 13-3?"])  # doctest: +SKIP
    """

    request_token, call_token, response_token, submit_token = REQUEST, CALL, RESPONSE, SUBMIT

    def __init__(
        self, model: Any = None, tokenizer: Any = None, tools: Tools = None,
        reward_fn: Callable[..., Any] | None = None, prompt: str | None = None, max_turns: int = 4,
        max_tool_reponse: int = 100, max_length: int | None = None, generation_kwargs: Fields | None = None, *,
        engine: Engine | None = None,
    ) -> None:  # fmt: skip
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
        if model is not None:
            inner = without_wrappers(model)
            check_decoder_only(causal_core(inner))
            max_length = _shorter(max_length, context_length_of(inner))
        self.max_length, self.generation_kwargs = max_length, dict(generation_kwargs or {})
        sampling = Sampling().updated(self.generation_kwargs)
        stops = (*sampling.stop_strings, self.call_token, self.submit_token)
        self.sampling = replace(
            sampling,
            stop_strings=tuple(dict.fromkeys(stops)),
            max_new_tokens=sampling.new_tokens,
            max_length=_shorter(sampling.max_length, max_length),
        )
        self._is_sharded = model is not None and is_sharded(model)

    def run(self, queries: Sequence[str], **rewards_kwargs: object) -> Episodes:
        """Run one episode for each query; `rewards_kwargs` (one value per query) go to the reward function.

        Masks of responses are 1 for the model's tokens; rewards are 0-dim tensors, None without a reward function.
        """
        histories = self._begin(queries)
        for _ in range(self.max_turns):
            left = not all(history.completed for history in histories)
            if not (any_process(left) if self._is_sharded else left):  # of all that generate together
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = [self.step(history) for history in histories]
            histories = self.tasks_end_check(histories, model_turn=False)
        for history in histories:
            if not history.completed:
                history.complete(truncated=True)
        self.compute_reward(histories, **rewards_kwargs)
        parts = [history.split_query_response_tokens() for history in histories]
        queries, responses, masks = map(list, zip(*parts, strict=True))
        return Episodes(queries, responses, masks, [history.reward for history in histories], histories)

    def _begin(self, queries: Sequence[str]) -> list[TextHistory]:
        if isinstance(queries, str) or not len(queries):
            raise ValueError(f"queries must be a list of one text or more, got {queries!r}.")
        histories = []
        for index, query in enumerate(queries):
            text = self.prompt + query
            history = TextHistory(text, self.tokenizer(text)["input_ids"], system=True)
            if self._room(history) == 0:
                size = f"{len(history.tokens)} tokens with the prompt"
                raise ValueError(f"queries[{index}] has {size}, more than max_length={self.max_length}.")
            histories.append(history)
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Generate the model's next turn in every history that is not completed."""
        active = [index for index, history in enumerate(histories) if not history.completed]
        prompts = [histories[index].tokens.tolist() for index in active]
        streams = [first_rng_stream() + one for one in active]
        marks = (self.request_token, self.call_token, self.submit_token)
        completions = self.engine.generate(prompts, self.sampling, streams=streams)
        for index, ids in zip(active, (completion.ids for completion in completions), strict=True):
            is_own = self.tokenizer.convert_ids_to_tokens(ids[-1]) in marks
            ends = ids[-1] in self.tokenizer.all_special_ids and not is_own
            text = self._decode(ids[:-1] if ends else ids)  # an end token is no part of the text
            histories[index].append_segment(text, ids, system=False)
        return histories

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
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self._room(history)
        if room is not None and len(ids) > room:
            ids = ids[:room]
            text = self._decode(ids)
        history.append_segment(text, ids, system=True)
        return history

    def _room(self, history: TextHistory) -> int | None:
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

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: object) -> list[TextHistory]:
        """Set the reward of every history. Raises: ValueError for a wrong number of rewards and non-finite ones."""
        if self.reward_fn is None:
            return histories
        with refusing_exit():
            rewards = self.reward_fn([history.last_model_text for history in histories], **reward_kwargs)
        if isinstance(rewards, (int, float)) or getattr(rewards, "ndim", 1) == 0:
            rewards = [rewards] * len(histories)
        scores = read_scores(rewards, count=len(histories), name="reward_fn")
        for history, reward in zip(histories, scores, strict=True):
            history.reward = torch.tensor(reward)
        return histories


def _shorter(first: int | None, second: int | None) -> int | None:
    return min([limit for limit in (first, second) if limit is not None], default=None)
