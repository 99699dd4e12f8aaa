"""The documents keep up with the code: links lead somewhere, commands and examples run, and what they name exists."""

import ast
import contextlib
import functools
import importlib
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from examples import small_model

from tests.two_processes import end_with, launch
from trl.cli.launch import make_plan
from trl.cli.main import COMMANDS
from trl.cli.main import main as trl_main
from trl.cli.slurm import take_cluster
from trl.objectives.group_advantages import ADVANTAGES
from trl.objectives.group_policy import LOSS_TYPES
from trl.scripts.config_file import ConfigFile, take_config_option
from trl.scripts.quickstart import make_parser as quickstart_parser
from trl.scripts.sft import make_parser as sft_parser
from trl.scripts.vllm_serve import make_parser as serve_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent.name != "api"]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
OWN_FILE = re.compile(r"(?:tests|examples|benchmarks|docs)/[\w./-]+")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    fenced = rf"^```{language}\n(.*?)^```"
    return re.findall(fenced, path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[list[str]]:
    """Shell commands of indented and fenced blocks, and those that stand whole in backticks, as words."""
    text = path.read_text(encoding="utf-8")
    inline = [span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text) if " -" in span]
    joined = re.sub(r"\\\n\s+", "", "\n".join([text, *inline]))
    starts = r"^(?: {4})?((?:[A-Z_]+=\S+ )*(?:trl|make|python) (?:[^`\n]*))$"
    found = [shlex.split(line, comments=True) for line in re.findall(starts, joined, flags=re.MULTILINE)]
    plain = [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in found]
    return [words for words in plain if not words[1].endswith(":")]  # what a command printed begins with its name


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors that a renderer makes of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_relative_links_lead_to_files_and_headings(path):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text(encoding="utf-8"))
    for link, anchor in links:
        target = (path.parent / link) if link else path
        assert target.exists(), link
        assert path not in PAGES or target.resolve().is_relative_to(ROOT / "docs"), f"{link} is not on the site"
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_examples_compile_and_import_what_exists(path):
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trl":
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_named_files_and_tests_exist(path):
    """What stands in backticks and begins with a folder of the repository: files, and `file::test`."""
    for named in re.findall(r"`([\w./:-]+)`", path.read_text(encoding="utf-8")):
        file, _, test = named.partition("::")
        if OWN_FILE.fullmatch(file):
            assert (ROOT / file).exists(), named
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), named


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_dotted_names_of_the_library_exist(path):
    for named in set(re.findall(r"`(trl(?:\.\w+)+)`", path.read_text(encoding="utf-8"))):
        module, rest = named, []
        while True:
            with contextlib.suppress(ImportError):
                found = importlib.import_module(module)
                break
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
        for name in rest:
            found = getattr(found, name)


def check_training_command(name: str, words: list[str]) -> None:
    parser = importlib.import_module(COMMANDS[name].module).make_parser()
    _, given = take_config_option([word for word in words if word != "--help"])
    parser.check_arguments(make_plan(parser, take_cluster(given, None)[1], None).script, None)


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_commands_name_what_exists(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, first, *rest in commands(path):
        if program == "make":
            assert first in targets, first
        elif program == "python":
            assert first == "-m" or (ROOT / first).exists(), first
        elif first in COMMANDS and COMMANDS[first].kind == "training" and rest:
            check_training_command(first, rest)
        elif first == "quickstart":
            quickstart_parser().parse_args(rest)
        elif first == "vllm-serve" and rest:
            serve_parser().parse_args_and_config(rest)
        else:
            assert first in (*COMMANDS, "--help", "--version", "..."), first


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path, "yaml")], ids=label)
def test_config_files_have_options_that_exist(path):
    """Those of the command that a file's first line names (`# grpo.yaml`), of `trl sft` otherwise."""
    for block in blocks(path, "yaml"):
        named = re.match(r"# (\w+)\.yaml", block)
        command = COMMANDS.get(named.group(1)) if named else None
        parser = importlib.import_module(command.module).make_parser() if command else sft_parser()
        values = yaml.safe_load(block)
        values.pop("env", None)
        plan = make_plan(parser, [], ConfigFile("sft.yaml", values, {}, {}))
        parser.check_arguments([], plan.config)


def test_commands_are_found():
    """The reader of commands sees those that are known to be there."""
    found = [words for path in DOCUMENTS for words in commands(path)]
    assert ["make", "quickstart"] in found
    assert sum(words[:2] == ["trl", "sft"] for words in found) >= 5
    assert any("--column_mapping" in words for words in found)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with the models that the pages make by `examples/small_model.py`, the examples, and nothing else."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "examples").symlink_to(ROOT / "examples")
    tokenizer = small_model.train_tokenizer(small_model.built_in(), vocabulary=4096)
    for seed, name in enumerate(["model", "student", "small"]):
        for part in (small_model.small_llama(tokenizer, seed=seed, layers=2, width=128), tokenizer):
            part.save_pretrained(folder / "runs" / name)
    return folder


def stretches(path: Path) -> dict[str, int]:
    """Lines under each heading (`heading, line`), without those of fenced blocks and tables."""
    counts, heading, is_code = {}, "", False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.startswith("#"):
            heading = f"{line}, {number}"
        elif not is_code and not line.startswith("|"):
            counts[heading] = counts.get(heading, 0) + 1
    return counts


@pytest.mark.parametrize("path", PAGES, ids=label)
def test_nothing_longer_than_a_screen_is_without_a_heading(path):
    assert {heading: lines for heading, lines in stretches(path).items() if lines > 45} == {}


@functools.cache
def source_strings() -> list[re.Pattern[str]]:
    """Every longer string of the library as a pattern; an inserted value may be anything, also `…`."""
    patterns = []
    for path in (ROOT / "src" / "trl").glob("**/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        inner = {id(part) for node in formatted for part in node.values}
        constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in inner]
        texts = [node.value for node in constants if isinstance(node.value, str)]
        texts += [  # %s stands for an inserted value, as in the texts of loggers
            "".join(str(part.value) if isinstance(part, ast.Constant) else "%s" for part in node.values)
            for node in formatted
        ]
        sentences = [part for text in texts for part in (text, *text.split(". ")[:1])]  # a page may quote the first
        fixed = [re.split(r"%[sdr]", text.strip()) for text in sentences]
        patterns += [".*".join(map(re.escape, parts)) for parts in fixed if len("".join(parts)) > 20]
    return [re.compile(pattern, re.DOTALL) for pattern in patterns]


def messages(path: Path) -> list[str]:
    """First cells of tables whose first column is `message`: what the library prints, with `…` for parts left out."""
    tables = re.findall(r"^\| message \|.*\n\|[-| ]+\n((?:\|.*\n)+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell for table in tables for cell in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if messages(path)], ids=label)
def test_quoted_messages_are_those_of_the_library(path):
    patterns = source_strings()
    assert [text for text in messages(path) if not any(pattern.search(text) for pattern in patterns)] == []


def test_pages_need_nothing_beside_the_clone():
    """No page, example, docstring or message names a folder outside of the repository."""
    files = [*DOCUMENTS, *ROOT.glob("examples/**/*.py"), *ROOT.glob("src/trl/**/*.py")]
    assert [label(path) for path in files if "../shared" in path.read_text(encoding="utf-8")] == []


def values_of(flags: tuple[str, ...], lines: list[list[str]]) -> set[str]:
    return {value for words in lines for flag, value in itertools.pairwise(words) if flag in flags}


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_what_commands_read_is_made_on_the_same_page(path):
    """By `trl data`, `examples/small_model.py`, an earlier command or block; the first example's models are made for every page."""
    written = {"runs/model", "runs/student"} | values_of(("--out", "--output_dir", "--output"), commands(path))
    text = path.read_text(encoding="utf-8")
    written |= set(re.findall(r'(?:Path|to_csv|to_json|to_parquet)\("([^"]+)"', text))
    read = values_of(("--dataset_name", "--model_name_or_path", "--teacher_model_name_or_path"), commands(path))
    assert {name for name in read if name.startswith("runs/")} <= written


OUTPUT = re.compile(r"""(?:--output_dir[ =]|output_dir="|output_dir: |Config\(\s*")([^"\s`)]+)""")


def test_examples_of_different_documents_write_to_different_folders():
    places: dict[str, set[str]] = {}
    for path in DOCUMENTS:
        for folder in OUTPUT.findall(path.read_text(encoding="utf-8")):
            places.setdefault(folder.rstrip("/"), set()).add(label(path))
    assert len(places) > 20
    assert {folder: paths for folder, paths in places.items() if len(paths) > 1} == {}


def defined_in(path: Path) -> set[str]:
    """Functions, and methods as `Class.method`, that a source file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    owners = [("", tree), *((f"{node.name}.", node) for node in classes)]
    return {prefix + node.name for prefix, owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)}


def test_the_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.(?:py|json)|/))`", text))
    assert len(named) > 80
    roots = (ROOT / "src" / "trl", ROOT / "src", ROOT)
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


def test_the_walks_name_functions_that_exist():
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    walks = text[text.index("## Three walks") : text.index("## Where to add things")]
    parts = [
        part for line in walks.splitlines() if line.startswith("|") for part in re.split("[;|]", line) if ".py`" in part
    ]
    assert len(parts) > 70
    for part in parts:
        file, *names = re.findall("`([^`]+)`", part)
        assert set(names) <= defined_in(ROOT / "src" / "trl" / file), part


def longer_commands(path: Path) -> list[list[str]]:
    """Commands that make data and train on it, which are not run as they are printed: indented ones, and all of
    start/ and reference/."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name in ("guides", "methods"):
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    joined = re.sub(r"\\\n\s+", "", text)
    lines = re.findall(r"^(?: {4})?((?:trl|python examples/scripts/\S+) .*--.*)$", joined, flags=re.MULTILINE)
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if any(word.startswith(("runs/data/", "runs/model")) for word in words)]


# Pages whose commands run too. A block with a title (```bash title="needs a GPU") needs more than the clone and is not run.
STORIES = [path for path in DOCUMENTS if path.parent.name == "guides" and blocks(path, "bash")]
PYTHON_PAGES = [path for path in DOCUMENTS if blocks(path, "python") and path not in STORIES]


def printed(path: Path) -> list[tuple[str, str]]:
    """Language and text of the blocks that are run."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


IN_TWO = "--accelerate_config cpu --num_processes 2"


def run_commands(block: str, folder: Path) -> None:
    """Run a block as a reader would, and stop at the first command that fails.

    `trl ...` and `python FILE ...` run in forks of this process, which has imported the library; other lines in a shell.
    What starts two processes starts forks (tests/cli/test_launch.py starts them as a reader does). Trainings of whole epochs
    end after three steps, and a model of no printed size has one layer.
    """
    lines = [line for line in re.sub(r"\\\n\s*", " ", block).splitlines() if shlex.split(line, comments=True)]
    if any(line.split()[0] in ("for", "while", "if", "cd", "export") or line[0] in " \t" for line in lines):
        lines = [block]
    for line in lines:
        words = shlex.split(line, comments=True)
        if (
            words[0] == "trl"
            and COMMANDS[words[1]].kind == "training"
            and not {"--max_steps", "--dry_run"} & set(words)
        ):
            words += ["--max_steps", "3"]
        if words[:2] == ["python", "examples/small_model.py"] and "--layers" not in words:
            words += ["--layers", "1", "--width", "128"]
        if words[0] == "torchrun":
            run_in_two(folder, ["trl", words[words.index("-m") + 1].split(".")[-1], *words[words.index("-m") + 2 :]])
        elif IN_TWO in line:
            place = words.index("--accelerate_config")
            run_in_two(folder, words[:place] + words[place + len(IN_TWO.split()) :])
        elif words[0] == "echo" and words[2:4] == ["|", "trl"]:
            run_forked(words[3:], typed=words[1] + "\n")
        elif words[0] in ("trl", "python") and not re.search("[|&;<>$*\n]", line):
            run_forked(words)
        else:
            run_in_shell(line, folder)


def run_in_two(folder: Path, words: list[str]) -> None:
    """Run `trl ...` in two processes on the CPU, forks of a process that has imported the library."""
    begin = (
        f"import os, sys; os.chdir({str(folder)!r}); os.environ['ACCELERATE_USE_CPU'] = 'true'; sys.argv = {words!r}"
    )
    launch("tests.run_code", f"{begin}; from trl.cli.main import main; sys.exit(main())")


def run_in_shell(commands: str, folder: Path) -> None:
    """Run commands in bash, with the library of this checkout."""
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT / "src"}
    joined = {name: os.pathsep.join([str(path), os.environ.get(name, "")]) for name, path in paths.items()}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, **joined},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def run_program(path: str) -> int:
    runpy.run_path(path, run_name="__main__")
    return 0


def run_forked(words: list[str], typed: str = "") -> None:
    """Run `trl ...` or `python FILE ...` in a fork of this process and in its folder, with what is `typed` as its input."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as source:
        source.write(typed)
        source.seek(0)
        child = os.fork()
        if not child:
            os.dup2(source.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = words if words[0] == "trl" else words[1:]
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            end_with(trl_main if words[0] == "trl" else functools.partial(run_program, words[1]))
        _, wait_status = os.waitpid(child, 0)
        output.seek(0)
        printed = output.read()
    assert os.waitstatus_to_exitcode(wait_status) == 0, f"{shlex.join(words)}\n{printed[-6000:]}"


@pytest.fixture
def restored_tables():
    """Rows that a page adds to a table of losses or advantages are gone after its test."""
    rows = [(table, dict(table)) for table in (ADVANTAGES, LOSS_TYPES)]
    yield
    for table, before in rows:
        table.clear()
        table.update(before)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in DOCUMENTS if longer_commands(path)], ids=label)
def test_longer_commands_take_a_step(path, workshop, monkeypatch):
    """Commands of up to a minute, one after another as a reader would run them, with one step in place of all."""
    monkeypatch.chdir(workshop)
    for words in longer_commands(path):
        run_forked(words if words[1] == "data" else [*words, "--max_steps", "1"])


@pytest.mark.slow
@pytest.mark.usefixtures("restored_tables")
@pytest.mark.parametrize("path", STORIES, ids=label)
def test_guides_run_as_printed(path, tmp_path, monkeypatch):
    """All commands and Python examples of a guide, one after another, in a folder with a clone and nothing else."""
    for name in ("examples", "benchmarks", "src", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, block in printed(path):
        if language == "bash":
            run_commands(block, tmp_path)
        else:
            exec(compile(block, label(path), "exec"), names)


@pytest.mark.slow
@pytest.mark.usefixtures("restored_tables")
@pytest.mark.parametrize("path", PYTHON_PAGES, ids=label)
def test_examples_run(path, workshop, monkeypatch, capsys):
    """All Python examples of a document, and a method's commands, one after another as a reader would run them."""
    monkeypatch.chdir(workshop)
    names: dict[str, object] = {}
    for language, block in printed(path):
        if language == "python":
            exec(compile(block, label(path), "exec"), names)
        elif path.parent.name == "methods":
            run_commands(block, workshop)
    if path == ROOT / "README.md":
        assert "7+8=15" in capsys.readouterr().out.splitlines()  # the trained model's answer
