"""Requests that come and go get the same tokens as by one call, whatever runs beside them."""

import gc
import random
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_model
from trl.generation.engine import Sampling
from trl.generation.live import Broker, LiveCalls, Request, opened
from trl.generation.transformers.engine import TransformersEngine

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8], [9], [8, 9]]
LIMITS = [3, 12, 5, 12, 7, 2]
SAMPLING = Sampling(max_new_tokens=12, seed=3, top_p=0.9, stop_token_ids=())


def engine(architecture="llama", **options):
    return TransformersEngine(tiny_model(architecture, dtype=torch.float64), **options)


def same(found, expected):
    assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)
    torch.testing.assert_close(found.logps, expected.logps, rtol=0, atol=1e-12)
    assert (found.kept is None) == (expected.kept is None)
    if found.kept is not None:
        torch.testing.assert_close(found.kept, expected.kept, rtol=0, atol=1e-12)


@contextmanager
def by_calls(engine):
    yield LiveCalls(engine)


@pytest.mark.parametrize(
    ("architecture", "options", "how"),
    [
        ("llama", {}, opened),
        ("llama", {"max_batch": 2}, opened),
        ("gpt2", {}, opened),
        ("llama", {"route": "generate"}, opened),
        ("llama", {}, by_calls),
    ],
)
def test_the_tokens_are_those_of_one_call(architecture, options, how):
    own = engine(architecture, **options)
    expected = own.generate(PROMPTS, SAMPLING, limits=LIMITS)
    with how(own) as live:
        numbers, found = [], {}
        for stream, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True)):
            numbers.append(live.submit(Request(prompt, SAMPLING, stream=stream, limit=limit)))
            if stream % 2:
                found |= live.step()
        while live.busy:
            found |= live.step()
    for number, one in zip(numbers, expected, strict=True):
        same(found[number], one)


def test_each_request_has_its_own_settings():
    kinds = [
        SAMPLING,
        Sampling(max_new_tokens=6, seed=4, temperature=0.5, stop_token_ids=(7,), repetition_penalty=1.3),
        Sampling(max_new_tokens=9, seed=5, do_sample=False, min_new_tokens=4, stop_token_ids=(5, 6, 7, 8)),
    ]
    own = engine()
    expected = [own.generate([PROMPTS[number]], kind)[0] for number, kind in enumerate(kinds)]
    with own.live() as live:
        numbers = [live.submit(Request(PROMPTS[number], kind)) for number, kind in enumerate(kinds)]
        found = live.step()
        late = live.submit(Request(PROMPTS[0], kinds[1], stream=9))
        while live.busy:
            found |= live.step()
    for number, one in zip(numbers, expected, strict=True):
        same(found[number], one)
    same(found[late], own.generate([PROMPTS[0]], kinds[1], streams=[9])[0])


def test_requests_of_any_settings_come_and_go():
    own, rng = engine(max_batch=6), random.Random(0)
    choices = {
        "top_p": [1.0, 0.5], "top_k": [0, 4], "min_p": [0.0, 0.1], "repetition_penalty": [1.0, 1.3], "temperature": [1.0, 0.5],
        "max_new_tokens": [1, 4, 20], "min_new_tokens": [0, 0, 1], "stop_token_ids": [(), (7, 8, 9)],
    }  # fmt: skip
    wanted, found = dict[int, Request](), {}
    with own.live() as live:
        for stream in range(60):
            # Most are plain, so that rare settings end beside others that run.
            names = [name for name in choices if rng.random() < 0.2 or name == "max_new_tokens"]
            sampling = Sampling(seed=3, **{name: rng.choice(choices[name]) for name in names})
            request = Request(rng.choice(PROMPTS), sampling, stream=stream)
            wanted[live.submit(request)] = request
            if rng.random() < 0.1:
                live.cancel(rng.choice(list(wanted.keys() - found.keys())))
            for _ in range(0 if stream % 20 < stream // 4 else 6):  # more and more at once
                found |= live.step()
        while live.busy:
            found |= live.step()
    for number, one in found.items():
        each = wanted[number]
        same(one, own.generate([each.prompt], each.sampling, streams=[each.stream])[0])
    assert 40 < len(found) < 60


def test_cancelled_requests_leave_the_others_alone():
    own, heard = engine(), []
    (expected,) = own.generate([PROMPTS[3]], SAMPLING, streams=[3])
    with own.live() as live:
        running = live.submit(Request(PROMPTS[0], SAMPLING))
        number = live.submit(Request(PROMPTS[3], SAMPLING, stream=3, listener=heard.extend))
        waiting = live.submit(Request(PROMPTS[1], SAMPLING))
        live.cancel(waiting)
        found = live.step()
        live.cancel(running)
        while live.busy:
            found |= live.step()
        live.cancel(number)
        assert not live.requests.prompts and not live.requests.prompt_of
    assert list(found) == [number] and heard == expected.ids
    same(found[number], expected)


def test_requests_that_end_as_they_join_beside_a_running_one():
    own, short = engine(), Sampling(max_new_tokens=12, seed=3, top_p=0.9, stop_token_ids=tuple(range(5, 60)))
    expected = own.generate(PROMPTS * 3, short, streams=range(18))
    with own.live() as live:
        first, found = live.submit(Request(PROMPTS[0], SAMPLING)), {}
        found |= live.step()
        numbers = [live.submit(Request(prompt, short, stream=stream)) for stream, prompt in enumerate(PROMPTS * 3)]
        while live.busy:
            found |= live.step()
    assert any(len(one.ids) == 1 for one in expected) and len(found[first].ids) == 12
    for number, one in zip(numbers, expected, strict=True):
        same(found[number], one)


def test_rows_of_the_tables_are_used_again():
    with engine().live() as live:
        for round_ in range(20):
            for stream in range(3):
                live.submit(Request(PROMPTS[stream], SAMPLING, stream=round_, limit=2))
            while live.busy:
                live.step()
        assert len(live.requests.counts) <= 4


@pytest.mark.parametrize("steps", [2, 200])  # a wave begins while others run, or after them
def test_keys_and_values_stay_within_the_planned_memory(monkeypatch, steps):
    own = engine(reuse_memory=0)
    config, long = own.model.config, 80
    per_token = 2 * 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    memory = 4 * (per_token * (long + 3) + 12 * config.vocab_size)
    monkeypatch.setattr("trl.generation.transformers.engine.row_memory", lambda device: memory)
    short = [([5, 6, 7], 4)] * 60, [([5 + number, 6], 4) for number in range(30)]
    waves = [*short, [([8], long)], *short, [([9] * (long - 4), 4)], short[1]]
    everything = [each for wave in waves for each in wave]
    prompts, limits = zip(*everything, strict=True)
    sampling, found, stream = replace(SAMPLING, max_new_tokens=long), {}, 0
    with own.live() as live:
        for wave in waves:
            for prompt, limit in wave:
                live.submit(Request(prompt, sampling, stream=stream, limit=limit))
                stream += 1
            left = steps
            while live.busy and (left := left - 1) >= 0:
                found |= live.step()
                tables = [table for layer in live.loop.cache.layers.values() for table in layer.values()]
                assert sum(table.nbytes for table in tables) <= memory
        while live.busy:
            found |= live.step()
        assert not live.loop.cache.layers
    for number, one in enumerate(own.generate(prompts, sampling, limits=limits)):
        same(found[number], one)


def test_caches_and_weights_are_freed_when_it_ends():
    gc.collect()
    gc.disable()
    try:
        with engine().live() as live:
            live.submit(Request(PROMPTS[0], SAMPLING))
            while live.busy:
                live.step()
            held = [weakref.ref(each) for each in (live.loop.cache, live.loop.decoder, live.loop.reuse)]
        del live
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("prompt", [[], [-1], [10**6], [5] * 4096])
def test_an_invalid_prompt_is_refused_at_once(prompt):
    with engine().live() as live:
        with pytest.raises(ValueError, match="prompts"):
            live.submit(Request(prompt, SAMPLING))
        assert not live.busy


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_a_sharded_model_without_our_cache_is_refused_early(architecture):
    state = SimpleNamespace(fsdp_plugin=object())
    own = engine(architecture, accelerator=SimpleNamespace(state=state, mixed_precision="no"))
    if architecture == "llama":
        own.check_live()
        return
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be sharded"):
        own.check_live()


class Breaks:
    """Gives one error, then stops."""

    busy = True

    def submit(self, request):
        return request.prompt[0]

    def step(self, number=0):
        raise FloatingPointError("logits")

    cancel = step


def test_threads_share_an_engine():
    own, found = engine(), {}
    expected = own.generate(PROMPTS, SAMPLING, limits=LIMITS)
    with own.live() as live:
        broker = Broker()

        def ask(stream):
            asked = Request(PROMPTS[stream], SAMPLING, stream=stream, limit=LIMITS[stream])
            found[stream] = broker.submit(asked).result(60)
            broker.wake()

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        broker.run(live, lambda: len(found) == len(PROMPTS))
        refused, dropped = (broker.submit(Request(prompt, SAMPLING)) for prompt in ([], [5]))
        dropped.cancel()
        broker.run(live, refused.done)
    for stream, one in enumerate(expected):
        same(found[stream], one)
    with pytest.raises(ValueError, match="empty"):
        refused.result(0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_of_the_engine_ends_all_requests(cancelled):
    broker, engine = Broker(), Breaks()
    futures = [broker.submit(Request([number], SAMPLING)) for number in range(3)]
    if cancelled:  # after it has begun
        engine.submit = lambda request: (futures[0].cancel(), request.prompt[0])[1]
    with pytest.raises(FloatingPointError):
        broker.run(engine, lambda: False)
    futures.append(broker.submit(Request([3], SAMPLING)))
    assert all(isinstance(future.exception(0), FloatingPointError) for future in futures[cancelled:])


def spy(live):
    """The numbers of tokens that are prefilled."""
    found, prefill = [], live.loop.decoder.prefill

    def counting(prompts, held=()):
        found.append(sum(map(len, prompts)) - sum(own.length for own in held if own is not None))
        return prefill(prompts, held)

    live.loop.decoder.prefill = counting
    return found


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {}), ("gpt2", {}), ("gemma2", {}), ("mistral", {"sliding_window": 7})],
)
def test_a_next_turn_prefills_only_what_is_new(architecture, changes):
    """Three sessions of four turns, one of them branches: the completions are those of `generate`."""
    own = TransformersEngine(tiny_model(architecture, dtype=torch.float64, **changes))
    with own.live() as live:
        found, asked = [], []
        histories = [list(range(5, 15 + number)) for number in range(3)]
        counts = spy(live)
        for turn in range(4):
            numbers = {}
            for stream, history in enumerate(histories):
                request = Request(tuple(history), SAMPLING, stream=stream, limit=6 + stream)
                asked.append(request)
                numbers[live.submit(request)] = stream
            ended = {}
            while live.busy:
                ended |= live.step()
            for number, stream in numbers.items():
                found.append(ended[number])
                histories[stream] += [*ended[number].ids, 40 + turn, 41]
            if turn == 2:
                histories[2] = [*histories[2][:-3], 50]
        used = live.loop.reuse.used
    for request, one in zip(asked, found, strict=True):
        same(one, own.generate([request.prompt], SAMPLING, streams=[request.stream], limits=[request.limit])[0])
    assert counts[0] == 33 and counts[1:] == [9, 9, 7]
    longest = sum(len(request.prompt) + len(one.ids) - 1 for request, one in zip(asked[-3:], found[-3:], strict=True))
    core = own.model.config
    heads = getattr(core, "num_key_value_heads", None) or core.num_attention_heads
    size = getattr(core, "head_dim", None) or core.hidden_size // core.num_attention_heads
    per_token = 2 * 8 * core.num_hidden_layers * heads * size
    assert longest * per_token <= used <= (longest + 50) * per_token  # and the branch that was left


def test_kept_keys_are_bounded_and_end_with_the_weights():
    prompt = list(range(5, 40))
    for memory in (0, 1, None):
        own = engine(reuse_memory=memory)
        with own.live() as live:
            counts = spy(live)
            for _ in range(2):
                live.submit(Request(prompt, SAMPLING))
                while live.busy:
                    live.step()
            assert counts == [35, 35] if memory is not None else [35, 1]
            assert live.loop.reuse is None or live.loop.reuse.used <= live.loop.reuse.memory
    own.model.get_input_embeddings().weight.data.mul_(1.5)
    with own.live() as live:
        number = live.submit(Request(prompt, SAMPLING))
        found = {}
        while live.busy:
            found |= live.step()
    same(found[number], own.generate([prompt], SAMPLING)[0])


def test_a_failure_leaves_the_wake_up_to_the_thread_that_runs():
    """As where an endpoint closes: the condition holds, the thread is woken, and what waits is failed before it looks."""
    broker, conditions = Broker(), iter([False, True])
    broker.wake()
    broker.fail(RuntimeError("closing"))
    running = threading.Thread(target=broker.run, args=(None, lambda: next(conditions)), daemon=True)
    running.start()
    running.join(20)
    assert not running.is_alive()
