"""What the documents name exists: links, files, functions, commands, flags, tests. What is generated is fresh."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.config.sources import Given, LoadedConfig, build
from tests.repo.tree import ROOT, SOURCE, definitions, markdown_files, text_files, tree_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_NAME = re.compile(r"`([\w./-]+\.py)(?::([\w.]+))?`")
SHELL_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")

ALLOWED_HOSTS = {
    *("localhost", "127.0.0.1", "example.com", "example.org"),
    *("prometheus.monitoring.svc", "otel-collector.observability.svc", "registry.example.com"),  # of somebody's cluster
    "developer.download.nvidia.com",  # has nsys, which no other host has
    "storage.googleapis.com",  # what gs:// stands for
    *("www.apache.org", "keepachangelog.com", "semver.org", "json-schema.org", "www.w3.org"),
}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|tmp/\w+|opt/(?:pypi|wheels))\b")
URL_HOST = re.compile(r"https?://([\w.-]+)")
PACKAGE_INDEX = re.compile(r"(?:extra-)?index[-]url|find-links|trusted-host")


def anchors(path: Path) -> set[str]:
    """The anchors that headings get where Markdown is shown."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(path.read_text())}


def prose(path: Path) -> str:
    """The text without fenced blocks, whose brackets are not links."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def commands() -> list[str]:
    """The command lines of every shell block in the documents; continued lines are joined."""
    return [
        line.strip()
        for path in markdown_files()
        for block in SHELL_BLOCK.findall(path.read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def make_recipes() -> list[str]:
    """The command lines of the Makefile that call roseinfer."""
    return re.findall(r"\$\(BIN\)/(roseinfer .+) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_links_lead_somewhere() -> None:
    broken = []
    for path in markdown_files():
        for link in LINK.findall(prose(path)):
            target, _, anchor = link.partition("#")
            if target.startswith(("http:", "https:")):
                continue
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []


def test_named_code_exists() -> None:
    """`engine/core/engine.py:Engine.step` in a document is a file of ours and a name in it."""
    missing = []
    for path in set(markdown_files()) - {ROOT / "docs" / "source.md"}:  # its docstrings name files beside their own
        for file_name, name in CODE_NAME.findall(prose(path)):
            file = next((root / file_name for root in (SOURCE, ROOT) if (root / file_name).is_file()), None)
            if file is None or (name and name not in definitions(file)):
                missing.append(f"{path.relative_to(ROOT)}: {file_name}:{name}")
    assert missing == []


def test_python_examples_import_what_exists() -> None:
    """Every `from roseinfer… import …` of a Python block works, and the block is Python."""
    num_imports = 0
    for path in markdown_files():
        for block in PYTHON_BLOCK.findall(path.read_text()):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("roseinfer"):
                    module = importlib.import_module(str(node.module))
                    offered = {*dir(module), *getattr(module, "__all__", ())}  # some only where an extra is installed
                    missing = [alias.name for alias in node.names if alias.name not in offered]
                    assert not missing, f"{path.name}: {node.module} has no {missing}"
                    num_imports += 1
    assert num_imports


def test_make_commands_have_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[1] for line in commands() if (words := shlex.split(line))[0] == "make" and len(words) > 1}
    verbs = {verb for path in markdown_files() for verb in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert {"serve", "test", "bench"} <= named
    assert named | verbs <= targets


def test_roseinfer_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `roseinfer …` line of documents and Makefile is accepted, flags and values included."""

    class Accepted(Exception):
        """Raised in the place of building the configuration, which follows the parsing of the arguments."""

    def accept(given: Mapping[str, Given]) -> LoadedConfig:
        build(given)
        raise Accepted

    monkeypatch.setattr(cli, "build", accept)
    lines = [shlex.split(line, comments=True) for line in make_recipes() + commands()]
    lines += [["roseinfer", "serve", *options] for options in map(served_options, lines) if options]
    lines = [words for words in lines if Path(words[0]).name == "roseinfer"]
    assert len(lines) >= 5
    for words in lines:
        with pytest.raises(Accepted):
            cli.main(words[1:])


def served_options(words: list[str]) -> list[str]:
    """The options in `make serve ARGS="…"`."""
    given = [
        word.removeprefix("ARGS=") for word in words if words[:2] == ["make", "serve"] and word.startswith("ARGS=")
    ]
    return shlex.split(" ".join(given))


def test_the_changelog_has_a_place_for_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *_ = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "Unreleased"
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= {
        *("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }


def test_decisions_are_numbered_listed_and_whole() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(folder.glob("0*.md"))
    index = (folder / "README.md").read_text()
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
        assert headings == ["Context", "Choice", "Consequences", "What would change our mind"], page.name
        assert f"]({page.name})" in index, f"{page.name} is not in the index"


def test_each_mechanism_of_the_seeds_has_a_test() -> None:
    text = (ROOT / "docs" / "from-the-seeds.md").read_text()
    rows = [row for row in re.findall(r"^\| (.+) \|$", text, re.MULTILINE) if row.startswith("`")]
    assert len(rows) == 9, "design README section 4 has nine rows"
    for row in rows:
        tests = TEST_NAME.findall(row)
        assert tests, f"no test behind: {row}"
        for file_name, test in tests:
            assert (ROOT / file_name).is_file(), file_name
            assert test in {name.rpartition(".")[2] for name in definitions(ROOT / file_name)}, f"{file_name}::{test}"


def test_generated_pages_are_fresh() -> None:
    command = [sys.executable, "tools/generate_docs.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_route_is_documented() -> None:
    files = [SOURCE / "server" / name for name in ("app.py", "ops/debug.py", "ops/pages.py")]
    calls = [node for file in files for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call)]
    paths = {str(call.args[0].value) for call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    table = (ROOT / "docs" / "http-api.md").read_text()
    paths = {re.sub(r":\.[+*]", "", path) for path in paths if path.startswith("/")}
    assert {"/v1/completions", "/metrics", "/debug/steps"} <= paths
    assert [path for path in paths if not re.search(rf"`(GET|POST) {re.escape(path)}`", table)] == []


def test_the_log_s_messages_come_from_the_loggers_that_the_page_names() -> None:
    rows = re.findall(
        r"^\| `roseinfer\.([\w.]+)` \| `([^`]+)`", (ROOT / "docs" / "logging.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 8
    for logger, message in rows:
        beginning = " ".join(re.split("…", message)[0].split()[:4]).removeprefix("observer ").strip(" :")
        source = (SOURCE / logger.replace(".", "/")).with_suffix(".py").read_text()
        assert beginning in source, f"{logger} does not say {message!r}"


def test_the_architecture_is_a_page_whose_diagrams_name_what_exists() -> None:
    """Names in its diagrams are folders of the source, modules, or messages and records."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.splitlines()) <= 180
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    materials, layers = blocks
    places = {path.name for path in SOURCE.iterdir()} | {path.stem for path in SOURCE.glob("*.py")}
    types = definitions(SOURCE / "messages.py") | definitions(SOURCE / "records.py")
    types |= definitions(SOURCE / "engine" / "core" / "batch.py")
    assert [name for name in re.findall(r"│ ([a-z]+) +│", materials) if name not in places] == []
    assert [name for name in re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", materials) if name not in types] == []
    for line in layers.splitlines():
        names = re.split(r" [|→] ", re.split(r"  +", line)[0])
        assert all((SOURCE / name.replace(".", "/")).with_suffix(".py").exists() or name in places for name in names)


def test_nothing_names_a_machine_or_an_index() -> None:
    """No path of somebody's machine, no package index, and no host that the project has no reason to name."""
    found = []
    for path in text_files():
        if path == Path(__file__):
            continue
        text = path.read_text()
        found += [f"{path.relative_to(ROOT)}: {place}" for place in MACHINE_PATH.findall(text)]
        found += [f"{path.relative_to(ROOT)}: {option}" for option in PACKAGE_INDEX.findall(text)]
        hosts = {host for host in URL_HOST.findall(text) if "." in host}  # others are services of one network
        found += [f"{path.relative_to(ROOT)}: {host}" for host in sorted(hosts - ALLOWED_HOSTS)]
    assert found == []
