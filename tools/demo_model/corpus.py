"""Makes documents of a checkout and of the standard library: pages, Python and short chats, some of them held out.

Everything is read in a fixed order, and every choice is a hash of a name, so the same files give the same corpus.
"""

import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_model.docstrings import Entry, from_source, standard_library

REQUIRED = ("README.md", "pyproject.toml", "docs", "src/roseinfer", "tools")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python and roseinfer.",
    "Answer in one short paragraph.",
)
_HELD_OUT_ONE_IN = 16
# The project's prose is a small part of the corpus, and the part that the demo is asked about.
_PROSE_COPIES = 6
_CHAT_COPIES = 3
_SMALL_TALK_COPIES = 12
_SMALL_TALK = Path(__file__).with_name("small_talk.txt")

_QUESTIONS = {
    "module": ("What is the {name} module?", "What is {name} for?", "Tell me about {name}."),
    "class": ("What is {name}?", "What is the class {name} for?", "Explain {name}."),
    "function": ("What does {name} do?", "How do I use {name}?", "Explain {name}."),
    "heading": ("What do the docs say about {name}?", "Tell me about {name}.", "Explain: {name}"),
}


@dataclass(frozen=True, slots=True)
class Document:
    """(role, text) turns, the role empty for plain text. `copies` is the document's weight in the training stream."""

    name: str
    source: str
    form: str
    turns: tuple[tuple[str, str], ...]
    copies: int = 1

    @property
    def is_held_out(self) -> bool:
        """Whether the model never trains on it. All forms of one Python file share its name, and so its side.

        Prose of the project is always learnt: it is little, and it is what the demo is asked to continue.
        """
        is_python = self.source == "stdlib" or self.name.endswith(".py")
        return is_python and _digest(self.name) % _HELD_OUT_ONE_IN == 0

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text, role markers not counted."""
        return sum(len(text.encode()) for _, text in self.turns)


def gather(root: Path) -> list[Document]:
    """Every document of the checkout at `root` and of the running interpreter's standard library.

    Raises FileNotFoundError, naming what is missing, when `root` is not a whole checkout.
    """
    missing = [name for name in REQUIRED if not (root / name).exists()]
    if missing:
        raise FileNotFoundError(f"{root} is not a checkout of roseinfer: it has no {', '.join(missing)}")
    return [*_small_talk(), *_project(root), *_library()]


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over every document in order: equal corpora, equal fingerprints."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}\0{document.form}\0{document.copies}\0".encode())
        for role, text in document.turns:
            digest.update(f"{role}\0{text}\0".encode())
    return digest.hexdigest()


def _small_talk() -> Iterator[Document]:
    for number, block in enumerate(_SMALL_TALK.read_text(encoding="utf-8").strip().split("\n\n")):
        question, answer = block.split("\n", 1)
        turns = (("user", question), ("assistant", answer))
        yield Document(f"small talk {number}", "small talk", "chat", turns, _SMALL_TALK_COPIES)


def _project(root: Path) -> Iterator[Document]:
    """Markdown and Python of the checkout, but not the demo's own card, which is written from the corpus."""
    demo = root / "src" / "roseinfer" / "demo"
    paths = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    for folder in ("src", "tools"):
        paths += (root / folder).rglob("*.py")
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8").strip()
        if not text or demo in path.parents:
            continue
        name = path.relative_to(root).as_posix()
        is_python = path.suffix == ".py"
        if is_python:
            yield Document(name, "project", "code", (("", text + "\n"),))
            module = ".".join(path.relative_to(root).with_suffix("").parts).removeprefix("src.")
            entries = from_source(module.removesuffix(".__init__"), text)
        else:
            yield Document(name, "project", "page", (("", text + "\n"),), _PROSE_COPIES)
            entries = list(_headings(text))
        yield from _chats(name, "project", entries, _CHAT_COPIES)


def _library() -> Iterator[Document]:
    """Public names only. A module is a page or Python, by a hash of its name, and its first paragraphs are chats."""
    seen: set[str] = set()  # the same docstring under two names would leak from one side of the split to the other
    for module, entries in standard_library():
        fresh = [entry for entry in entries if entry.is_public and entry.doc not in seen]
        seen.update(entry.doc for entry in fresh)
        if fresh:
            is_page = _digest(f"form {module}") % 2 == 0
            texts = [_page(entry) if is_page else _code(module, entry) for entry in fresh]
            yield Document(module, "stdlib", "page" if is_page else "code", (("", "\n\n".join(texts) + "\n"),))
            yield from _chats(module, "stdlib", fresh)


def _page(entry: Entry) -> str:
    if entry.kind == "module":
        return f"{entry.name}\n\n{entry.doc}"
    owner = entry.name.rpartition(".")[0]
    title = f"{owner}.{entry.signature}" if owner else entry.signature
    return f"{'class ' if entry.kind == 'class' else ''}{title}\n{textwrap.indent(entry.doc, '    ')}"


def _code(module: str, entry: Entry) -> str:
    if entry.kind == "module":
        return f'"""{entry.doc}\n"""'
    depth = entry.name.removeprefix(f"{module}.").count(".")
    keyword = "class" if entry.kind == "class" else "def"
    body = textwrap.indent(f'"""{entry.doc}"""', "    ")
    return textwrap.indent(f"{keyword} {entry.signature}:\n{body}", "    " * depth)


def _headings(markdown: str) -> Iterator[Entry]:
    """Each heading with the first paragraph of prose under it."""
    for title, body in re.findall(r"^#+ +(.+)\n+((?:[A-Za-z`*].*\n?)+)", markdown, flags=re.MULTILINE):
        yield Entry("heading", title.strip("` "), "", body.strip())


def _chats(name: str, source: str, entries: Iterable[Entry], copies: int = 1) -> Iterator[Document]:
    """Questions about the public names, one to four to a conversation, now and then under a system prompt."""
    asked = [e for e in entries if e.kind == "heading" or (e.is_public and e.first_paragraph)]
    while asked:
        choice = _digest(asked[0].name)
        turns = [("system", SYSTEM_PROMPTS[choice // 64 % len(SYSTEM_PROMPTS)])] if choice % 8 == 0 else []
        size = 1 + choice // 8 % 4
        for entry in asked[:size]:
            turns += _exchange(entry)
        asked = asked[size:]
        yield Document(name, source, "chat", tuple(turns), copies)


def _exchange(entry: Entry) -> list[tuple[str, str]]:
    questions = _QUESTIONS[entry.kind]
    question = questions[_digest(f"ask {entry.name}") % len(questions)]
    answer = entry.first_paragraph
    if entry.kind == "function" and question.startswith("How") and "(" in entry.signature:
        answer = f"{entry.signature}: {answer}"
    return [("user", question.format(name=entry.name)), ("assistant", answer)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
