"""Kept keys and values: what is found, what leaves, and that neither costs more with their number."""

import random

import torch

from tests.data.test_prefix_tree import compared
from trl.generation.transformers import reuse
from trl.generation.transformers.reuse import Reuse


def layers(ids):
    """Keys and values that say which tokens they are of: 8 bytes each."""
    row = torch.tensor(ids).float().view(1, -1, 1)
    return {0: (row, row)}


def held(found):
    return None if found is None else found.layers[0][0].flatten().tolist()


def test_the_longest_beginning_is_found():
    own = Reuse(1 << 20)
    first = list(range(20))
    own.keep(first, layers(first))
    branch = [*first[:12], 99, 98]
    own.keep(branch, layers(branch))
    assert held(own.longest([*first, 5])) == first and held(own.longest([*branch, 5])) == branch
    assert held(own.longest([*first[:12], 7, 7])) == first[:12]
    assert held(own.longest(first)) == first[:-1]  # without its last token
    assert own.longest([*first[:7], 50, 51]) is None and own.longest([50] * 20) is None


def test_what_continues_another_one_takes_its_place():
    own, ids = Reuse(1 << 20), list(range(30))
    for length in (10, 20, 15, 30, 30):
        own.keep(ids[:length], layers(ids[:length]))
    assert own.used == 30 * 8 and held(own.longest([*ids, 1])) == ids


def test_the_least_recently_used_leave(monkeypatch):
    own, rows = Reuse(3 * 80), [[number, *range(9)] for number in range(5)]
    for ids in rows[:3]:
        own.keep(ids, layers(ids))
    own.longest([*rows[0], 1])
    own.keep(rows[3], layers(rows[3]))
    assert [own.longest([*ids, 1]) is not None for ids in rows] == [True, False, True, True, False]
    monkeypatch.setattr(reuse, "_MOST", 2)
    own.keep(rows[4], layers(rows[4]))
    assert [own.longest([*ids, 1]) is not None for ids in rows] == [False, False, False, True, True]
    own.keep(many := list(range(100, 200)), layers(many))  # more than the memory: nothing is left
    assert own.used == 0 and not own._tree.root.children


def test_a_request_costs_the_same_after_five_thousand(monkeypatch):
    """Prompts with a common beginning; beyond 4,096 of them the first leave."""
    own, draw, count, costs = Reuse(1 << 30), random.Random(0), compared(monkeypatch), []
    for _ in range(5000):
        ids = [*range(100), *draw.choices(range(1000), k=50)]
        before = count[0]
        own.longest(ids)
        own.keep(ids, layers(ids))
        costs.append(count[0] - before)
    assert len(own._kept) == reuse._MOST
    assert sum(costs[-1000:]) <= 1.1 * sum(costs[1000:2000])
