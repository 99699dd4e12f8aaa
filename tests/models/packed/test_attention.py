"""Packed rows of segments give what each sequence gives alone, for every architecture that claims so."""

import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny import ARCHITECTURES, SOFT_CAPPED, tiny_model
from trl.models.packed.attention import (
    packed_attention,
)
from trl.models.packed.support import packed_unsupported, use_packed_attention
from trl.models.scoring.causal import Scorer
from trl.tensors.segments import Segments

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")  # their grouped products take no float64
DENSE = sorted({*ARCHITECTURES} - {*MIXTURES, "bloom", "falcon"})
# The others' norms compute in float32 whatever the model's dtype, so their gradients depend on the order of a
# float32 sum over tokens.
ALL_FLOAT64 = ("gpt2", "gpt_neox", "opt")


def packed_logits(model, ids, segments):
    return model(
        input_ids=ids,
        position_ids=segments.position_ids(),
        attention_mask=segments.table,
        use_cache=False,
    ).logits[0]


def alone(model, ids, segments, number):
    start, length, prefix_start, prefix = segments.rows[number]
    row = torch.cat([ids[:, prefix_start : prefix_start + prefix], ids[:, start : start + length]], dim=1)
    return model(input_ids=row, use_cache=False).logits[0, prefix:]


SHAPES = {
    "plain": Segments.from_lengths([5, 5, 3, 7, 1]),
    "prefix group": Segments.from_prefix_groups([(5, [3, 2, 2, 1]), (1, [3]), (1, [])]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", [*DENSE, *MIXTURES])
def test_segments_give_the_logits_and_gradients_of_sequences_alone(architecture, shape):
    exact, is_capped = architecture not in MIXTURES, architecture in SOFT_CAPPED
    dtype, tolerance = (torch.float64, 1e-6 if is_capped else 1e-12) if exact else (torch.float32, 2e-5)
    gradient_tolerance = 1e-11 if architecture in ALL_FLOAT64 else 1e-4
    packed = tiny_model(architecture, dtype=dtype).eval()
    plain = tiny_model(architecture, dtype=dtype).eval()
    plain.set_attn_implementation("eager" if is_capped else "sdpa")
    assert use_packed_attention(packed)
    segments = SHAPES[shape]
    ids = torch.randint(3, 60, (1, segments.total))

    found = packed_logits(packed, ids, segments)
    expected = torch.cat([alone(plain, ids, segments, number) for number in range(len(segments.rows))])
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= tolerance * scale

    weights = torch.sin(torch.arange(found.numel(), dtype=dtype)).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    # A gradient whose terms cancel (a key's bias) is rounded like its terms, which are as large as other gradients.
    largest = max(part.grad.abs().max() for part in plain.parameters() if part.grad is not None)
    for (name, one), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert one.grad is None or not one.grad.any(), name
        else:
            size = other.grad.abs().max().clamp(min=1e-2 * largest)
            assert (one.grad - other.grad).abs().max() <= gradient_tolerance * size, name


def test_soft_capped_scores_agree_with_eager_attention():
    packed, eager = (tiny_model("gemma2", attn_logit_softcapping=2.0).eval() for _ in range(2))
    eager.set_attn_implementation("eager")
    use_packed_attention(packed)
    segments = SHAPES["plain"]
    ids = torch.randint(3, 60, (1, segments.total))
    found = packed_logits(packed, ids, segments)
    expected = torch.cat([alone(eager, ids, segments, number) for number in range(len(segments.rows))])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    padded = packed(input_ids=ids[:, :5], attention_mask=torch.ones(1, 5, dtype=torch.int64)).logits
    torch.testing.assert_close(padded, eager(input_ids=ids[:, :5]).logits, rtol=1e-4, atol=1e-5)


def test_sliding_windows_shorter_than_a_segment_are_kept():
    packed, plain = (tiny_model("mistral", dtype=torch.float64, sliding_window=4).eval() for _ in range(2))
    plain.set_attn_implementation("sdpa")
    use_packed_attention(packed)
    segments = Segments.from_prefix_groups([(6, [5, 3]), (9, [])])
    ids = torch.randint(3, 60, (1, segments.total))
    found = packed_logits(packed, ids, segments)
    expected = torch.cat([alone(plain, ids, segments, number) for number in range(len(segments.rows))])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_window_that_only_the_mask_knows_is_kept():
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}
    packed, plain = (tiny_model("qwen2_moe", **window).eval() for _ in range(2))
    plain.set_attn_implementation("sdpa")
    use_packed_attention(packed)
    segments = Segments.from_lengths([9, 4, 5])
    ids = torch.randint(3, 60, (1, segments.total), generator=torch.Generator().manual_seed(0))
    expected = torch.cat([alone(plain, ids, segments, number) for number in range(3)])
    torch.testing.assert_close(packed_logits(packed, ids, segments), expected, rtol=1e-4, atol=1e-4)


def test_without_a_table_it_is_sdpa_also_while_generating():
    packed, plain = (tiny_model("llama").eval() for _ in range(2))
    use_packed_attention(packed)
    ids = torch.randint(3, 60, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    one, other = (m(input_ids=ids, attention_mask=mask).logits[mask.bool()] for m in (packed, plain))
    assert torch.equal(one, other)
    settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(packed.generate(ids, **settings), plain.generate(ids, **settings))


def test_gradient_checkpointing_runs_a_layer_again_over_the_same_segments():
    grads = []
    for checkpointing in (False, True):
        model = tiny_model("llama", dtype=torch.float64).train()
        use_packed_attention(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        segments = SHAPES["prefix group"]
        torch.manual_seed(1)
        ids = torch.randint(3, 60, (1, segments.total))
        packed_logits(model, ids, segments).square().sum().backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("copies", [{"layer_replication": [[0, 2], [1, 2]]}, {"modules_to_save": ["self_attn"]}])
def test_layers_that_peft_copied_take_packed_rows(copies):
    """A copied layer has a copy of the config, and so its own attention implementation."""
    model = tiny_model("llama", dtype=torch.float64)
    given = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **copies)
    model = get_peft_model(model, given).double()
    ids = torch.tensor([[5, 9, 3, 7, 7, 8], [4, 6, 2, 0, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.where(ids == 0, -100, ids)}
    expected = Scorer(model, packed=False).score(model, batch).logps
    packed = Scorer(model)
    assert packed.packed
    torch.testing.assert_close(packed.score(model, batch).logps, expected, rtol=1e-12, atol=1e-12)


def test_flash_attention_chosen_by_the_user_stays():
    model = tiny_model("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    assert packed_unsupported(model) is None
    assert use_packed_attention(model) is False
    assert model.config._attn_implementation == "flash_attention_2"


def test_the_function_alone_on_hand_worked_values():
    # Two tokens of one sequence, then one alone: with equal keys, attention averages what it sees.
    query = key = torch.zeros(1, 1, 3, 2)
    value = torch.tensor([[[[1.0, 0.0], [3.0, 0.0], [8.0, 4.0]]]])
    table = Segments.from_lengths([2, 1]).table
    output, _ = packed_attention(torch.nn.Module(), query, key, value, table)
    assert output[0, :, 0].tolist() == [[1.0, 0.0], [2.0, 0.0], [8.0, 4.0]]


def test_sequences_of_equal_lengths_share_a_call(monkeypatch):
    kernel, calls = torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, key, *rest, **options):
        calls.append((*query.shape[::2], key.shape[2]))
        return kernel(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    segments = Segments.from_prefix_groups([(4, []), (5, [3, 2, 1, 2]), (4, [])])
    row = torch.randn(1, 2, segments.total, 4)
    packed_attention(torch.nn.Module(), row, row, row, segments.table)
    # Sequences, queries and keys: two plain ones, the prompt with its first branch, two branches, the last.
    assert calls == [(2, 4, 4), (1, 8, 8), (2, 2, 7), (1, 1, 6)]


def test_sinks_and_chunks_on_hand_worked_values():
    """With equal keys attention averages what it sees: a sink of score 0 is one more value of 0. Values have size 1."""
    query = key = torch.zeros(1, 2, 5, 4)
    value = torch.tensor([2.0, 4.0, 6.0, 8.0, 9.0]).view(1, 1, 5, 1).expand(1, 2, 5, 1)
    table = Segments.from_lengths([4, 1]).table
    sinks = torch.tensor([0.0, math.log(3)])
    output, _ = packed_attention(torch.nn.Module(), query, key, value, table, s_aux=sinks)
    expected = torch.tensor([[2 / 2, 2 / 4], [6 / 3, 6 / 5], [12 / 4, 12 / 6], [20 / 5, 20 / 7], [9 / 2, 9 / 4]])
    torch.testing.assert_close(output[0, ..., 0], expected)
    padded, _ = packed_attention(torch.nn.Module(), query[:, :, :4], key[:, :, :4], value[:, :, :4], None, s_aux=sinks)
    torch.testing.assert_close(padded[0, ..., 0], expected[:4])
    layer = torch.nn.Module()
    layer.config = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=3)
    layer.layer_idx = 0
    output, _ = packed_attention(layer, query, key, value, table)
    torch.testing.assert_close(output[0, :, 0, 0], torch.tensor([2.0, 3.0, 4.0, 8.0, 9.0]))
