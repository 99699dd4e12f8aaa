"""A zoo of agents over HTTP: what is trained are the tokens that were sampled, whatever an agent does with its history."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import openai
import pytest
import torch
from benchmarks.agent_fuzz import fuzz
from transformers.utils import get_json_schema

from tests.rollouts.tool_words import TOOLS, call_tokenizer
from tests.trainer.grpo_tool_runs import caller
from trl.experimental.agents import Budget, Endpoint, chains_of
from trl.generation.engine import Sampling
from trl.generation.serving import app, openai_api
from trl.generation.transformers.engine import TransformersEngine
from trl.rollouts.agents import Played, completed

SCHEMAS = [get_json_schema(tool) for tool in TOOLS]
USER = {"role": "user", "content": "What is one ?"}
ROUNDS = 3


@pytest.fixture(scope="module")
def policy():
    return caller()


@contextmanager
def serving(policy, **options):
    sampling = options.pop("sampling", Sampling(max_new_tokens=12, seed=0))
    engine = options.pop("engine", None) or TransformersEngine(policy, tokenizer=call_tokenizer())
    with Endpoint(engine, call_tokenizer(), sampling=sampling, **options) as endpoint:
        yield endpoint
    assert not any(thread.is_alive() for thread in endpoint._threads)


@pytest.fixture(scope="module")
def endpoint(policy):
    with serving(policy) as running:
        yield running


def client_of(session, **options):
    return openai.OpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=0, timeout=60, **options
    )


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options).choices[0].message


def as_dict(message):
    return message.model_dump(exclude_none=True)


def answers(message):
    """Replies to the calls of a message, or the user's next question."""
    calls = message.tool_calls or []
    replies = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "3"}
        for call in calls
    ]
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
    """Writes the arguments of calls in another order and with other spaces."""
    messages = [USER]
    for _ in range(ROUNDS):
        reply = ask(client, messages, tools=SCHEMAS)
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
    plain: 1, react: None, tool_user: 1, rewriter: 1, streamer: 1, retrier: 1, sub_agent: 2, compactor: 2, stripper: ROUNDS,
    brancher: 3,
}  # fmt: skip


@pytest.mark.parametrize("agent", ZOO, ids=lambda agent: agent.__name__)
def test_the_trained_tokens_are_the_sampled_ones(agent, endpoint, policy):
    session = endpoint.session()
    agent(client_of(session))
    chains = chains_of(session.turns)
    assert len(chains) == ZOO[agent] or ZOO[agent] is None
    assert sum(sum(chain.sampled) for chain in chains) == sum(
        len(turn.generated.ids) for turn in session.turns
    )
    for chain in chains:
        ids = torch.tensor([chain.prompt + chain.ids])
        with torch.no_grad():
            logps = policy(ids).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[len(chain.prompt) - 1 :, 0]
        parts = [torch.zeros(part) if isinstance(part, int) else part.logps for part in chain.parts]
        given, sampled = torch.cat(parts), torch.tensor(chain.sampled)
        torch.testing.assert_close(own[sampled], given[sampled], rtol=0, atol=1e-9)
    endpoint.close_session(session)


def test_the_prompt_of_a_later_turn_is_what_the_template_shows(endpoint):
    session, words = endpoint.session(), call_tokenizer()
    client = client_of(session)
    reply = ask(client, [USER], tools=SCHEMAS)
    messages = [as_dict(reply), *answers(reply)]
    ask(client, [USER, *messages], tools=SCHEMAS)
    shown = words.apply_chat_template([USER, *messages], tools=SCHEMAS, add_generation_prompt=True)[
        "input_ids"
    ]
    last = session.turns[-1]
    if session.turns[0].generated.finish_reason == "stop":
        assert last.context[: len(session.turns[0].tokens)] == session.turns[0].tokens
    assert last.shown == shown[-len(last.shown) :]


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
        stopped = completed([Played(chains, [], 9, False)], call_tokenizer(), keeps=False).experience.per_row
        assert stopped["stopped"].tolist() == [all(chain.ended for chain in chains)]
    assert found[0] == found[1] and len(found[0]) == 6


def test_answers_have_usage_log_probs_and_calls(endpoint):
    client = client_of(session := endpoint.session())
    answer = client.chat.completions.create(
        model="policy", messages=[USER], tools=SCHEMAS, logprobs=True, n=8
    )
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


@pytest.mark.parametrize(
    ("given", "status", "named"),
    [
        ({"temperature": 0.3}, 400, "temperature"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"extra_body": {"colour": 1}}, 400, "colour"),
        ({"model": "other"}, 404, "other"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, 400, "names"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
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


def test_free_sessions_take_other_settings(policy):
    with serving(policy, fixed=False) as running:
        client = client_of(running.session())
        first, again = (ask(client, [USER], temperature=0, seed=seed) for seed in (1, 2))
        assert first.content == again.content


@pytest.mark.parametrize(
    ("budget", "name"), [({"turns": 2}, "turns"), ({"tokens": 5}, "tokens"), ({"seconds": 0.0}, "seconds")]
)
def test_a_spent_budget_ends_the_session(budget, name, endpoint):
    session = endpoint.session(budget=Budget(**budget))
    with pytest.raises(openai.BadRequestError, match=name):
        for _ in range(8):
            plain(client_of(session))
    assert session.session.cut == name
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
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
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
        assert (session.session.cut == "tokens") == (refused > 0)
        assert sum(len(turn.generated.ids) for turn in session.turns) <= tokens
        assert not session.session._running
        if not refused:
            alone = running.session(budget=Budget(tokens=tokens), stream=0)
            for text in texts:
                client_of(alone).completions.create(model="policy", prompt=text, max_tokens=30)
            assert sorted(turn.tokens for turn in session.turns) == sorted(
                turn.tokens for turn in alone.turns
            )


def test_a_text_is_continued_only_if_it_is_what_the_policy_wrote(endpoint):
    session, words = endpoint.session(), call_tokenizer()
    client = client_of(session)
    sent = ["What is one ? "]
    for _ in range(6):
        sent.append(
            sent[-1]
            + client.completions.create(model="policy", prompt=sent[-1], max_tokens=3).choices[0].text
        )
        sent[-1] += " Error: three "
    for turn, before in zip(session.turns[1:], session.turns, strict=False):
        is_whole = words.decode(before.generated.ids) == before.written.text
        assert (turn.parent is before) == is_whole
    for turn, prompt in zip(session.turns, sent, strict=False):
        assert words.decode(turn.context).split() == prompt.split()


def test_a_forgetful_session_draws_anew(policy):
    with serving(policy, fixed=False) as running:
        client = client_of(running.session(keeps=False))
        texts = {
            client.completions.create(model="policy", prompt="hi", max_tokens=12).choices[0].text
            for _ in range(6)
        }
        assert len(texts) > 1
        seeded = [
            client.completions.create(model="policy", prompt="hi", max_tokens=12, seed=1).choices[0].text
            for _ in range(2)
        ]
        assert seeded[0] == seeded[1]


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


def test_stop_strings_are_left_out_beside_tools(endpoint):
    client = client_of(endpoint.session())
    answers = client.chat.completions.create(
        model="policy", messages=[USER], tools=SCHEMAS, stop=["fail"], n=8
    )
    assert all("fail" not in (choice.message.content or "") for choice in answers.choices)


def test_keys_belong_to_sessions(endpoint):
    session = endpoint.session()
    client = client_of(session)
    ask(client, [USER])
    endpoint.close_session(session)
    for other in (client, openai.OpenAI(base_url=session.base_url, api_key="guess", max_retries=0)):
        with pytest.raises(openai.AuthenticationError):
            ask(other, [USER])
    assert len(session.turns) == 1


class Endless:
    """An engine that never ends a completion."""

    def __init__(self):
        self.running = {}

    @contextmanager
    def live(self):
        yield self

    busy = True

    def submit(self, request):
        self.running[len(self.running)] = request
        return len(self.running) - 1

    def cancel(self, request):
        del self.running[request]

    def step(self):
        time.sleep(0.01)
        return {}


def test_a_deadline_within_a_turn_is_a_deadline(policy):
    engine = Endless()
    with serving(policy, engine=engine) as running:
        session = running.session().session

        async def episode():
            await asyncio.wait_for(session.extend(None, [USER], 0, []).result(), 0.2)

        with pytest.raises(TimeoutError):
            asyncio.run(episode())
        waits_for(lambda: not engine.running)
        assert not session._running and not session._asked


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
            body = json.dumps({"messages": [USER], "stream": stream}).encode()
            host, port = running.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            session = running.session()
            with socket.create_connection((host, int(port))) as connection:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.api_key}\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                waits_for(lambda: engine.running)
            waits_for(lambda: not engine.running)
            assert session.turns == []


def test_closing_ends_every_request(policy):
    failed = []
    with serving(policy, engine=Endless()) as running:
        client = client_of(running.session())

        def waits():
            try:
                ask(client, [USER])
            except openai.APIError as error:
                failed.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        time.sleep(0.3)
    thread.join(20)
    assert [error.status_code for error in failed] == [503] and "closed" in str(failed[0])


def test_bad_requests_leave_nothing_behind(policy, caplog, monkeypatch):
    caplog.set_level("CRITICAL", logger="uvicorn")
    monkeypatch.setattr(app, "_HEAD_S", 0.5)
    with serving(policy, fixed=False) as running:
        session, other = running.session(keeps=False), running.session()
        found, faults = fuzz(running.port, session.api_key, 300)
        assert faults == [] and found["200"] >= 10 and found["400"] >= 50
        with socket.create_connection(("127.0.0.1", running.port), timeout=20) as silent:
            silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHos")
            assert silent.recv(1) == b""  # closed
        waits_for(lambda: not running.broker._running and not session.session._running)
        assert not session.session._asked and not other.turns and running.failure is None
        assert ask(client_of(other), [USER]).role == "assistant"


def test_malformed_requests_are_refused(endpoint, monkeypatch):
    monkeypatch.setattr(openai_api, "BODY_DEADLINE_S", 0.3)
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
        f"{head}Content-Length: {10**9}\r\n\r\n".encode() + b" " * (openai_api.MAX_BODY_BYTES + 1),
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
    ask(client_of(session), [USER])


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
