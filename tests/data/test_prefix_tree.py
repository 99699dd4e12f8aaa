"""The tree of sequences against a search over all of them, and its cost."""

import random

import pytest

from trl.data import prefix_tree
from trl.data.formats import common_prefix_length
from trl.data.prefix_tree import PrefixTree


@pytest.mark.parametrize("kind", [tuple, list, "".join])
def test_it_holds_what_a_list_of_sequences_would(kind):
    """2,000 random sequences of two items come, and leave in another order."""
    draw, tree, nodes = random.Random(0), PrefixTree(), {}
    for number in range(2000):
        items = kind(draw.choices("ab", k=draw.randint(1, 9)))
        if str(items) in nodes and draw.random() < 0.5:
            tree.remove(nodes.pop(str(items))[1])
        elif str(items) not in nodes:
            nodes[str(items)] = items, tree.add(items, number), number
        wanted = kind(draw.choices("ab", k=draw.randint(0, 12)))
        known = [held for held, _, _ in nodes.values()]
        assert tree.shared(wanted)[1] == max((common_prefix_length(held, wanted) for held in known), default=0)
        begun = [each for each in nodes.values() if wanted[: len(each[0])] == each[0]]
        longest = max(begun, key=lambda each: len(each[0]), default=(None, None, None))
        assert tree.longest(wanted) == longest[2]
    for _, node, _ in nodes.values():
        tree.remove(node)
    assert not tree.root.children


def test_an_earlier_value_stays():
    tree = PrefixTree()
    assert tree.add("ab", 1) is tree.add("ab", 2) and tree.longest("abc") == 1


def compared(monkeypatch):
    """A count of the items that are compared from now on."""
    count = [0]

    def counting(left, right):
        count[0] += min(len(left), len(right))
        return common_prefix_length(left, right)

    monkeypatch.setattr(prefix_tree, "common_prefix_length", counting)
    return count


def test_a_search_costs_the_length_of_its_sequence(monkeypatch):
    draw, tree, count, costs = random.Random(0), PrefixTree(), compared(monkeypatch), []
    for number in range(5000):
        items = tuple([1] * 20 + draw.choices(range(1000), k=20))
        before = count[0]
        tree.shared(items)
        costs.append(count[0] - before)
        tree.add(items, number)
    assert max(costs) <= 40
