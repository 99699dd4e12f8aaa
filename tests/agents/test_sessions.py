"""A zoo of agents over HTTP: what is trained are the tokens that were sampled, whatever an agent does with its history."""

import asyncio
import copy
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch
from benchmarks.agent_fuzz import fuzz
from tokenizers import decoders
from transformers.utils import get_json_schema

from tests.agents.tool_words import ADD, TOOLS, call_tokenizer
from tests.data.test_byte_alignment import texts, tokenizer_of
from tests.data.test_prefix_tree import compared
from tests.tiny_tokenizers import tiny_tokenizer
from tests.trainer.grpo_tool_runs import caller
from trl.agents import chats as sessions_chats
from trl.agents import openai_app, sessions
from trl.agents.chains import in_order
from trl.agents.chats import Chats
from trl.agents.completer import AgentCompleter
from trl.agents.journal import Journal, Played
from trl.experimental.agents import Budget, Endpoint, chains_of
from trl.generation.engine import Generated, Sampling
from trl.generation.serving import app
from trl.generation.serving.openai_api import CompletionBody
from trl.generation.transformers.engine import TransformersEngine

SCHEMAS = [get_json_schema(tool) for tool in TOOLS]
SAMPLING = Sampling(max_new_tokens=12, seed=0)
USER = {"role": "user", "content": "What is one ?"}
WITHOUT_EFFECT: dict = {
    "parallel_tool_calls": False, "service_tier": "auto", "reasoning_effort": "low", "store": True, "metadata": {}, "user": "me",
    "n": None, "stream": None, "prediction": None,
}  # fmt: skip
ROUNDS = 3
CLOSE = "</tool_call>"


@pytest.fixture(scope="module")
def policy():
    return caller()


@contextmanager
def serving(policy, **options):
    sampling = options.pop("sampling", SAMPLING)
    engine = options.pop("engine", None) or TransformersEngine(policy, tokenizer=call_tokenizer())
    with Endpoint(engine, call_tokenizer(), sampling=sampling, **options) as endpoint:
        yield endpoint
    assert not any(thread.is_alive() for thread in endpoint._threads)


@pytest.fixture(scope="module")
def endpoint(policy):
    with serving(policy) as running:
        yield running


def client_of(session):
    return openai.OpenAI(**connection(session.base_url, session.api_key, openai.DefaultHttpxClient))


def connection(base_url, api_key, http_client=openai.DefaultAsyncHttpxClient):
    """What a client is made with: without certificates, which take longer to read than an agent takes."""
    return {
        "base_url": base_url, "api_key": api_key, "max_retries": 0, "timeout": 60, "http_client": http_client(verify=False),
    }  # fmt: skip


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options).choices[0].message


def as_dict(message):
    return message.model_dump(exclude_none=True)


def answers(message):
    """Replies to the calls of a message, or the user's next question."""
    calls = message.tool_calls or []
    replies = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    return replies or [{"role": "user", "content": "yes no ?"}]


# ---- The zoo: each is an agent, and the number of chains that its session has


def plain(client):
    messages = [USER]
    for _ in range(ROUNDS):
        messages += [as_dict(ask(client, messages)), {"role": "user", "content": "hi"}]


def react(client):
    prompt = "What is one ? "
    for _ in range(ROUNDS):
        prompt += client.completions.create(model="policy", prompt=prompt, max_tokens=6).choices[0].text
        prompt += " Error: three "
    return prompt


def tool_user(client):
    messages = [USER]
    for _ in range(ROUNDS):
        reply = ask(client, messages, tools=SCHEMAS)
        messages += [as_dict(reply), *answers(reply)]


def rewriter(client):
    """Writes the arguments of calls in another order and with other spaces, and forbids some."""
    messages = [USER]
    for number in range(ROUNDS):
        reply = ask(client, messages, tools=SCHEMAS, tool_choice=("auto", "none")[number % 2])
        again = as_dict(reply)
        again["content"] = f" {again.get('content') or ''}\n"
        for call in again.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=1)
        messages += [again, *answers(reply)]


def streamer(client):
    messages = [USER]
    for _ in range(ROUNDS):
        text, reason = "", None
        for chunk in client.chat.completions.create(model="policy", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
        assert reason in ("stop", "length")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "hi"}]


def closer(client):
    """Puts back the stop string, as smolagents does."""
    messages, given = [USER], {"stop": CLOSE, "logprobs": True}
    for _ in range(ROUNDS):
        choice = client.chat.completions.create(model="policy", messages=messages, **given).choices[0]
        is_cut = choice.logprobs.content[-1].token.endswith(CLOSE)
        text = choice.message.content + CLOSE * is_cut
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "hi"}]
    assert CLOSE in str(messages)


def retrier(client):
    messages = [USER]
    for number in range(ROUNDS):
        first = ask(client, messages)
        again = ask(client, messages, extra_headers={"x-stainless-retry-count": "1"})
        assert again == first, number
        messages += [as_dict(first), {"role": "user", "content": "hi"}]


def sub_agent(client):
    plain(client)
    messages = [{"role": "system", "content": "two three"}, USER]
    messages += [as_dict(ask(client, messages)), {"role": "user", "content": "no"}]
    ask(client, messages)


def compactor(client):
    plain(client)
    ask(client, [{"role": "system", "content": "is one two"}, {"role": "user", "content": "hi"}])


def stripper(client):
    """Takes words out of what the policy said."""
    messages = [USER]
    for _ in range(ROUNDS):
        reply = ask(client, messages)
        messages += [
            {"role": "assistant", "content": f"{reply.content} no"},
            {"role": "user", "content": "hi"},
        ]


def brancher(client):
    messages = [USER, as_dict(ask(client, [USER])), {"role": "user", "content": "hi"}]
    client.chat.completions.create(model="policy", messages=messages, n=3)


ZOO = {
    plain: 1, react: None, tool_user: 1, rewriter: 1, streamer: 1, closer: 1, retrier: 1, sub_agent: 2, compactor: 2, stripper: ROUNDS,
    brancher: 3,
}  # fmt: skip


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def served(request):
    policy = caller(dtype=request.param)
    with serving(policy) as running:
        yield running, policy, {torch.float64: 1e-9, torch.float32: 1e-5}[request.param]


@pytest.mark.parametrize("agent", ZOO, ids=lambda agent: agent.__name__)
def test_the_trained_tokens_are_the_sampled_ones(agent, served):
    endpoint, policy, gap = served
    session = endpoint.session()
    agent(client_of(session))
    chains = chains_of(session.turns)
    assert len(chains) == ZOO[agent] or ZOO[agent] is None
    assert sum(sum(chain.sampled) for chain in chains) == sum(len(turn.generated.ids) for turn in session.turns)
    for chain in chains:
        ids = torch.tensor([chain.prompt + chain.ids])
        with torch.no_grad():
            logps = policy(ids).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[len(chain.prompt) - 1 :, 0]
        sampled = torch.tensor(chain.sampled)
        given = torch.tensor(chain.logps, dtype=getattr(torch, chain.dtype))
        torch.testing.assert_close(own[sampled], given[sampled], rtol=0, atol=gap)
        assert not given[~sampled].any()
    endpoint.close_session(session)


def test_the_prompt_of_a_later_turn_is_what_the_template_shows(endpoint):
    session, words = endpoint.session(), call_tokenizer()
    client = client_of(session)
    reply = ask(client, [USER], tools=SCHEMAS)
    messages = [as_dict(reply), *answers(reply)]
    ask(client, [USER, *messages], tools=SCHEMAS)
    shown = words.apply_chat_template([USER, *messages], tools=SCHEMAS, add_generation_prompt=True)["input_ids"]
    last = session.turns[-1]
    if session.turns[0].generated.finish_reason == "stop":
        assert last.context[: len(session.turns[0].tokens)] == session.turns[0].tokens
    assert last.shown == shown[-len(last.shown) :]


def test_answers_of_tools_have_the_names_of_their_calls(policy):
    words = call_tokenizer()
    words.chat_template = words.chat_template.replace("<{{ m.role }}>", "<{{ m.role }}> {{ m.name }}")
    with Endpoint(TransformersEngine(policy, tokenizer=words), words, sampling=SAMPLING) as running:
        client = client_of(session := running.session())
        choices = client.chat.completions.create(model="policy", messages=[USER], tools=SCHEMAS, n=8).choices
        reply = max((choice.message for choice in choices), key=lambda message: len(message.tool_calls or []))
        ask(client, [USER, as_dict(reply), *answers(reply)], tools=SCHEMAS)
    names = [call.function.name for call in reply.tool_calls]
    assert len(names) > 1
    shown = "".join(f"<tool> {name} 3 </s> " for name in names) + "<assistant>"
    assert session.turns[-1].shown[-len(words(shown)["input_ids"]) :] == words(shown)["input_ids"]


def test_tokens_do_not_depend_on_the_order_of_sessions(policy):
    def tokens(together):
        with serving(policy) as running:
            sessions = [running.session(stream=stream) for stream in range(4)]
            if together:
                threads = [threading.Thread(target=tool_user, args=(client_of(each),)) for each in sessions]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for each in reversed(sessions):
                    tool_user(client_of(each))
            return [[turn.tokens for turn in each.turns] for each in sessions]

    alone = tokens(False)
    assert tokens(True) == alone
    assert alone[0] != alone[1]


def test_chains_do_not_depend_on_the_order_of_requests(endpoint):
    async def agent(row, base_url, api_key):
        return 0.0

    completer = AgentCompleter(
        agent,
        endpoint.chats.processing_class,
        Budget(),
        concurrency=1,
        deadline=None,
        journal=Journal(None, rank=0),
    )
    found = []
    for order in (1, -1):
        session = endpoint.session(stream=0)
        for text in ["hi", "two three ?", "hi"][::order]:
            first = [{"role": "user", "content": text}]
            messages = [*first, as_dict(ask(client_of(session), first)), USER]
            for more in ([], [USER])[::order]:
                ask(client_of(session), messages + more)
        chains = chains_of(session.turns)
        found.append([(chain.prompt, chain.ids) for chain in chains])
        stopped = completer.completed([Played(chains, turns=9)], keeps=False).experience.per_row
        assert stopped["stopped"].tolist() == [all(chain.ended for chain in chains)]
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize("later", [0, 1])
def test_turns_side_by_side_are_ordered_by_their_tokens(later):
    """Others by time: after a compaction prompts are shorter."""

    def turn(started, ended, *context):
        return SimpleNamespace(started=started, ended=ended, context=context, tokens=[*context, 9])

    first, last = turn(1.0, 2.0, 1, 2, 3, 4), turn(6.0, 7.0, 1)
    pair = [turn(3.0 + later, 4.0 + later, 1, 5), turn(3.5, 4.5, 1, 2)]
    assert in_order([first, *pair[:: 1 - 2 * later], last]) == [first, pair[1], pair[0], last]


def test_answers_have_usage_log_probs_and_calls(endpoint):
    client = client_of(session := endpoint.session())
    answer = client.chat.completions.create(model="policy", messages=[USER], tools=SCHEMAS, logprobs=True, n=8)
    turns = session.turns
    assert answer.usage.completion_tokens == sum(len(turn.generated.ids) for turn in turns)
    assert answer.usage.prompt_tokens == len(turns[0].context)
    for choice, turn in zip(answer.choices, turns, strict=True):
        given = [token.logprob for token in choice.logprobs.content]
        assert given == pytest.approx(turn.generated.logps.tolist())
        assert (choice.finish_reason == "tool_calls") == (
            bool(choice.message.tool_calls) and turn.generated.finish_reason == "stop"
        )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert calls and {call.function.name for call in calls} <= {"add", "echo", "fail", "fly"}
    assert len({call.id for call in calls}) == len(calls)
    assert [model.id for model in client.models.list().data] == ["policy"]
    assert client.models.retrieve("policy").id == "policy"
    answer = client.completions.create(model="policy", prompt=["hi", "one two"], n=2, logprobs=0)
    assert answer.usage.prompt_tokens == 3
    for choice, turn in zip(answer.choices, session.turns[8:], strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx(turn.generated.logps.tolist())
        assert choice.logprobs.top_logprobs is None and turn.started <= turn.ended <= time.monotonic()


def test_stop_strings_are_left_out(endpoint):
    client = client_of(endpoint.session())
    whole = client.completions.create(model="policy", prompt="hi", max_tokens=12, n=6)
    text = max((choice.text for choice in whole.choices), key=len)
    stop = text.split()[1]
    for stream in (False, True):
        session = endpoint.session(stream=0)
        found = client_of(session).completions.create(
            model="policy", prompt="hi", max_tokens=12, n=6, stop=[stop], stream=stream
        )
        if stream:
            texts = [""] * 6
            for chunk in found:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [choice.text for choice in found.choices]
        assert all(stop not in each for each in texts)
    assert any(turn.generated.finish_reason == "stop" for turn in session.turns)


def deep(depth):
    """A message with arguments that are nested."""
    function = {"name": "add", "arguments": "[" * depth + "]" * depth}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("given", "status", "named"),
    [
        ({"stop": ["no", ""]}, 400, "stop"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        (
            {"tool_choice": "required"},
            400,
            "tool_choice: 'required' needs constrained decoding, which is not available",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, 400, "constrained decoding"),
        ({"response_format": {"type": "json_object"}}, 400, "constrained decoding"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            400,
            "response_format: {'type': 'json_schema'",
        ),
        ({"extra_body": {"colour": 1}}, 400, "colour"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 400, "names"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ({"messages": [deep(900)]}, 400, "nested too deeply"),
        ({"messages": [deep(5000)]}, 400, "nested too deeply"),
        ({"messages": [{"role": "user", "content": "hi " * 2000}]}, 400, "maximum context length"),
    ],
)
def test_what_is_not_supported_is_named(given, status, named, endpoint):
    client = client_of(endpoint.session())
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(**{"model": "policy", "messages": [USER], **given})
    assert raised.value.status_code == status and named in str(raised.value)
    if named == "maximum context length":
        assert raised.value.code == "context_length_exceeded"


def test_any_model_name_is_accepted(endpoint):
    client = client_of(session := endpoint.session())
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=[USER])
    assert answer.model == "gpt-4o-mini" and len(session.turns) == 1
    assert client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"
    assert [model.id for model in client.models.list().data] == ["policy"]


HALF = "\ud83d"
FUNCTION = {"name": "add", "arguments": "{}"}


def called(**given):
    call = {"id": "1", "type": "function", "function": {**FUNCTION, **given}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    "body",
    [
        called(arguments='{"a": "\\ud83d"}'),
        called(arguments='{"\\ud83d": 1}'),
        called(arguments={"a": [HALF]}),
        called(name=HALF),
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [{**USER, "name": HALF}]},
        {"messages": [{**USER, HALF: 1}]},
        {"stop": [HALF]},
        {"tools": [{"type": "function", "function": {**FUNCTION, "description": HALF}}]},
        {"tool_choice": HALF},
        {"model": HALF},
        {HALF: 1},
        {"prompt": HALF},
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_half_of_a_surrogate_pair_is_refused(body, endpoint):
    """Wherever it is, also in the JSON within arguments: no tokenizer reads it."""
    session = endpoint.session()
    path = "/completions" if "prompt" in body else "/chat/completions"
    given = json.dumps(body if "prompt" in body else {"messages": [USER], **body})
    answer = httpx.post(endpoint.base_url + path, content=given, headers={"Authorization": f"Bearer {session.api_key}"})
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text
    assert not session.turns and not session._running


@pytest.mark.parametrize("kind", ["messages", "later", "tools", "prompt"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(kind, policy, monkeypatch):
    with serving(policy) as running:
        client, long = client_of(session := running.session()), "one two " * 1_900_000
        messages = [USER]
        if kind == "later":
            messages = [USER, as_dict(ask(client, messages)), {"role": "user", "content": long}]
        tools = [{"type": "function", "function": {**FUNCTION, "name": long}}] if kind == "tools" else None
        shown = {"messages": [{"role": "user", "content": long}]} if kind == "messages" else {}
        monkeypatch.setattr(running.chats, "tokenizer", NoTokenizer(running.chats.tokenizer))
        monkeypatch.setattr(sessions_chats, "encode", None)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as raised:
            if kind == "prompt":
                client.completions.create(model="policy", prompt=long)
            else:
                client.chat.completions.create(
                    **{"model": "policy", "messages": messages, "tools": tools or openai.omit, **shown}
                )
        assert raised.value.code == "context_length_exceeded" and len(session.turns) == (kind == "later")


def test_the_longest_token_is_looked_for_once(policy, monkeypatch):
    """A vocabulary of 150,000 tokens takes 0.1 s, and each request with more characters than tokens asks for it."""
    with serving(policy) as running:
        asked, whole = [], running.chats.tokenizer.get_vocab
        monkeypatch.setattr(running.chats.tokenizer, "get_vocab", lambda: asked.append(1) or whole())
        for _ in range(3):
            running.chats.ids("one two " * 40, begins=True)
        assert len(asked) == 1


class NoTokenizer:
    """A tokenizer that must not be called."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __len__(self):
        return len(self.tokenizer)


@pytest.mark.parametrize("kind", ["bpe300", "bytes", "pieces", "characters"])
def test_bytes_of_tokens_join_to_the_text(kind):
    """Of random tokens, many of which are parts of characters; special tokens have none."""
    words, draw = tokenizer_of(kind), random.Random(0)
    chats = Chats(words, frozenset(), 100, {})
    for text in [text for text in texts() if "▁" not in text]:
        ids = words(text, add_special_tokens=False)["input_ids"]
        joined = b"".join(map(bytes, chats.token_bytes(ids)))
        assert joined.decode() == chats.text(ids), text
    for _ in range(40):
        ids = draw.choices(range(len(words)), k=12)
        joined = b"".join(map(bytes, chats.token_bytes(ids)))
        whole = words.decode(ids, skip_special_tokens=True)
        assert "\ufffd" in whole or joined.decode() == whole.removeprefix("\ufffd")


def test_the_first_space_that_a_text_loses_is_no_byte():
    """SentencePiece's decoders strip it (Llama 2)."""
    words = copy.deepcopy(tokenizer_of("pieces"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.backend_tokenizer.decoder = decoders.Sequence(steps)
    chats = Chats(words, frozenset(), 100, {})
    ids = words(" is the é", add_special_tokens=False)["input_ids"]
    assert chats.text(ids) == "is the é"
    assert b"".join(map(bytes, chats.token_bytes(ids))).decode() == "is the é"


def test_log_probs_have_the_bytes_of_their_tokens():
    """Over HTTP, with characters of several tokens; words of which no bytes are known have none."""
    words = tiny_tokenizer("chatml")
    written = words("naïve 🙂 中文", add_special_tokens=False)["input_ids"] + [words.eos_token_id]

    class Fixed(Endless):
        ends = True

        def step(self):
            ended, self.running = list(self.running), {}
            return dict.fromkeys(ended, Generated(written, torch.zeros(len(written)), None, "stop"))

        def __init__(self):
            super().__init__()
            self.ends = True

    def contents(tokenizer):
        with Endpoint(Fixed(), tokenizer, sampling=SAMPLING) as running:
            client = client_of(running.session())
            answer = client.chat.completions.create(model="policy", messages=[USER], logprobs=True)
        return answer.choices[0]

    choice = contents(words)
    found = [token.bytes for token in choice.logprobs.content]
    assert len(found) == len(written) > len("naïve 🙂 中文") and found[-1] == []
    assert b"".join(map(bytes, found)).decode() == choice.message.content == "naïve 🙂 中文"
    written = [9, 10, 2]
    assert [token.bytes for token in contents(call_tokenizer()).logprobs.content] == [None] * 3


FOREIGN = {"temperature": 0.3, "top_p": 0.5, "extra_body": {"top_k": 3}}


def test_settings_of_agents_are_ignored_with_one_warning(policy, caplog):
    """The tokens are those of the session's own settings, in whichever session they are sent."""
    texts = []
    for given in ({}, {**FOREIGN, "frequency_penalty": 0.5, "seed": 3}):
        with serving(policy) as running:
            sessions = [running.session(stream=stream) for stream in range(3)]
            texts.append([ask(client_of(each), [USER], **given).content for each in sessions])
    assert texts[0] == texts[1]
    records = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(records) == 1
    assert "frequency_penalty=0.5, temperature=0.3, top_k=3, top_p=0.5" in records[0]


def test_settings_of_agents_may_be_taken():
    """Log-probs are those of the distribution that was sampled from; a seed has no effect."""
    policy = caller()
    with serving(policy, agent_sampling="agent") as running:
        session = running.session(stream=0)
        for _ in range(4):
            client_of(session).chat.completions.create(
                model="policy", messages=[USER], n=4, temperature=0.5, top_p=0.9, seed=1
            )
        with pytest.raises(openai.BadRequestError, match="presence_penalty=1 differs"):
            ask(client_of(session), [USER], presence_penalty=1)
    assert len({tuple(turn.tokens) for turn in session.turns}) > 1
    for turn in session.turns:
        ids = torch.tensor([turn.tokens])
        with torch.no_grad():
            logps = (policy(ids).logits[0, :-1] / 0.5).log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[len(turn.context) - 1 :, 0]
        torch.testing.assert_close(turn.generated.logps + turn.generated.kept, own, rtol=0, atol=1e-9)
        assert (turn.generated.kept < 0).any()


@pytest.mark.parametrize("given", [{"temperature": 0.3}, {"top_p": 0.5}, {"frequency_penalty": 1}])
def test_settings_of_agents_may_be_refused(given, policy):
    with serving(policy, agent_sampling="strict") as running:
        client, (name, value) = client_of(running.session()), *given.items()
        with pytest.raises(openai.BadRequestError, match=f"{name}={value:g} differs from this session's"):
            ask(client, [USER], **given)
        ask(client, [USER], temperature=1.0, top_p=1.0, frequency_penalty=0)


def test_a_request_costs_the_same_after_many_turns(policy, monkeypatch):
    """Texts of one session, each with another beginning, and every tenth the continuation of an earlier answer."""
    count, costs, words = compared(monkeypatch), [], call_tokenizer()
    with serving(policy, http=False, threaded=False) as running:
        session = running.session()
        monkeypatch.setattr(running.broker, "submit", lambda request, future: None)

        async def many():
            for number in range(1500):
                names = [words.convert_ids_to_tokens(8 + number // base % 14) for base in (1, 14, 196)]
                prompt = " ".join(names)
                if number % 10 == 9:
                    prompt = session.turns[-5].whole_text + f" {prompt}"
                before = count[0]
                body = CompletionBody(prompt=prompt, max_tokens=2)
                (turn,) = await session.complete(body, is_retry=False)
                costs.append(count[0] - before)
                assert (turn.parent is session.turns[-5]) if number % 10 == 9 else turn.parent is None
                session.finish(turn, Generated([9, 2], torch.zeros(2), None, "stop"))

        asyncio.run(many())
    assert len(session.turns) == 1500
    assert sum(costs[-300:]) <= 1.1 * sum(costs[300:600])


def test_free_sessions_take_other_settings(policy):
    with serving(policy, agent_sampling="agent") as running:
        client = client_of(running.session())
        first, again = (ask(client, [USER], temperature=0, seed=seed, **WITHOUT_EFFECT) for seed in (1, 2))
        assert first.content == again.content


@pytest.mark.parametrize(
    ("budget", "name"), [({"turns": 2}, "turns"), ({"tokens": 5}, "tokens"), ({"seconds": 0.0}, "seconds")]
)
def test_a_spent_budget_ends_the_session(budget, name, endpoint):
    session = endpoint.session(budget=Budget(**budget))
    with pytest.raises(openai.BadRequestError, match=name):
        for _ in range(8):
            plain(client_of(session))
    assert session.cut == name
    sampled = sum(len(turn.generated.ids) for turn in session.turns)
    assert sampled <= budget.get("tokens", sampled) and len(session.turns) <= budget.get("turns", 99)


def test_a_budget_holds_for_answers_side_by_side(endpoint):
    session = endpoint.session(budget=Budget(tokens=20, turns=3))
    client = client_of(session)
    with pytest.raises(openai.BadRequestError, match="turns"):
        client.completions.create(model="policy", prompt="hi", n=5, max_tokens=4)
    assert session.turns == []
    client.completions.create(model="policy", prompt="hi", n=2, max_tokens=10)
    with pytest.raises(openai.BadRequestError, match=r"turns|tokens"):
        client.completions.create(model="policy", prompt="hi", n=2, max_tokens=10)
    assert sum(len(turn.generated.ids) for turn in session.turns) <= 20


@pytest.mark.parametrize(("tokens", "refused"), [(60, 0), (5, 1)])
def test_requests_side_by_side_wait_for_the_budget(tokens, refused, policy):
    texts = ["hi", "yes no", "two three ?"]

    async def together(session):
        client = openai.AsyncOpenAI(**connection(session.base_url, session.api_key))
        calls = [
            client.completions.create(model="policy", prompt=text, max_tokens=30, stream=text == "yes no")
            for text in texts
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        return sum([isinstance(one, openai.BadRequestError) or await failed(one) for one in found])

    async def failed(answer):
        try:
            return isinstance(answer, openai.AsyncStream) and not [chunk async for chunk in answer]
        except openai.APIError as error:
            assert error.code == "budget_exceeded"
            return True

    with serving(policy, sampling=Sampling(max_new_tokens=30, seed=0)) as running:
        session = running.session(budget=Budget(tokens=tokens), stream=0)
        assert (asyncio.run(together(session)) > 0) == (refused > 0)
        assert (session.cut == "tokens") == (refused > 0)
        assert sum(len(turn.generated.ids) for turn in session.turns) <= tokens
        assert not session._running
        if not refused:
            alone = running.session(budget=Budget(tokens=tokens), stream=0)
            for text in texts:
                client_of(alone).completions.create(model="policy", prompt=text, max_tokens=30)
            assert sorted(turn.tokens for turn in session.turns) == sorted(turn.tokens for turn in alone.turns)


def test_a_text_is_continued_only_if_it_is_what_the_policy_wrote(endpoint):
    session, words = endpoint.session(), call_tokenizer()
    client = client_of(session)
    sent = ["What is one ? "]
    for _ in range(6):
        sent.append(sent[-1] + client.completions.create(model="policy", prompt=sent[-1], max_tokens=3).choices[0].text)
        sent[-1] += " Error: three "
    for turn, before in zip(session.turns[1:], session.turns, strict=False):
        is_whole = words.decode(before.generated.ids) == before.text
        assert (turn.parent is before) == is_whole
    for turn, prompt in zip(session.turns, sent, strict=False):
        assert words.decode(turn.context).split() == prompt.split()


def test_a_forgetful_session_draws_anew(policy):
    with serving(policy, agent_sampling="agent") as running:
        client = client_of(running.session(keeps=False))
        texts = {
            client.completions.create(model="policy", prompt="hi", max_tokens=12).choices[0].text for _ in range(6)
        }
        assert len(texts) > 1
        given = {"model": "policy", "prompt": "hi", "max_tokens": 12, "seed": 1}
        with ThreadPoolExecutor() as pool:
            seeded = [pool.submit(client.completions.create, **given) for _ in range(4)]
        assert len({each.result().choices[0].text for each in seeded}) == 1


def test_without_settings_an_answer_may_fill_the_context(policy):
    engine = TransformersEngine(policy, tokenizer=call_tokenizer())
    with Endpoint(engine, call_tokenizer()) as running:
        session = running.session()
        turn_limits = []
        submit = running.broker.submit
        running.broker.submit = lambda request, future: (
            turn_limits.append(request.limit),
            submit(request, future),
        )
        client_of(session).completions.create(model="policy", prompt="hi", max_tokens=300)
        assert turn_limits == [min(300, policy.config.n_positions - 1)]


def test_a_turn_ends_at_the_end_tokens_of_model_and_tokenizer(policy, monkeypatch):
    monkeypatch.setattr(policy.generation_config, "eos_token_id", 5)
    ends = {5, call_tokenizer().eos_token_id}
    with serving(policy, sampling=Sampling(max_new_tokens=100, seed=0)) as running:
        session = running.session()
        client_of(session).chat.completions.create(model="policy", messages=[USER], n=16)
    assert {token for turn in session.turns for token in turn.generated.ids if token in ends} == ends
    assert not any(ends.intersection(turn.generated.ids[:-1]) for turn in session.turns)


def test_stop_strings_are_left_out_beside_tools(endpoint):
    client = client_of(endpoint.session())
    answers = client.chat.completions.create(model="policy", messages=[USER], tools=SCHEMAS, stop=["fail"], n=8)
    assert all("fail" not in (choice.message.content or "") for choice in answers.choices)


def test_keys_belong_to_sessions(endpoint):
    session = endpoint.session()
    client = client_of(session)
    ask(client, [USER])
    endpoint.close_session(session)
    for other in (client, client.with_options(api_key="guess")):
        with pytest.raises(openai.AuthenticationError):
            ask(other, [USER])
    assert len(session.turns) == 1


class Endless:
    """An engine that ends no completion before it is told to."""

    def __init__(self):
        self.running, self.streams, self.ends = {}, [], False

    @contextmanager
    def live(self):
        yield self

    busy = True

    def submit(self, request):
        self.running[id(request)] = request
        self.streams.append(request.stream)
        return id(request)

    def cancel(self, request):
        del self.running[request]

    def step(self):
        time.sleep(0.01)
        ended = list(self.running) if self.ends else []
        return {self.running.pop(each) and each: Generated([9], torch.zeros(1), None, "stop") for each in ended}


def test_a_deadline_within_a_turn_is_a_deadline(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running:
        session = running.session()

        async def episode():
            await asyncio.wait_for(session.extend(None, [USER], 0, []), 0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(episode())
        waits_for(lambda: not engine.running)
        assert not session._running and not session._asked


def test_no_random_stream_is_used_twice(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running:
        session = running.session()

        async def turns():
            tasks = []
            for count in (2, 1):
                tasks += [asyncio.ensure_future(session.extend(None, [USER], 0, [])) for _ in range(count)]
                while len(engine.streams) < len(tasks):
                    await asyncio.sleep(0.01)
                tasks[0].cancel()

        asyncio.run(turns())
    assert len(set(engine.streams)) == 3


class Broken(Endless):
    def step(self):
        raise FloatingPointError("logits")


def test_after_an_error_of_the_engine_requests_fail_at_once(policy):
    with serving(policy, engine=Broken()) as running:
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="logits"):
                ask(client_of(running.session()), [USER])
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(running.base_url.replace("/v1", "/health"))


def waits_for(condition):
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


def test_a_client_that_goes_away_frees_the_engine(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running:
        for stream in (False, True):
            session = running.session()
            with sent(running, session, {"messages": [USER], "stream": stream}):
                waits_for(lambda: engine.running)
            waits_for(lambda: not engine.running)
            assert session.turns == []


def test_a_client_that_does_not_read_frees_the_engine(policy, monkeypatch):
    monkeypatch.setattr(openai_app, "BODY_DEADLINE_S", 0.6)
    engine = Endless()
    with serving(policy, engine=engine) as running:
        session = running.session()
        with sent(running, session, {"messages": [USER], "stream": True}):
            waits_for(lambda: engine.running)
            (request,) = engine.running.values()
            request.listener(call_tokenizer().encode(ADD) * 150_000)  # more than sockets hold
            waits_for(lambda: request.listener([9]) or not engine.running)
            assert not session._running


def sent(running, session, body, held=0):
    """The connection of a request, without the last bytes that are `held` back."""
    body = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port))
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) - held])
    return connection


def test_a_retry_may_overtake_the_end_of_its_first_connection(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running, ThreadPoolExecutor() as pool:
        session = running.session()
        with sent(running, session, {"messages": [USER]}):
            waits_for(lambda: engine.running)
            (turn,) = session._running
            again = pool.submit(ask, client_of(session), [USER], extra_headers={"x-stainless-retry-count": "1"})
            waits_for(lambda: turn.requests == 2)
        waits_for(lambda: turn.requests == 1)
        engine.ends = True
        assert again.result(20).content == turn.text and session.turns == [turn]


def test_a_budget_of_seconds_ends_a_running_turn(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running:
        session = running.session(budget=Budget(seconds=0.3))
        with pytest.raises(openai.BadRequestError, match="seconds"):
            ask(client_of(session), [USER])
        waits_for(lambda: not engine.running)
        assert session.cut == "seconds" and not session._running


def test_a_turn_that_cannot_be_read_is_given_up(policy, monkeypatch, caplog):
    caplog.set_level("CRITICAL", logger="uvicorn")
    with serving(policy) as running:
        session = running.session(budget=Budget(turns=1))
        with monkeypatch.context() as patch:
            patch.setattr(running.chats, "read", lambda *given: {}["parser"])
            with pytest.raises(openai.InternalServerError, match="KeyError"):
                ask(client_of(session), [USER])
        assert not session._running and not session._asked
        ask(client_of(session), [USER])


def test_long_texts_are_read_beside_the_event_loop(policy, monkeypatch):
    names = []
    with serving(policy) as running:
        prompt = running.chats.prompt
        monkeypatch.setattr(sessions, "LONG", 40)

        def shown(*given):
            names.append(threading.current_thread().name)
            return prompt(*given)

        monkeypatch.setattr(running.chats, "prompt", shown)
        client = client_of(running.session())
        for content in ("What is one ?", "What is one ? " * 4):
            ask(client, [{"role": "user", "content": content}], max_tokens=1)
        client.completions.create(model="policy", prompt="What is one ? " * 4, max_tokens=1)
        asyncio.run(running.session().extend(None, [{**USER, "content": "What is one ? " * 4}], 0, []))
    assert [name.startswith(("agent-endpoint", "MainThread")) for name in names] == [True, False, False]


def test_closing_ends_every_request(policy):
    failed, engine = [], Endless()
    with serving(policy, engine=engine) as running:
        client = client_of(running.session())

        def waits():
            try:
                ask(client, [USER])
            except openai.APIError as error:
                failed.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        waits_for(lambda: engine.running)
    thread.join(20)
    assert [error.status_code for error in failed] == [503] and "closed" in str(failed[0])


def test_a_session_may_close_while_its_endpoint_does(policy, monkeypatch):
    with serving(policy, http=False, threaded=False) as running:
        first, second = running.session(), running.session()
        monkeypatch.setattr(first, "close", lambda: running.close_session(second))
    assert second.closed


def test_a_closed_session_begins_no_turn(policy, monkeypatch):
    """It is closed while its prompt is read on a thread, and while the body of a request arrives."""
    monkeypatch.setattr(sessions, "LONG", 0)
    engine, reading, asked, closed = Endless(), [], [], threading.Event()
    session_of = Endpoint.session_of
    monkeypatch.setattr(Endpoint, "session_of", lambda own, key: asked.append(key) or session_of(own, key))
    with serving(policy, engine=engine) as running:
        prompt = running.chats.prompt
        monkeypatch.setattr(
            running.chats, "prompt", lambda *given: reading.append(1) or (closed.wait(20) and prompt(*given))
        )
        for held, begun in ((0, reading), (1, asked)):
            asked.clear()
            session = running.session()
            with sent(running, session, {"messages": [USER]}, held=held) as connection:
                waits_for(lambda begun=begun: begun)
                running.close_session(session)
                closed.set()
                connection.sendall(b"}" * held)
                assert connection.recv(4096).split()[1] == b"503"
            assert not session._running and not engine.streams


def test_a_stream_is_decoded_where_tokens_come(policy, monkeypatch):
    engine, seen = Endless(), []
    with serving(policy, engine=engine) as running:
        text = running.chats.text
        monkeypatch.setattr(running.chats, "text", lambda ids, *given: seen.append(len(ids)) or text(ids, *given))
        with sent(running, running.session(), {"messages": [USER], "stream": True}):
            waits_for(lambda: engine.running)
            (request,) = engine.running.values()
            for count in (1, 2):
                request.listener([9])
                waits_for(lambda count=count: seen[-1:] == [count])
            time.sleep(4 * sessions._PAUSE_S)
            assert seen == [1, 2]


@pytest.mark.parametrize(
    ("given", "named"),
    [({"prompt": "hi", "stop": "x"}, "need a tokenizer"), ({"prompt": ["hi"] * 9, "n": 128}, "1024")],
)
def test_refused_completions_are_not_too_long(given, named, policy):
    refused = pytest.raises(openai.BadRequestError, match=named)
    with serving(policy, engine=TransformersEngine(policy)) as running, refused as raised:
        client_of(running.session()).completions.create(model="policy", **given)
    assert raised.value.code is None


def test_bad_requests_leave_nothing_behind(policy, caplog, monkeypatch):
    caplog.set_level("CRITICAL", logger="uvicorn")
    with serving(policy, agent_sampling="agent") as running:
        session, other = running.session(keeps=False), running.session()
        found, faults = fuzz(running.port, session.api_key, 300)
        assert faults == [] and found["200"] >= 10 and found["400"] >= 50
        monkeypatch.setattr(app, "_HEAD_S", 0.5)
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as silent:
            silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHos")
            assert silent.recv(1) == b""  # closed
        waits_for(lambda: not running.broker._running and not session._running)
        assert not session._asked and not other.turns and running.broker.failure is None
        assert ask(client_of(other), [USER]).role == "assistant"


def test_malformed_requests_are_refused(policy, monkeypatch):
    monkeypatch.setattr(openai_app, "BODY_DEADLINE_S", 0.6)
    with serving(policy) as endpoint:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        session = endpoint.session()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
        good = json.dumps({"messages": [USER]}).encode()
        bodies = [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b'{"messages": 3}',
            b'{"messages": [[]]}',
            b"[" * 100_000,
        ]
        requests = [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        many = "".join(f"X-{number}: 1\r\n" for number in range(200))
        requests += [
            f"{head}{many}Content-Length: {len(good)}\r\n\r\n".encode() + good,
            f"{head}Content-Length: 1000\r\n\r\n{{".encode(),  # the rest never comes
            f"{head}Content-Length: {10**9}\r\n\r\n".encode() + b" " * (openai_app.MAX_BODY_BYTES + 1),
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            f"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n\r\n".encode(),
        ]
        for request in requests:
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                with suppress_reset():
                    connection.sendall(request)
                with suppress_reset():
                    status = int(connection.recv(4096).split()[1])
                    assert 400 <= status < 500, (status, request[:200])
        assert session.turns == []
        key = {"Authorization": f"Bearer {session.api_key}"}
        answer = httpx.post(f"{endpoint.base_url}/chat/completions", content="{", headers=key)
        assert answer.json()["error"]["message"].startswith("body: JSON decode error")
        ask(client_of(session), [USER])


def test_a_server_that_ends_is_logged_and_ends_the_requests(policy, monkeypatch, caplog):
    def run(*_):
        raise OSError("no sockets left")

    monkeypatch.setattr(app.HTTPServer, "run", run)
    with serving(policy) as running:
        waits_for(lambda: running.broker.failure is not None)
        assert "no sockets left" in str(running.broker.failure) and "no sockets left" in caplog.text


@contextmanager
def suppress_reset():
    """The server may close a connection while it is still written to."""
    try:
        yield
    except (BrokenPipeError, ConnectionResetError):
        return


def test_the_most_sessions(policy):
    with serving(policy, most_sessions=1) as running:
        first = running.session()
        with pytest.raises(RuntimeError, match="open sessions"):
            running.session()
        running.close_session(first)
        running.session()
