"""Models whose rotary angles depend on a sequence's length say of each sequence of a batch what they say of it alone."""

import pytest
import torch
from torch.nn.functional import pad

from tests.tiny import tiny_model
from trl.collators.preference import completion_batch
from trl.models.scoring.causal import Scorer

LONGEST = 10  # of pretraining
STRETCHED = {
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "original_max_position_embeddings": LONGEST,
        },
        "original_max_position_embeddings": LONGEST, "max_position_embeddings": 64,
    },
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": LONGEST,
    },
}  # fmt: skip
LENGTHS = (4, 17, LONGEST, LONGEST + 1, 9, 14)


def stretched(architecture):
    return tiny_model(architecture, dtype=torch.float64, **STRETCHED[architecture])


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS]


def alone(architecture, ids):
    """By a model that has seen no other sequence."""
    with torch.no_grad():
        logits = stretched(architecture)(input_ids=ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def padded(rows):
    width = max(map(len, rows))
    mask = torch.stack([(torch.arange(width) < len(row)).long() for row in rows])
    ids = torch.stack([pad(row, (0, width - len(row))) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


@pytest.mark.parametrize("architecture", STRETCHED)
def test_a_sequence_is_scored_as_if_it_were_alone(architecture):
    """Beside longer ones, and after them, as "dynamic" angles would only grow; such models take padded rows."""
    scorer, rows = Scorer(stretched(architecture)), sequences()
    assert not scorer.packed and "rotary" in scorer.fallbacks[0]
    scorer.score(scorer.core, padded([torch.arange(3, 33)]))
    found = scorer.score(scorer.core, padded(rows)).logps.split([len(row) - 1 for row in rows])
    for logps, row in zip(found, rows, strict=True):
        assert (logps - alone(architecture, row)).abs().max() < 1e-12, len(row)


def test_completions_of_one_prompt_are_scored_as_if_they_were_alone():
    """The angles of a prompt depend on the length of what follows: shared prefixes become rows, each with its prompt."""
    scorer = Scorer(stretched("phi3"))
    assert not scorer.shares_prefixes and Scorer(tiny_model("phi3")).shares_prefixes
    prompt, short, long = (row.tolist() for row in sequences()[:3])
    batch = completion_batch([(prompt, [short, long * 2])], prefix_sharing=True)
    first, second = scorer.score(scorer.core, batch).logps.split([len(short), 2 * len(long)])
    for logps, completion in ((first, short), (second, long * 2)):
        expected = alone("phi3", torch.tensor([*prompt, *completion]))[len(prompt) - 1 :]
        assert (logps - expected).abs().max() < 1e-12
