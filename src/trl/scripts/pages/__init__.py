"""Pages of HTML that need no network: their common style, and the page of `trl report`."""

import json

from jinja2 import ChoiceLoader, Environment, PackageLoader


def render(package: str, template: str, **values: object) -> str:
    """A page from a template of a package, which may extend `base.html`. What values say is text in it, never markup."""
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
