"""Settings of transformers' `generate` become settings of rollouts, or are refused by name."""

import pytest
from transformers import GenerationConfig

from tests.tiny import tiny_model
from trl.generation.engine import Sampling


def test_known_names_are_taken_over():
    given = {
        "max_new_tokens": 7, "min_new_tokens": None, "min_length": -1, "temperature": 0.7, "top_k": 0.0, "top_p": 0.9, "min_p": 0.1,
        "do_sample": True, "pad_token_id": 0, "eos_token_id": [2, 3], "stop_strings": "END", "num_beams": 1, "use_cache": True,
    }  # fmt: skip
    expected = Sampling(7, temperature=0.7, top_k=0, top_p=0.9, min_p=0.1, stop_token_ids=(2, 3), stop_strings=("END",))
    assert Sampling().updated(given) == expected
    assert Sampling(5).updated({"eos_token_id": -1}) == Sampling(5, stop_token_ids=())
    assert Sampling(5).updated(None) == Sampling(5).updated({}) == Sampling(5)


def test_configs_of_transformers_are_taken_whole():
    config = GenerationConfig(max_length=12, repetition_penalty=1.2, do_sample=False)
    assert Sampling().updated(config) == Sampling(max_length=12, repetition_penalty=1.2, do_sample=False)
    assert Sampling().updated(tiny_model("gpt2").generation_config) == Sampling(stop_token_ids=(2,))


def test_settings_of_transformers_processors_are_kept_where_they_ask_for_something():
    neutral = {"typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "eta_cutoff": 0.0}
    assert Sampling(5).updated(neutral) == Sampling(5)
    found = Sampling(5).updated({"typical_p": 0.9, "no_repeat_ngram_size": 2, "top_k": 3})
    assert found == Sampling(5, top_k=3, processors=(("typical_p", 0.9), ("no_repeat_ngram_size", 2)))
    assert found.alters_distribution and not Sampling(5).alters_distribution
    with pytest.raises(ValueError, match=r"vLLM .* typical_p=0.9, no_repeat_ngram_size=2"):
        found.refuse_processors("vLLM")


def test_what_cannot_be_honoured_is_refused_by_name():
    for wrong, message in [
        ({"num_beams": 4, "top_k": 3}, "generation_kwargs has num_beams=4, which rollouts do not support"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0, which rollouts do not support"),
        ({"remove_invalid_values": True}, "remove_invalid_values=True"),
        ({"typical_p": 1.5}, r"typical_p must be in \(0, 1\], got 1.5"),
        (
            {"temprature": 0.7},
            "temprature=0.7, which rollouts do not support. Supported are bad_words_ids, begin",
        ),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"min_p": -0.1}, r"min_p must be in \(0, 1\], got -0.1"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0, got 0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"stop_strings": ["a", ""]}, "stop_strings must not be empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            Sampling().updated(wrong)
    for wrong in ({"top_k": -1}, {"top_k": 2.5}):
        with pytest.raises(ValueError, match="top_k must be a whole number"):
            Sampling(**wrong)
