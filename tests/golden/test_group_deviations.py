"""What the recorded runs of GRPO and RLOO that ours differ from did instead: told from their numbers, which then are ours.

`deviations.toml` lists the cases. Here each is run with the rows, or divided by the number, that the reference used.
"""

import itertools

import pytest
import torch

from tests.golden import runs
from trl.objectives.group_advantages import group_relative, leave_one_out
from trl.objectives.group_policy import GroupOptions, divisor_share, group_policy_loss, sequence_policy_loss
from trl.objectives.group_ratios import GroupTokens
from trl.tensors.reduce import reduce_terms

FIRST_BATCH = (0, 0, 0, 0, 1, 1, 1, 1)  # prompts of its rows


@pytest.fixture
def assets():
    return runs.Assets()


@pytest.fixture(scope="module")
def cases():
    return runs.cases_of("trainers")


def rerun(assets, case, **changes):
    """A recorded case under other settings: its log, one dict per step."""
    return runs.run_trainer({**case, "kwargs": {**case["kwargs"], **changes}}, assets)["steps"]


def assert_recorded(steps, recorded, leave_out=()):
    assert len(steps) == len(recorded)
    for ours, theirs in zip(steps, recorded, strict=True):
        for name in set(theirs) - set(leave_out):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=2e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo/iter2", "rloo/mask_truncated"])
def test_with_two_iterations_recorded_rloo_completes_every_prompt_twice(assets, cases, monkeypatch, name):
    """Ours, with one iteration over prompts that each come in two batches, gives every recorded number."""
    rows, repeated = assets.rows, [0, 1, 0, 1, 2, 3, 2, 3]

    def twice(name, count=None):
        return rows(name) if count is None else [rows(name)[row] for row in repeated]

    monkeypatch.setattr(assets, "rows", twice)
    steps = rerun(assets, cases[name], num_iterations=1)
    assert_recorded(steps, cases[name]["result"]["steps"], leave_out=("epoch",))


@pytest.mark.slow
def test_of_long_prompts_recorded_rloo_keeps_the_beginning(assets, cases, monkeypatch):
    """As the truncation side of its tokenizer says. Ours keeps the end; given the first six tokens, it gives the numbers."""
    make, case = runs.make_rollout, cases["rloo/max_prompt_length"]

    def cut(rollout, **settings):
        def first_tokens(prompt):
            ids, *rest = rollout(prompt)
            return ids[:6], *rest

        return make(first_tokens, **settings)

    monkeypatch.setattr(runs, "make_rollout", cut)
    assert_recorded(rerun(assets, case), case["result"]["steps"])


def scored_rows(assets, first):
    """The rows of the first two prompts, with completions from number `first` on: ids, and the model that scores them."""
    tokenizer, script = assets.tokenizer("tok"), assets.scripts("prompt_text")
    prompts = [row["prompt"] for row in assets.rows("prompt_text", 2)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    return [(ids[prompt], script[prompt][first + number % 4]) for number, prompt in enumerate(FIRST_BATCH)]


def scores(model, prompt, completion):
    """Log-probs and entropies of a completion's tokens."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].double()
    logps = logits.log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return logps.gather(1, torch.tensor(completion)[:, None])[:, 0], entropies.detach()


def group_tokens(logps, advantages):
    """Tokens of rows whose log-probs are given, at the first step."""
    lengths = torch.tensor([len(row) for row in logps])
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    flat = torch.cat(logps)
    return flat, GroupTokens(flat.detach(), advantages[sequence], torch.ones_like(flat), sequence, len(logps))


def gradient_norm(loss, model):
    parameters = [value for value in model.parameters() if value.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    return float(torch.cat([value.double().flatten() for value in gradients]).norm())


def test_recorded_dapo_divides_a_half_of_its_completions_by_all_of_their_tokens(assets, cases):
    """grpo/steps_per_generation_2: its first step learns from rows 2, 3, 4 and 6, the only four of eight with its entropy,
    which have 27 of 65 tokens, and divides by 65, so that two steps are as large as one. Ours divides by a half, 32.5, and
    its loss and gradient are twice as large."""
    recorded, rows = cases["grpo/steps_per_generation_2"]["result"]["steps"], scored_rows(assets, 0)
    model = assets.model("causal", "lm").eval()
    rewards = torch.tensor(runs.ids_mod(None, None, [row[1] for row in rows]), dtype=torch.float64)
    advantages, found = group_relative(rewards, 4), [scores(model, *row) for row in rows]

    def entropy(chosen):
        return float(torch.cat([found[row][1] for row in chosen]).mean())

    fitting = [
        chosen
        for chosen in itertools.combinations(range(8), 4)
        if entropy(chosen) == pytest.approx(recorded[0]["entropy"], abs=3e-6)
    ]
    assert fitting == [(2, 3, 4, 6)]
    chosen = list(fitting[0])
    logps, tokens = group_tokens([found[row][0] for row in chosen], advantages[chosen])
    assert (len(logps), sum(len(row[1]) for row in rows)) == (27, 65)
    share = divisor_share("dapo", tokens.mask, 4, rollout_tokens=65 / 8)
    assert float(share) == 32.5
    loss = reduce_terms(group_policy_loss(logps, tokens, GroupOptions("dapo")), share)
    assert float(loss.detach()) / 2 == pytest.approx(recorded[0]["loss_exact"], abs=1e-6)
    assert gradient_norm(loss, model) / 2 == pytest.approx(recorded[0]["grad_norm"], abs=1e-5)


def test_recorded_micro_batches_count_the_same_however_many_tokens_they_have(assets, cases):
    """grpo/accumulate_*: two micro-batches of 27 and 38 tokens (rows 2, 3, 4, 6 and the others). Entropies, and bnpo's losses, are
    means of the two means; ours are over the 65 tokens."""
    rows, model = scored_rows(assets, 0), assets.model("causal", "lm").eval()
    rewards = torch.tensor(runs.ids_mod(None, None, [row[1] for row in rows]), dtype=torch.float64)
    advantages, found = group_relative(rewards, 4), [scores(model, *row) for row in rows]
    losses, entropies = [], []
    for chosen in ([2, 3, 4, 6], [0, 1, 5, 7]):
        logps, tokens = group_tokens([found[row][0] for row in chosen], advantages[chosen])
        own = group_policy_loss(logps, tokens, GroupOptions("bnpo"))
        losses.append(reduce_terms(own, torch.tensor(2 * len(logps))))
        entropies.append(torch.cat([found[row][1] for row in chosen]).mean())
    for case in ("bnpo", "dapo", "grpo"):
        recorded = cases[f"grpo/accumulate_{case}"]["result"]["steps"][0]["entropy"]
        assert float(torch.stack(entropies).mean()) == pytest.approx(recorded, abs=1e-6)
    recorded = cases["grpo/accumulate_bnpo"]["result"]["steps"]
    loss = torch.stack(losses).sum()
    assert float(loss.detach()) == pytest.approx(recorded[0]["loss_exact"], abs=1e-6)
    assert gradient_norm(loss, model) == pytest.approx(recorded[0]["grad_norm"], abs=1e-5)


@pytest.mark.slow
def test_the_recorded_evaluation_counts_one_of_two_batches_half(assets, cases):
    """grpo/eval: 16 completions of 4 prompts in two batches of 8. Metrics are means of the batches' means. The loss counts
    one of the two half as much as the other, as if four of its eight were dropped as repeated rows. Ours are over all tokens."""
    recorded = cases["grpo/eval"]["result"]["eval"]
    ours = runs.run_trainer(cases["grpo/eval"], assets)["eval"]
    script, last = assets.scripts("prompt_text"), len(assets.rows("prompt_text"))
    completions = [script[row][number] for row in range(last - 4, last) for number in range(4)]
    rewards = torch.tensor(runs.ids_mod(None, None, completions), dtype=torch.float64)
    lengths = torch.tensor([len(ids) for ids in completions], dtype=torch.float64)
    sums, tokens = (
        (-group_relative(rewards, 4) * lengths).view(2, 8).sum(dim=1),
        lengths.view(2, 8).sum(dim=1),
    )
    # The two batches' divergences, from their mean (recorded) and their mean by tokens (ours).
    total, by_tokens = 2 * recorded["eval_kl"], ours["eval_kl"] * float(tokens.sum())
    first = (by_tokens - float(tokens[1]) * total) / float(tokens[0] - tokens[1])
    losses = sums / tokens + 0.04 * torch.tensor([first, total - first])
    assert ours["eval_loss"] == pytest.approx(float((losses * tokens).sum() / tokens.sum()), abs=1e-6)
    half_counted = float(2 * losses[1] + losses[0]) / 3  # prompts come in another order: the second pair first
    assert recorded["eval_loss"] == pytest.approx(half_counted, abs=5e-6)


def test_recorded_rloo_completes_a_whole_batch_for_every_micro_batch(assets, cases):
    """rloo/accumulate: its first step learns from rows 2, 3, 4, 6 of one batch and 0, 1, 3, 6 of a second, of the same prompts,
    of which it counts all 503 tokens; entropies are means of the micro-batches' means."""
    recorded = cases["rloo/accumulate"]["result"]["steps"]
    assert recorded[0]["num_tokens"] == 503 == cases["rloo/iter2"]["result"]["steps"][1]["num_tokens"]
    model, losses, entropies = assets.model("causal", "lm").eval(), [], []
    for first, chosen in ((0, [2, 3, 4, 6]), (4, [0, 1, 3, 6])):
        rows = scored_rows(assets, first)
        rewards = runs.ids_mod(None, None, [row[1] for row in rows])
        advantages = leave_one_out(torch.tensor(rewards, dtype=torch.float64), 4)[chosen]
        found = [scores(model, *rows[row]) for row in chosen]
        logps, tokens = group_tokens([row[0] for row in found], advantages)
        losses.append(reduce_terms(sequence_policy_loss(logps, tokens, GroupOptions()), torch.tensor(8)))
        entropies.append(torch.cat([row[1] for row in found]).mean())
    assert float(torch.stack(entropies).mean()) == pytest.approx(recorded[0]["entropy"], abs=1e-6)
    assert gradient_norm(torch.stack(losses).sum(), model) == pytest.approx(recorded[0]["grad_norm"], abs=2e-5)
