"""What files are called and what they may not mention."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in (".ci", "bench", "csrc", "demo", "docs", "src", "tests")]
TEXT_SUFFIXES = {"", ".cpp", ".h", ".json", ".jsonl", ".md", ".py", ".pyi", ".sh", ".toml", ".txt"}

MEANINGLESS_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|old|new|v2)($|_)")
OTHER_WORDS = {
    "seq": "request",
    "seqs": "requests",
    "sequence": "request",
    "job": "request",
    "tick": "step",
    "swap": "demote or promote",
    "offload": "demote",
    "heavy": "selected",
}  # word of other engines -> ours (docs/glossary.md)
MACHINE_PATHS = re.compile(r"(?<![\w./:])/(?:home|mnt|opt|root|srv|tmp|Users|work)/\w")


def source_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in FOLDERS:
        yield from (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def test_module_names_say_what_lives_there() -> None:
    paths = [path.relative_to(ROOT) for path in source_files()]
    assert [str(path) for path in paths if any(MEANINGLESS_NAMES.search(Path(part).stem) for part in path.parts)] == []


def defined_names(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_defined_names_use_our_word_for_a_thing() -> None:
    hits = [
        f"{source.relative_to(ROOT)}: {name}: say {OTHER_WORDS[word]}"
        for source in (ROOT / "src").rglob("*.py")
        for name in defined_names(source)
        for word in re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
        if word in OTHER_WORDS
    ]
    assert hits == []


def test_files_contain_no_path_of_one_machine() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in source_files()
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert hits == []
