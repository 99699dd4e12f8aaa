"""What every engine must do, over every kind of engine: transformers' `generate` and the scoring forward are the oracles."""

import math

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.tiny import tiny_model
from tests.tiny_tokenizers import tiny_tokenizer
from trl.generation.engine import Engine, Sampling
from trl.generation.transformers.engine import TransformersEngine
from trl.models.scoring.causal import Scorer
from trl.models.scoring.head import ScoreOptions

EOS, PAD = 2, 0
KINDS = {"fused": {"route": "fused"}, "forward": {"route": "forward"}, "generate": {"route": "generate"}}
DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "cohere", "olmo2", "granite",
            "gpt2", "gpt_neox", "opt", "mixtral", "qwen3_moe", "bloom", "falcon"]  # fmt: skip
# Grouped products take no float64; eager attention (Gemma 2) and Bloom have NaN in padded rows there.
FLOAT32 = ("mixtral", "qwen3_moe", "bloom", "gemma2")


def prompts_of(lengths=(5, 9, 3, 12), copies=3, vocab=96, seed=1):
    """Ragged prompts, each several times."""
    generator = torch.Generator().manual_seed(seed)
    distinct = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in distinct for _ in range(copies)]


def oracle(model, prompts, ends=(EOS,), **options):
    """What `model.generate` makes of left-padded prompts, up to and with the first end token."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    options = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": list(ends), **options}
    rows = model.generate(input_ids=ids, attention_mask=mask, **options)[:, width:].tolist()
    cut = [next((place for place, token in enumerate(row) if token in ends), len(row) - 1) for row in rows]
    return [row[: end + 1] for row, end in zip(rows, cut, strict=True)]


def ids_of(generated):
    return [completion.ids for completion in generated]


def scored_logps(model, prompt, ids, temperature=1.0):
    """Log-probs of a completion by the scoring forward."""
    tokens = torch.tensor([[*prompt, *ids]])
    labels = tokens.clone()
    labels[:, : len(prompt)] = -100
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    with torch.no_grad():
        return Scorer(model).score(model, batch, ScoreOptions(temperature=temperature)).logps


@pytest.fixture(params=KINDS)
def make_engine(request):
    """Builds one kind of engine around a model."""
    return lambda model, **options: TransformersEngine(model, **KINDS[request.param], **options)


# ---- greedy


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("max_batch", [None, 5])
def test_greedy_ids_are_those_of_generate(architecture, max_batch):
    model = tiny_model(architecture, dtype=torch.float32 if architecture in FLOAT32 else torch.float64)
    prompts = prompts_of()
    expected = oracle(model, prompts, max_new_tokens=20)
    engine = TransformersEngine(model, max_batch=max_batch)
    assert isinstance(engine, Engine)
    found = engine.generate(prompts, Sampling(max_new_tokens=20, do_sample=False))
    assert ids_of(found) == expected
    for completion in found:
        stopped = completion.ids[-1] == EOS
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert len(completion.logps) == len(completion.ids)
        assert completion.kept is None


def test_every_kind_agrees_with_generate(make_engine):
    model = tiny_model("qwen3", dtype=torch.float64)
    prompts = prompts_of()
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "min_new_tokens": 6}
    expected = [oracle(model, [prompt], **options)[0] for prompt in prompts]  # padding would be penalised too
    sampling = Sampling(max_new_tokens=24, temperature=0, repetition_penalty=1.3, min_new_tokens=6)
    assert ids_of(make_engine(model).generate(prompts, sampling)) == expected
    assert min(map(len, expected)) >= 6


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "gemma2", "gemma3_text"])
def test_sliding_windows_that_bind(architecture):
    overrides = {"sliding_window": 6}
    if architecture == "qwen2":
        overrides.update(use_sliding_window=True, max_window_layers=1)
    dtype = torch.float32 if architecture in FLOAT32 else torch.float64
    model = tiny_model(architecture, dtype=dtype, **overrides)
    prompts = prompts_of()
    expected = oracle(model, prompts, ends=(95,), max_new_tokens=20)
    sampling = Sampling(max_new_tokens=20, do_sample=False, stop_token_ids=(95,))
    for max_batch in (None, 5):
        assert ids_of(TransformersEngine(model, max_batch=max_batch).generate(prompts, sampling)) == expected


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn", "dynamic"])
def test_scaled_rotary_embeddings(rope):
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 2.0}
    if rope == "llama3":
        parameters.update(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    model = tiny_model("llama", dtype=torch.float64, rope_parameters=parameters)
    prompts = prompts_of()
    engine = TransformersEngine(model)
    found = ids_of(engine.generate(prompts, Sampling(max_new_tokens=12, do_sample=False)))
    assert found == oracle(model, prompts, max_new_tokens=12)
    assert bool(engine.fallbacks) == (rope == "dynamic")


# ---- log-probs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_are_those_of_the_scoring_forward(make_engine, temperature):
    model = tiny_model("qwen3")
    prompts = prompts_of()
    found = make_engine(model).generate(prompts, Sampling(max_new_tokens=20, temperature=temperature, seed=1))
    for prompt, completion in zip(prompts, found, strict=True):
        expected = scored_logps(model, prompt, completion.ids, temperature)
        torch.testing.assert_close(completion.logps, expected, rtol=1e-5, atol=1e-5)
        assert completion.logps.dtype == torch.float32


def test_logps_and_kept_mass_add_up_to_the_whole_distribution(make_engine):
    model = tiny_model("llama", dtype=torch.float64)
    prompts = prompts_of()
    sampling = Sampling(max_new_tokens=10, temperature=0.8, top_p=0.7, top_k=30, seed=5)
    for prompt, completion in zip(prompts, make_engine(model).generate(prompts, sampling), strict=True):
        assert completion.kept is not None
        assert (completion.kept <= 0).all()
        assert (completion.kept >= math.log(0.7) - 1e-6).any()
        whole = completion.logps.double() + completion.kept
        expected = scored_logps(model, prompt, completion.ids, 0.8)
        torch.testing.assert_close(whole, expected, rtol=0, atol=2e-6)  # `generate` hands on float32 logits


# ---- distribution


CUTS = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"top_k": 7, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 0.8, "temperature": 1.2},
]


def analytic(model, prompt, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """The next token's distribution by transformers' own processors, and the log of the mass they kept."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1].double()
    steps = [RepetitionPenaltyLogitsProcessor(repetition_penalty), TemperatureLogitsWarper(temperature)]
    whole = LogitsProcessorList(steps)(ids, logits.clone())
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    cut = LogitsProcessorList(steps)(ids, logits.clone())
    kept = (cut.logsumexp(-1) - whole.logsumexp(-1))[0]
    return cut.softmax(-1)[0], kept


def chi_square(counts, probabilities):
    """How many standard deviations Pearson's statistic lies above its mean, over tokens expected at least 5 times."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    usual = expected >= 5
    pairs = [(counts[usual], expected[usual]), (counts[~usual].sum()[None], expected[~usual].sum()[None])]
    seen, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    degrees = max(len(wanted) - 1, 1)
    return (((seen - wanted) ** 2 / wanted).sum() - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_first_tokens_follow_the_analytic_distribution(make_engine, settings):
    model = tiny_model("llama", dtype=torch.float64, vocab_size=16)
    prompt = [3, 7, 3, 11]
    expected, kept = analytic(model, prompt, **settings)
    draws = 4000
    sampling = Sampling(max_new_tokens=1, stop_token_ids=(), seed=0, **settings)
    found = make_engine(model).generate([prompt] * draws, sampling)
    counts = torch.bincount(torch.tensor([completion.ids[0] for completion in found]), minlength=16).double()
    assert chi_square(counts, expected) < 4
    for completion in found[:20]:
        want = expected[completion.ids[0]].log()
        torch.testing.assert_close(completion.logps[0].double(), want, rtol=1e-5, atol=1e-6)
        if completion.kept is not None:
            torch.testing.assert_close(completion.kept[0].double(), kept, rtol=1e-5, atol=1e-6)


# ---- streams


def test_results_depend_on_prompt_seed_and_stream_alone(make_engine):
    model = tiny_model("qwen3", dtype=torch.float64)
    prompts = prompts_of()
    sampling = Sampling(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=3)
    whole = ids_of(make_engine(model).generate(prompts, sampling))
    assert len({tuple(ids) for ids in whole[:3]}) == 3  # copies of a prompt differ
    assert len({len(ids) for ids in whole}) > 2  # and rows left early
    for max_batch in (1, 5):
        assert ids_of(make_engine(model, max_batch=max_batch).generate(prompts, sampling)) == whole
    order = torch.randperm(len(prompts)).tolist()
    shuffled = make_engine(model).generate([prompts[i] for i in order], sampling, streams=order)
    assert ids_of(shuffled) == [whole[i] for i in order]
    alone = make_engine(model).generate(prompts[7:8], sampling, streams=[7])
    assert ids_of(alone) == whole[7:8]
    longer = Sampling(max_new_tokens=30, temperature=0.9, top_p=0.95, seed=3)
    assert [ids[:20] for ids in ids_of(make_engine(model).generate(prompts, longer))] == whole
    other = Sampling(max_new_tokens=20, temperature=0.9, top_p=0.95, seed=4)
    assert ids_of(make_engine(model).generate(prompts, other)) != whole


def test_a_seed_is_drawn_from_the_global_generator(make_engine):
    model = tiny_model("llama")
    prompts, sampling = prompts_of(), Sampling(max_new_tokens=8)
    torch.manual_seed(5)
    first, second = (ids_of(make_engine(model).generate(prompts, sampling)) for _ in range(2))
    torch.manual_seed(5)
    assert ids_of(make_engine(model).generate(prompts, sampling)) == first
    assert first != second


# ---- stopping


def test_stop_tokens(make_engine):
    model = tiny_model("llama", dtype=torch.float64)
    prompts, ends = prompts_of(), (7, 40, 61, EOS)
    sampling = Sampling(max_new_tokens=40, do_sample=False, stop_token_ids=ends)
    found = make_engine(model).generate(prompts, sampling)
    assert ids_of(found) == oracle(model, prompts, ends=ends, max_new_tokens=40)
    never = make_engine(model).generate(prompts, Sampling(max_new_tokens=9, do_sample=False, stop_token_ids=()))
    assert {(len(c.ids), c.finish_reason) for c in never} == {(9, "length")}


def test_stop_strings_across_tokens(make_engine):
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), dtype=torch.float64)
    prompts = prompts_of(vocab=len(tokenizer))
    plain = Sampling(max_new_tokens=24, temperature=1.0, stop_token_ids=(), seed=2)
    whole = ids_of(make_engine(model).generate(prompts, plain))
    texts = [tokenizer.decode(ids) for ids in whole]
    middle = len(tokenizer.decode(whole[0][:8]))
    stop = texts[0][middle - 2 : middle + 2]  # some characters of the eighth token and some of the next
    assert len(stop) == 4
    engine = make_engine(model, tokenizer=tokenizer)
    sampling = Sampling(max_new_tokens=24, stop_token_ids=(), seed=2, stop_strings=(stop, "never said"))
    for ids, completion in zip(whole, engine.generate(prompts, sampling), strict=True):
        ends = [end for end in range(1, 25) if stop in tokenizer.decode(ids[:end])]
        assert completion.ids == ids[: ends[0] if ends else 24]
        assert completion.finish_reason == ("stop" if ends else "length")
    with pytest.raises(ValueError, match="need a tokenizer"):
        make_engine(model).generate(prompts, sampling)


def test_lengths_by_window_and_max_length(make_engine):
    model = tiny_model("llama", max_position_embeddings=16)
    prompts = prompts_of()
    found = make_engine(model).generate(prompts, Sampling(max_new_tokens=40, stop_token_ids=(), seed=0))
    assert [len(c.ids) for c in found] == [16 - len(prompt) for prompt in prompts]
    found = make_engine(model).generate(prompts, Sampling(max_length=14, stop_token_ids=(), seed=0))
    assert [len(c.ids) for c in found] == [14 - len(prompt) for prompt in prompts]
    sampling, own = (
        Sampling(max_new_tokens=6, stop_token_ids=(), seed=0),
        [1 + n % 7 for n in range(len(prompts))],
    )
    limited = make_engine(model).generate(prompts, sampling, limits=own)
    rooms = [min(6, 16 - len(prompt), limit) for prompt, limit in zip(prompts, own, strict=True)]
    whole = make_engine(model).generate(prompts, sampling)
    assert [c.ids for c in limited] == [c.ids[:room] for c, room in zip(whole, rooms, strict=True)]
    with pytest.raises(ValueError, match="limits must be one number >= 1 per prompt"):
        make_engine(model).generate(prompts[:1], sampling, limits=[0])


# ---- bad input


def test_bad_prompts_are_named(make_engine):
    engine = make_engine(tiny_model("llama", max_position_embeddings=16))
    assert engine.generate([], Sampling()) == []
    for prompts, message in [
        ([[3], []], r"prompts\[1\] is empty"),
        ([[3] * 16], r"prompts\[0\] has 16 tokens"),
        ([[3, 96]], "ids from 3 to 96, the model 0 to 95"),
        ([[3, -100]], "ids from -100"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, Sampling())
    with pytest.raises(ValueError, match=r"streams must be one per prompt \(1\), got 2"):
        engine.generate([[3]], Sampling(), streams=[0, 1])
    with pytest.raises(ValueError, match="max_length=4"):
        engine.generate([[3] * 4], Sampling(max_length=4))


def test_logits_that_are_no_numbers_stop_the_run(make_engine):
    model = tiny_model("llama")
    engine = make_engine(model)
    engine.generate(prompts_of(), Sampling(max_new_tokens=2))
    with torch.no_grad():
        model.lm_head.weight[9] = torch.nan
    for sampling in (Sampling(max_new_tokens=4), Sampling(do_sample=False), Sampling(top_p=0.5, top_k=4)):
        with pytest.raises(FloatingPointError, match=r"logits of prompts\[\d+\]"):
            engine.generate(prompts_of(), sampling)


def test_a_model_without_end_is_warned_about_once(make_engine, caplog):
    model = tiny_model("llama", eos_token_id=None)
    engine = make_engine(model)
    for _ in range(2):
        engine.generate([[3, 4]], Sampling(max_new_tokens=2))
    assert sum("no end token" in record.message for record in caplog.records) == 1


# ---- the model is lent


def test_the_model_is_left_as_it_was(make_engine):
    model = tiny_model("llama", attention_dropout=0.5)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.norm.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state, implementation = torch.get_rng_state(), model.config._attn_implementation
    first = make_engine(model).generate(prompts_of(), Sampling(max_new_tokens=8, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.model.norm.training and model.is_gradient_checkpointing
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert not any(completion.logps.requires_grad for completion in first)
    assert "forward" not in vars(model)
    again = make_engine(model.eval()).generate(prompts_of(), Sampling(max_new_tokens=8, seed=1))
    assert ids_of(again) == ids_of(first)  # dropout was off


def test_weights_are_read_anew_at_every_call(make_engine):
    model, other = (tiny_model("llama", dtype=torch.float64, seed=seed) for seed in (0, 1))
    engine, sampling = make_engine(model), Sampling(max_new_tokens=10, do_sample=False)
    engine.generate(prompts_of(), sampling)
    model.load_state_dict(other.state_dict())
    assert ids_of(engine.generate(prompts_of(), sampling)) == oracle(other, prompts_of(), max_new_tokens=10)
    third = tiny_model("llama", dtype=torch.float64, seed=2)
    engine.sync_weights(third, step=1)
    assert ids_of(engine.generate(prompts_of(), sampling)) == oracle(third, prompts_of(), max_new_tokens=10)
    engine.close()
