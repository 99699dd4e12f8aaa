"""Pages of HTML that need no network: their common style, and the page of `trl report`."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader


class Bar(NamedTuple):
    """A bar of a histogram: its height in percent of the highest, and what it counts."""

    height: float
    title: str


def bars(counts: Sequence[int], edges: Sequence[float], unit: str, *, is_whole: bool = False) -> list[Bar]:
    """The bars of a histogram; of whole numbers the last of a bar is 1 below its edge."""
    return [
        Bar(100 * count / max(counts), f"{first:.5g} to {last - is_whole:.5g} {unit}: {count}")
        for count, first, last in zip(counts, edges[:-1], edges[1:], strict=True)
    ]


def render(package: str, template: str, **values: object) -> str:
    """A page from a template of a package, which may extend `base.html`. Values are text in it, never markup."""
    loader = ChoiceLoader([PackageLoader(package, "."), PackageLoader(__name__, ".")])
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["embedded"] = embedded
    return environment.get_template(template).render(**values)


def embedded(data: object) -> str:
    r"""JSON for a script element, which no text in it can end.

    >>> print(embedded(["</script>"]))
    ["\u003c/script\u003e"]
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
