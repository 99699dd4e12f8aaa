"""The package as it is built: its version, what it declares, and its description."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import trl
from trl.cli import main
from trl.reporting.model_card import generate_model_card
from trl.scripts.env import system_information

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
PARTS = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "tests/test_package.py")


# --- the version ------------------------------------------------------------------------------------------------------


def test_the_version_is_that_of_the_interface_with_a_number_of_our_own(capsys):
    version = Version(trl.__version__)
    assert version.public == "0.26.2" and re.fullmatch(r"exact\.\d+", version.local or "")
    assert Version("0.9") <= Version("0.26.2") < version < Version("0.26.3") and not version.is_prerelease
    assert Requirement("trl==0.26.2").specifier.contains(version) and Requirement("trl>=0.24,<0.27").specifier.contains(
        version
    )
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{trl.__version__}\n"
    assert system_information()["TRL version"].split(" ")[0] == trl.__version__
    fields = ("base_model", "model_name", "hub_model_id", "dataset_name", "wandb_url", "trainer_name")
    assert f"- trl: {trl.__version__}\n" in generate_model_card(**dict.fromkeys(fields, "x"), tags=[]).text


# --- what is imported is declared -------------------------------------------------------------------------------------

DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
SERVE = {"fastapi", "pydantic", "starlette", "uvicorn"}
NEEDS_EXTRA = {  # modules that are imported where an extra is needed, and what they import at once
    "generation/serving/app.py": SERVE,
    "generation/serving/openai_api.py": SERVE,
    "agents/openai_app.py": SERVE,
}
UNDECLARED = {"llm-blender"}  # PairRMJudge alone uses it, and says how to install it


def declared(requirements: list[str]) -> set[str]:
    """Distributions of requirements, those of this package's own extras included."""
    parsed = [Requirement(text) for text in requirements]
    inner = [declared(EXTRAS[extra]) for part in parsed if part.name == "trl" for extra in part.extras]
    return {canonicalize_name(part.name) for part in parsed if part.name != "trl"}.union(*inner)


def imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Packages from outside that are imported, and whether that is in a function or may fail."""
    for child in ast.iter_child_nodes(node):
        later = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try | ast.If)
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            names = [child.module or ""]
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            names = [word.value for word in child.args[:1] if isinstance(word, ast.Constant)]
        packages = {str(name).partition(".")[0] for name in names} - sys.stdlib_module_names - {"trl", ""}
        yield from ((canonicalize_name(DISTRIBUTIONS.get(name, name)), later) for name in packages)
        yield from imports(child, later)


def test_what_is_imported_is_declared():
    always = declared(PROJECT["dependencies"])
    optional = set().union(*(declared(requirements) for requirements in EXTRAS.values()))
    used = set()
    for path in sorted((ROOT / "src" / "trl").rglob("*.py")):
        name = path.relative_to(ROOT / "src" / "trl").as_posix()
        for package, lazy in imports(ast.parse(path.read_text(encoding="utf-8"))):
            allowed = always | (optional | UNDECLARED if lazy else NEEDS_EXTRA.get(name, set()))
            assert package in allowed, f"{name} imports {package}"
            used.add(package)
    assert always <= used, "declared, and imported nowhere"


def test_extras_have_the_names_of_trl_too():
    names = "bco deepspeed diffusers judges kernels liger math_verify peft quantization scikit vllm vlm test dev"
    assert set(names.split()) <= EXTRAS.keys()
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = {extra for words in re.findall(r"\btrl\[([\w,]+)\]", text) for extra in words.split(",")}
    assert len(named) > 8 and named <= EXTRAS.keys()


# --- what is built ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with a wheel and a source distribution of this tree."""
    pytest.importorskip(
        "setuptools", minversion="77", reason="setuptools>=77 builds the package: pip install 'trl[test]'"
    )
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for part in PARTS:
        (tree / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    code = (
        f"from setuptools import build_meta as b; [build({str(folder)!r}) for build in (b.build_sdist, b.build_wheel)]"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.fixture(scope="module")
def metadata(built) -> Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith("/METADATA")]
        return Parser().parsestr(files.read(name).decode())


def test_the_metadata_has_version_authors_and_extras(metadata):
    assert (metadata["Version"], metadata["Author"]) == (trl.__version__, "the trl developers")
    assert {canonicalize_name(name) for name in EXTRAS} == set(metadata.get_all("Provides-Extra"))
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_description_has_no_link_into_the_repository(metadata):
    readme, text = (ROOT / "README.md").read_text(encoding="utf-8"), metadata.get_payload()
    assert re.search(r"\]\(docs/", readme)  # as a reader of the repository needs them
    links = re.findall(r"\]\(([^)]*)\)", text) + re.findall(
        r"(?:href|src)=\"([^\"]*)\"|^\[[^\]]+\]: (\S+)", text, flags=re.M
    )
    assert [link for link in links if not str(link).startswith(("https://", "http://", "#"))] == []
    blocks = r"^```\w*\n.*?^```|^    [^\n]*"
    assert re.findall(blocks, text, flags=re.M | re.S) == re.findall(blocks, readme, flags=re.M | re.S)


def test_tests_are_not_in_the_package(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        assert {name.partition("/")[0] for name in files.namelist()} == {
            "trl",
            f"trl-{trl.__version__}.dist-info",
        }
    with tarfile.open(source) as files:
        names = {name.partition("/")[2].partition("/")[0] for name in files.getnames()} - {""}
    parts = {part for part in PARTS if "/" not in part}
    assert names == parts | {"src", "PKG-INFO", "setup.cfg"}
