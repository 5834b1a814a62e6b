"""The README does what it says: its commands and examples run and print what it shows, and it leaves nothing out.

Commands of ``console`` blocks run in a terminal of 100 columns, ``python`` blocks in one interpreter in their order.
``text`` blocks show what they print. All run in a folder that holds `notebooks/model.py` and a checkpoint, `last.pt`.
What they print must be what is shown, line by line; a line ``…`` stands for any number of lines. ``sh`` blocks
(installation, make) are not run.

`MEMSIZE_GOLDEN=write pytest tests/test_readme.py` writes what is printed into the README; read the difference.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import torch

from memsize import cli
from memsize.analysis import compare
from memsize.analysis.findings import layout, report
from memsize.documents.layers import COLUMNS, layer_table
from memsize.records.report import Report
from memsize.records.trace import Trace
from memsize.spec.scenario import DEFAULT, SCENARIOS
from tests.conftest import ROOT
from tests.models import Toy

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
WRITE = os.environ.get("MEMSIZE_GOLDEN") == "write"
WIDTH = 100
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "--- end of a block ---"


@dataclass(frozen=True, slots=True)
class Example:
    """A command or a piece of Python, and what the README shows of its output (None: nothing is shown)."""

    kind: str
    code: str
    shown: str | None


def examples() -> Iterator[Example]:
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(TEXT)]
    for (kind, text), (following, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "console":
            command, _, shown = text.partition("\n")
            yield Example(kind, command.removeprefix("$ "), shown)
        elif kind == "python":
            yield Example(kind, text, output if following == "text" else None)


EXAMPLES = tuple(examples())


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[Example, str]:
    """What every example prints, the commands first: a script may read what a command wrote."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "model.py", folder / "notebooks")
    torch.save(Toy().half().state_dict(), folder / "last.pt")
    found = {example: in_terminal(example.code, folder) for example in EXAMPLES if example.kind == "console"}
    python = [example for example in EXAMPLES if example.kind == "python"]
    code = f"\nprint({MARK!r})\n".join(example.code for example in python)
    found |= zip(python, in_python(code, folder).split(f"{MARK}\n"), strict=True)
    if WRITE:
        write(found)
    return found


def in_terminal(command: str, folder: Path) -> str:
    """What a shell command prints to a terminal, then what it says on stderr."""
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"COLUMNS": str(WIDTH), "PATH": path, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(writer)
        out = b"".join(chunks(reader))
        _, err = process.communicate()
    os.close(reader)
    return out.decode().replace("\r\n", "\n") + err.decode()


def chunks(reader: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(reader, 2**16)
        except OSError:  # how Linux says that the other end of a terminal is closed
            return
        if not chunk:
            return
        yield chunk


def in_python(code: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(printed: dict[Example, str]) -> None:
    """Put what is printed below each example; one that is shown in part is for a person to change."""
    text = TEXT
    for example, output in printed.items():
        output = trimmed(output)
        if "…\n" in (example.shown or ""):
            continue
        if example.kind == "console":
            start = f"```console\n$ {example.code}\n"
            text = text.replace(f"{start}{example.shown}```", f"{start}{output}```")
        elif example.shown is not None:
            start = f"```python\n{example.code}```\n\n```text\n"
            text = text.replace(f"{start}{example.shown}```", f"{start}{output}```")
    README.write_text(text, encoding="utf-8")


def trimmed(text: str) -> str:
    """`text` without the spaces at the ends of its lines, which nobody sees."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.code.splitlines()[0])
def test_prints_what_is_shown(example: Example, printed: dict[Example, str]) -> None:
    if example.shown is None or WRITE:
        return
    parts = trimmed(example.shown).split("…\n")
    pattern = ".*".join(re.escape(part) for part in parts)
    assert trimmed(printed[example]) == trimmed(example.shown) or re.fullmatch(
        pattern, trimmed(printed[example]), re.DOTALL
    )


def test_there_is_something_to_run() -> None:
    kinds = [example.kind for example in EXAMPLES]
    assert kinds.count("console") >= 3 and kinds.count("python") >= 3
    assert EXAMPLES[0].code == "memsize report notebooks/model.py:Test --input 3,64,64"


# Nothing is left out, and nothing is made up.


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the README, its own heading left out."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"][
        2:
    ]


def quoted(cells: list[list[str]], column: int) -> list[str]:
    return [cell[column].strip("`") for cell in cells if cell[column].startswith("`")]


def test_every_scenario_is_documented() -> None:
    assert quoted(rows("Scenarios"), 0) == list(SCENARIOS)
    usual = TEXT.partition("Without `--scenario`")[2].partition("\n\n")[0]
    assert tuple(dict.fromkeys(re.findall(r"`([\w-]+)`", usual))) == DEFAULT


def test_every_column_is_documented() -> None:
    documented = {row[1].strip("`"): row[0] for row in rows("How to read it")}
    empty = Report("", Trace("", "as-given", True, None, "", (), (), ()))
    assert documented == {column.key: column.title for column in layer_table(empty, columns=COLUMNS).columns}


def test_every_option_is_documented() -> None:
    context = click.Context(cli.memsize)
    known = {"--help", "--version"}
    for name in cli.memsize.list_commands(context):
        command = cli.memsize.get_command(context, name)
        assert command is not None
        assert f"memsize {name}" in TEXT
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        for option in options:
            known |= {*option.opts, *option.secondary_opts}
            assert any(re.search(rf"(?<![\w-]){opt}(?![\w-])", TEXT) for opt in option.opts), option.opts
    prose = "\n".join(line for line in TEXT.splitlines() if "memsize" in line or line.startswith("|"))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", prose)) <= known


def test_every_finding_is_documented() -> None:
    assert set(quoted(rows("Memory formats"), 0)) == set(layout.RULES.codes)
    assert set(quoted(rows("Findings"), 0)) == set(report.RULES.codes)
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    # A page that says "in this order" means it. What a comparison finds as a report does is told once.
    of_two = [code for code in compare.RULES.codes if code not in report.RULES.codes]
    assert re.findall(r"^### `(.+)`$", page, re.MULTILINE) == [*report.RULES.codes, *of_two]
    of_files = codes(ROOT / "memsize" / "checkpoint" / "findings.py")
    assert set(re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)) == of_files


def codes(*sources: Path) -> set[str]:
    """The codes in modules' sources: texts of words joined by hyphens, and whatever is a finding's first argument."""
    found: set[str] = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Constant) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", str(node.value)):
            found.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
            found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return found - set(SCENARIOS)


def fields(value: object) -> Iterator[str]:
    """The names of all fields in JSON data, but not the roles and dtypes that are names of fields too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            if name != "roles":
                yield from fields(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from fields(inner)


def test_every_field_of_the_json_is_documented() -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)`", page))
    for golden in (ROOT / "tests" / "golden").glob("*.json"):
        assert set(fields(json.loads(golden.read_text(encoding="utf-8")))) <= documented, golden.name


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (?:\w+=\S+ )?(\w+)`|^make (\w+)", TEXT, re.MULTILINE):
        assert f"\n{''.join(target)}:" in makefile


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link
