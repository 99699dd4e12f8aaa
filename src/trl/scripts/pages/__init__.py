"""Pages of HTML that need no network: their common style, and the page of `trl report`."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader
from jinja2.utils import htmlsafe_json_dumps

# JSON for a script element, which no text in it can end.
embedded = partial(htmlsafe_json_dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
    return environment.get_template(template).render(**values)
