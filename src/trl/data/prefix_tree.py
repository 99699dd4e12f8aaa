"""A tree of sequences by what they begin with: a search costs the length of a sequence, however many there are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from trl.data.formats import common_prefix_length

Value = TypeVar("Value")


@dataclass(eq=False, repr=False, slots=True)
class Node(Generic[Value]):
    """A sequence of `depth` items, of which `items` are not its parent's, and what is kept under it (None: nothing)."""

    items: Any
    depth: int = 0
    parent: "Node[Value] | None" = None
    children: "dict[object, Node[Value]]" = field(default_factory=dict)
    value: Value | None = None


class PrefixTree(Generic[Value]):
    """Values under sequences of one type, such as tuples of token ids or texts.

    >>> tree = PrefixTree[str]()
    >>> node = tree.add("abc", "first")
    >>> tree.longest("abcd"), tree.shared("abx")[1]
    ('first', 2)
    """

    def __init__(self) -> None:
        self.root = Node[Value](None)

    def shared(self, items: Sequence) -> tuple[Node[Value], int]:
        """The node at which a sequence leaves the tree, perhaps among its items, and how many items are in the tree."""
        node, length = self.root, 0
        while length == node.depth and length < len(items):
            if (child := node.children.get(items[length])) is None:
                break
            length += common_prefix_length(child.items, items[length : child.depth])
            node = child
        return node, length

    def longest(self, items: Sequence) -> Value | None:
        """The value under the longest sequence that these items begin with."""
        node, length = self.shared(items)
        while node.parent is not None and (node.depth > length or node.value is None):
            node = node.parent
        return node.value

    def add(self, items: Sequence, value: Value) -> Node[Value]:
        """Keep a value under a sequence, unless it has one; its node."""
        node, length = self.shared(items)
        if (more := node.depth - length) and (parent := node.parent) is not None:
            upper = Node(node.items[:-more], length, parent)
            node.items, node.parent = node.items[-more:], upper
            parent.children[upper.items[0]], upper.children[node.items[0]] = upper, node
            node = upper
        if length < len(items):
            node.children[items[length]] = node = Node(items[length:], len(items), node)
        node.value = value if node.value is None else node.value
        return node

    def remove(self, node: Node[Value]) -> None:
        """Forget the value of a node, and what only it needed."""
        node.value = None
        while (parent := node.parent) is not None and node.value is None and not node.children:
            del parent.children[node.items[0]]
            node = parent
        if parent is not None and node.value is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.items, child.parent = node.items + child.items, parent
            parent.children[child.items[0]] = child
