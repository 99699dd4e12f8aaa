"""The index of papers: complete, and each setting that it names changes the loss."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from trl import CPOConfig, DPOConfig, GRPOConfig
from trl.objectives.group_policy import LOSS_TYPES, GroupOptions
from trl.objectives.pairs import PairScores
from trl.objectives.preference import PAIR_LOSSES, cpo_terms, preference_terms

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "papers.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
SCORES = PairScores(*(torch.tensor(values) for values in ([-4.0, -7], [-6.0, -4], [-5.0, -6], [-5.5, -5])))
OUTSIDE = {"use_weighting", "ld_alpha", "rpo_alpha", "sync_ref_model"}  # not in the loss of given log-probs


def built(entry: str) -> list[object]:
    """What the entry's block builds."""
    (block,) = re.findall(r"^```python\n(.*?)^```", entry, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(block, names)
    names.pop("__builtins__")
    return list(names.values())


def changed(config: object) -> set[str]:
    default = type(config)("runs/papers")  # type: ignore[call-arg]
    return {
        item.name
        for item in dataclasses.fields(config)  # type: ignore[arg-type]
        if getattr(config, item.name) != getattr(default, item.name) and item.name != "logging_dir"
    }


def pair_loss(args: DPOConfig) -> torch.Tensor:
    return preference_terms(SCORES, args.loss_type, args.pair_options(), loss_weights=args.loss_weights).values


def test_the_papers_of_the_source_are_on_the_page():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "trl").rglob("*.py")]
    named = {paper for text in texts for paper in re.findall(r"arXiv:(\d{4}\.\d{5})", text)}
    assert len(named) > 70
    assert named - set(re.findall(r"\d{4}\.\d{5}", PAGE)) == set()


def test_the_losses_are_on_the_page():
    assert {
        name for name in (*PAIR_LOSSES, *LOSS_TYPES) if f'"{name}"' not in PAGE and f"`{name}`" not in PAGE
    } == set()


@pytest.mark.parametrize("title", ENTRIES)
def test_an_entry_has_a_link_three_sentences_and_a_setting(title):
    link, text = re.split(r"\n\n", ENTRIES[title].strip())[:2]
    assert "](http" in link
    assert len(re.findall(r"\.(?:\s|$)", text)) in (3, 4)
    assert built(ENTRIES[title])


@pytest.mark.parametrize("title", [title for title in ENTRIES if "import DPOConfig" in ENTRIES[title]])
def test_settings_of_dpo_give_another_loss(title):
    args = next(item for item in built(ENTRIES[title]) if isinstance(item, DPOConfig))
    if title == "Direct Preference Optimization":
        assert changed(args) == set()
    elif not changed(args) & OUTSIDE:
        difference = pair_loss(args) - pair_loss(DPOConfig("runs/papers"))
        assert difference.abs().max() > 1e-3, args.loss_type


@pytest.mark.parametrize("title", [title for title in ENTRIES if "import CPOConfig" in ENTRIES[title]])
def test_settings_of_cpo_give_another_loss(title):
    args = next(item for item in built(ENTRIES[title]) if isinstance(item, CPOConfig))
    losses = [
        cpo_terms(SCORES, config.loss_type, config.options()).values for config in (args, CPOConfig("runs/papers"))
    ]
    different = (losses[0] - losses[1]).abs().max() > 1e-3
    assert different == (title != "Contrastive Preference Optimization (CPO)")


RATIOS, ADVANTAGES = (
    torch.tensor([0.5, 0.9, 1.1, 1.3, 6.0]).repeat(2),
    torch.tensor([1.0, -1.0]).repeat_interleave(5),
)


def token_loss(options: GroupOptions) -> torch.Tensor:
    return LOSS_TYPES[options.loss_type].surrogate(RATIOS, RATIOS.log() - 1, ADVANTAGES, options)


@pytest.mark.parametrize("title", [title for title in ENTRIES if "import GRPOConfig" in ENTRIES[title]])
def test_settings_of_grpo_give_another_loss_or_another_mean(title):
    """Of a token, or what the loss is a mean over; or a setting outside of the surrogate differs from the default."""
    args = next(item for item in built(ENTRIES[title]) if isinstance(item, GRPOConfig))
    options, default = args.group_options(), GRPOConfig("runs/papers").group_options()
    surrogate = {"loss_type", "epsilon", "epsilon_high", "delta"} | {
        name for name in changed(args) if name.startswith(("sapo", "vespo"))
    }
    if changed(args) <= surrogate and changed(args):
        same_mean = LOSS_TYPES[options.loss_type].over == LOSS_TYPES[default.loss_type].over
        assert (token_loss(options) - token_loss(default)).abs().max() > 1e-3 or not same_mean
