"""Rules that hold for the repository as a whole: sizes, layers, light imports, pins, and no trace of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
MAX_DRIVER_LINES = 100
HEAVY = {"torch", "ray", "transformers", "sglang", "megatron", "matplotlib", "wandb"}
UNPINNED_EXTRAS = {"sglang", "wandb"}
"""Neither the quickstart nor the tests install them."""

# Imports point down only. A package may import itself and what is listed here.
LAYERS = {
    "utils": set(),
    "rollout": {"utils"},
    "backends": {"utils"},
    "ray": {"utils", "rollout", "backends"},
}


def python_files(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


def tracked_text_files() -> list[Path]:
    """What a checkout contains; from a source archive without git, what the folders of the project contain."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        folders = ("miles", "tests", "docs", "examples", "scripts", "benchmarks")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [path for path in paths if path.is_file() and path.suffix not in {".png", ".parquet"}]


def test_no_module_of_miles_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files("miles")}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n >= MAX_LINES} == {}


@pytest.mark.parametrize("driver", ["train.py", "train_async.py"])
def test_a_driver_reads_on_one_page(driver: str) -> None:
    assert len((ROOT / driver).read_text().splitlines()) < MAX_DRIVER_LINES


def test_nothing_that_is_ignored_is_committed() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    assert listing.stdout == ""


@pytest.mark.parametrize("name", [".data.lock", ".data-x7f/new/prepare.json", "data/train.jsonl"])
def test_what_an_example_makes_is_ignored(name: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), "check-ignore", "--quiet", f"examples/quickstart/{name}"]
    assert subprocess.run(command, check=False).returncode == 0


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    place = re.compile(r"(?<![\w.$}/])/(?:work|root|home|Users)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if place.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "module",
    [
        "miles.rollout.base_types",
        "miles.rollout.fully_async_rollout",
        "miles.utils.arguments",
        "miles.utils.console",
        "miles.utils.http_utils",
        "miles.utils.run_report",
        "miles.utils.tracking",
        "miles.utils.types",
        "examples.quickstart.prepare",
        "examples.quickstart.reward",
    ],
)
def test_imports_that_stay_light(module: str) -> None:
    code = f"import {module}, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert {name.split(".")[0] for name in result.stdout.split()} & HEAVY == set()


class RuntimeImports(ast.NodeVisitor):
    """Modules that a file imports when it is loaded: outside functions and outside `if TYPE_CHECKING`."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.modules |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.modules |= {f"{node.module}.{alias.name}" for alias in node.names}

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        pass

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        pass


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_imports_point_down_only(package: str) -> None:
    allowed = LAYERS[package] | {package}
    upward = []
    for path in python_files(f"miles/{package}"):
        visitor = RuntimeImports()
        visitor.visit(ast.parse(path.read_text()))
        for module in sorted(visitor.modules):
            parts = module.split(".")
            if parts[0] == "miles" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in allowed:
                upward.append(f"{path.relative_to(ROOT)} imports {module}")
    assert upward == []


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    extras = [
        text
        for name, texts in project["optional-dependencies"].items()
        if name not in UNPINNED_EXTRAS
        for text in texts
    ]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        name = canonicalize_name(requirement.name)
        if name != "miles":
            assert requirement.specifier.contains(pins[name]), f"{requirement}: constraints.txt has {pins[name]}"


@pytest.mark.parametrize("example", sorted(path.parent.name for path in (ROOT / "examples").glob("*/run*.sh")))
def test_an_example_explains_itself(example: str) -> None:
    assert (ROOT / "examples" / example / "README.md").is_file()
