"""Pages of HTML that need no network: their common style, and the pages of `trl inspect` and `trl report`."""

from functools import partial

from jinja2 import Environment, PackageLoader
from jinja2.utils import htmlsafe_json_dumps

# JSON for a script element, which no text in it can end.
embedded = partial(htmlsafe_json_dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def render(template: str, **values: object) -> str:
    """A page from a template, which extends `base.html`. Values are text in it, never markup."""
    environment = Environment(loader=PackageLoader(__name__, ""), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(template).render(**values)
