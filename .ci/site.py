"""Builds the site: API pages from docstrings, the pages by Zensical, each page as Markdown beside it, and llms.txt."""

import argparse
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl._names import places

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE, CONFIG = ROOT / "docs", ROOT / "site", ROOT / ".site.toml"
METHOD = re.compile(r"trl\.(?:trainer|experimental)\.(?!callbacks)(\w+?)(?:_config|_trainer)?(?:\.|:)")
AREAS = {
    "data": "Data sets",
    "collators": "Collators",
    "models": "Models",
    "options": "Models",
    "rewards": "Rewards and judges",
    "rollouts": "Agents and sampling",
    "agents": "Agents and sampling",
    "trainer": "Callbacks",
    "scripts": "Scripts",
}
PATHS = (
    "trl",
    "trl.rewards",
    "trl.experimental.agents",
    *(f"trl.experimental.{path.parent.name}" for path in ROOT.glob("src/trl/experimental/*/__init__.py")),
)


def public_names() -> dict[str, list[tuple[str, str]]]:
    """Title of an API page -> the (import path, name) on it, each object once."""
    pages: dict[str, list[tuple[str, str]]] = {}
    homes: set[str] = set()
    for path in PATHS:
        for name, home in places(path).items():
            if home in homes or not home.startswith("trl."):
                continue
            homes.add(home)
            method = METHOD.match(home)
            title = method.group(1) if method else AREAS[home.split(".")[1]]
            pages.setdefault(title, []).append((path, name))
    trainers = {title: re.sub(r"(Trainer|Config|Callback)$", "", names[0][1]) for title, names in pages.items()}
    titled = {title if title in AREAS.values() else trainers[title]: names for title, names in pages.items()}
    return {
        title: titled[title] for title in sorted(titled, key=lambda title: (title in AREAS.values(), title.lower()))
    }


def markdown(docstring: str) -> Iterator[str]:
    """Lines of Markdown of a docstring: arguments become a list, examples become code."""
    in_list = in_code = False
    for line in inspect.cleandoc(docstring).splitlines():
        text = line.strip()
        heading = re.fullmatch(r"(Args|Parameters|Attributes|Returns|Raises|Example|Examples):", line)
        if in_code and not text:
            yield "```"
            in_code = False
        if heading:
            in_list = heading.group(1) in ("Args", "Parameters", "Attributes")
            yield from ("", f"**{heading.group(1)}**", "")
        elif text.startswith(">>>") and not in_code:
            in_code = True
            yield from ("", "```pycon", re.sub(r"  # doctest:.*", "", text))
        elif in_code:
            yield re.sub(r"  # doctest:.*", "", line[4:] if line.startswith("    ") else line)
        elif in_list and (entry := re.fullmatch(r"    (\*{0,2}\w[\w, *]*?)( \(.*\))?:(.*)", line)):
            yield f"- **{entry.group(1)}**{entry.group(2) or ''}:{entry.group(3)}"
        elif in_list and line.startswith("    "):
            yield f"    {text}"
        else:
            in_list = in_list and not text
            yield text.replace("<", "&lt;") if "`" not in text else text
    if in_code:
        yield "```"


def signature(name: str, thing: Any) -> str:
    """The call as code: one line, or one parameter a line; a config's fields stand in its docstring."""
    if hasattr(thing, "__dataclass_fields__"):
        return f"{name}(...)"
    try:
        parameters = [
            str(parameter.replace(annotation=inspect.Parameter.empty))
            for parameter in inspect.signature(thing).parameters.values()
            if parameter.name != "self"
        ]
    except (TypeError, ValueError):
        return name
    one_line = f"{name}({', '.join(parameters)})"
    return one_line if len(one_line) <= 90 else f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"


def entry(path: str, name: str) -> Iterator[str]:
    """Heading, import, signature and docstring of one public name, then those of its own methods."""
    thing = getattr(importlib.import_module(path), name)
    yield from (f"## {name}", "", "```python", f"from {path} import {name}", "")
    if not callable(thing):
        yield from (f"{name} = {thing!r}"[:1000], "```", "")
        return
    yield from (signature(name, thing), "```", "", *markdown(inspect.getdoc(thing) or ""), "")
    if inspect.isclass(thing):
        for member, function in vars(thing).items():
            if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield from (f"### {name}.{member}", "", "```python", signature(member, function), "```", "")
                yield from (*markdown(function.__doc__), "")


def write_api() -> dict[str, str]:
    """Write the API pages; their titles by file."""
    folder = DOCS / "api"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    titles: dict[str, str] = {}
    contents = ["# API", "", "Every public class and function, from its docstring.", ""]
    for title, names in public_names().items():
        file = re.sub(r"\W+", "_", title.lower()) + ".md"
        names.sort(key=lambda place: place[1].endswith("Config"))
        lines = [line for path, name in names for line in entry(path, name)]
        summary = ", ".join(f"`{name}`" for _, name in names)
        text = "\n".join([f"# API: {title}", "", f"{summary}.", "", *lines])
        (folder / file).write_text(text + "\n", encoding="utf-8")
        titles[f"api/{file}"] = title
        contents.append(f"- [{title}]({file}): {summary}")
    (folder / "index.md").write_text("\n".join(contents) + "\n", encoding="utf-8")
    return titles


def write_config(api: dict[str, str]) -> list[Any]:
    """Write the configuration with the API pages in its navigation; that navigation."""
    pages = "".join(f'        {{ "{title}" = "{file}" }},\n' for file, title in api.items())
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    text = text.replace('"api/index.md",\n', '"api/index.md",\n' + pages)
    CONFIG.write_text(text, encoding="utf-8")
    return tomllib.loads(text)["project"]["nav"]


def pages_of(nav: list[Any], section: str = "") -> Iterator[tuple[str, str]]:
    """The (section, file) of every page in the navigation."""
    for item in nav:
        for title, value in item.items() if isinstance(item, dict) else [("", item)]:
            yield from pages_of(value, title) if isinstance(value, list) else [(section, value)]


def write_text(pages: list[tuple[str, str]]) -> None:
    """Each page as Markdown in the site, and llms.txt: title and first sentence of each, with its address."""
    lines = ["# trl", "", "> Post-train transformer language models. Each page below is Markdown."]
    for section, file in pages:
        text = (DOCS / file).read_text(encoding="utf-8")
        (SITE / file).write_text(text, encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        paragraph = re.search(r"^(?:\w|`(?!``)).*(?:\n.+)*", text, flags=re.MULTILINE)
        sentence = re.split(r"(?<=[.:])\s", " ".join(paragraph[0].split()))[0] if paragraph else ""
        if f"## {section}" not in lines and section:
            lines.extend(["", f"## {section}", ""])
        lines.append(f"- [{title}]({file}): {sentence}")
    (SITE / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="show the site, and build changed pages again")
    serve = parser.parse_args().serve
    pages = list(pages_of(write_config(write_api())))
    unlisted = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {file for _, file in pages}
    if unlisted:
        print(f"error: add to nav in zensical.toml: {', '.join(sorted(unlisted))}", file=sys.stderr)
        return 1
    zensical = [sys.executable, "-m", "zensical"]
    if serve:
        return subprocess.call([*zensical, "serve", "--config-file", str(CONFIG)])
    shutil.rmtree(SITE, ignore_errors=True)
    status = subprocess.call([*zensical, "build", "--clean", "--strict", "--config-file", str(CONFIG)])
    if status == 0:
        write_text(pages)
    return status


if __name__ == "__main__":
    sys.exit(main())
