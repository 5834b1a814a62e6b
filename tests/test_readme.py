"""The README and the pages of docs/ do what they say: their examples print what is shown, and nothing is left out.

On each page, ``console`` blocks run in a terminal of 100 columns (the README's has 40 lines), then the ``python``
blocks, in their order, in one interpreter. A ``text`` block shows what the ``python`` block before it prints, and a
block that begins with ``# name.py`` or ``# name.log`` is that file instead. All run in a folder with
`notebooks/model.py`, `benchmarks/resnet.py` and a checkpoint, `last.pt`. The output must be what is shown, line by
line; a line ``…`` stands for any number of lines. ``sh`` and ``py`` blocks are not run, because they need a network, a
GPU or a model of the reader's, but every `memsize` command in them is parsed.

The pages run with the thorough tests, but for the examples in `SLOW`, which run with ``-m slow``.
`MEMSIZE_GOLDEN=write pytest tests/test_readme.py -m ""` writes the output into the pages; review the difference.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import get_args

import click
import pytest
import torch

from memsize import Report, Trace, cli
from memsize.documents import document
from memsize.documents.sections import Table
from memsize.records.trace import Role
from tests import agents, sentences
from tests.conftest import ROOT
from tests.fits import fit
from tests.models import DEFAULT, SCENARIOS, Toy
from tests.process import Session
from tests.records import COLUMNS
from tests.rules import RANK_RULES, error_text, explanation, generation, program, report_rules

README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = (README, *sorted(DOCS.glob("*.md")))
WRITE = os.environ.get("MEMSIZE_GOLDEN") == "write"
WIDTH = 100
HEIGHT, TALL = 40, 1000
"""Lines of the terminal that the README shows, and of the one that the other pages do: room for everything."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|toml|log))\n")
MARK = "--- end of a block ---"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Example:
    """A command or a piece of Python, and the output that its page shows (None: no output is shown)."""

    kind: str
    code: str
    shown: str | None


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    return [(match[1], match[2]) for match in BLOCK.finditer(text_of(page))]


def examples(page: Path) -> Iterator[Example]:
    found = blocks(page)
    for (kind, text), (following, output) in zip(found, [*found, ("", "")][1:], strict=True):
        if kind == "console":
            command, _, shown = text.partition("\n")
            yield Example(kind, command.removeprefix("$ "), shown)
        elif kind == "python" and not FILE.match(text):
            yield Example(kind, text, output if following == "text" else None)


def printed(page: Path, found: list[Example], folder: Path, python: list[str]) -> dict[Example, str]:
    """What each of a page's examples prints; the commands run first, because a script may read what a command wrote."""
    for name in ("notebooks/model.py", "notebooks/train.py", "notebooks/train_fsdp.py", "benchmarks/resnet.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    torch.save(Toy().half().state_dict(), folder / "last.pt")
    for kind, text in blocks(page):
        if kind in ("python", "toml", "text") and (name := FILE.match(text)):
            (folder / name[1]).write_text(text, encoding="utf-8")
    height = HEIGHT if page == README else TALL
    (folder / "bin").mkdir()
    command = folder / "bin" / "memsize"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(python)} -m memsize "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    outputs = {example: in_terminal(example.code, folder, height) for example in found if example.kind == "console"}
    scripts = [example for example in found if example.kind == "python"]
    code = f"\nprint({MARK!r})\n".join(example.code for example in scripts)
    shown = in_python(code, folder, python).split(f"{MARK}\n") if scripts else []
    return outputs | dict(zip(scripts, shown, strict=True))


def in_terminal(command: str, folder: Path, height: int) -> str:
    """What a shell command prints to a terminal, then what it says on stderr."""
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    size = {"COLUMNS": str(WIDTH), "LINES": str(height)}
    environment = os.environ | size | {"PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
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


def in_python(code: str, folder: Path, python: list[str]) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    command = [*python, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(page: Path, outputs: dict[Example, str]) -> None:
    """Put what is printed below each example, of one that is shown in part the same parts."""
    text = text_of(page)
    for example, output in outputs.items():
        if example.shown is None or agrees(trimmed(example.shown), trimmed(output)):
            continue
        start = f"```console\n$ {example.code}\n" if example.kind == "console" else f"{example.code}```\n\n```text\n"
        assert f"{start}{example.shown}```" in text, example.code
        text = text.replace(f"{start}{example.shown}```", f"{start}{parts_like(example.shown, trimmed(output))}```")
    page.write_text(text, encoding="utf-8")


def parts_like(shown: str, output: str) -> str:
    """The lines of `output` that are most like those of `shown`, with … where lines are left out there."""
    parts, lines, start = shown.split("…\n"), output.splitlines(keepends=True), 0
    for number, part in enumerate(parts):
        size = len(part.splitlines())
        last = len(lines) - size
        if number and number < len(parts) - 1:
            alike = {at: SequenceMatcher(None, part, "".join(lines[at : at + size])) for at in range(start, last + 1)}
            start = max(alike, key=lambda at: alike[at].ratio())
        elif number:
            start = last
        parts[number] = "".join(lines[start : start + size])
        start += size
    return "…\n".join(parts)


def trimmed(text: str) -> str:
    """`text` without the spaces at the ends of its lines, which nobody sees."""
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def agrees(shown: str, output: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in shown.split("…\n"))
    return shown == output or re.fullmatch(pattern, output, re.DOTALL) is not None


RUN = [page for page in PAGES if any(examples(page))]
SLOW = (
    "memsize fit hf:",
    "memsize fit meta-llama",
    "memsize fit benchmarks/resnet.py:ResNet50",
    "memsize generate hf:",
    "memsize run --gpus 8",
    "memsize serve hf:",
    "memsize serve meta-llama",
    "memsize sweep sweep.toml",
)
"""How commands begin that take more than a second, without what a process takes to start."""


def check(page: Path, found: list[Example], folder: Path, python: list[str]) -> None:
    outputs = printed(page, found, folder, python)
    if WRITE:
        write(page, outputs)
    shown = {example.code: trimmed(example.shown) for example in found if example.shown is not None}
    real = {example.code: trimmed(output) for example, output in outputs.items()}
    wrong = [code for code, text in shown.items() if not agrees(text, real[code])]
    assert {code: real[code] for code in wrong} == {code: shown[code] for code in wrong}


@pytest.mark.thorough
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_prints_what_is_shown(page: Path, tmp_path: Path, warm: list[str]) -> None:
    check(page, [example for example in examples(page) if not example.code.startswith(SLOW)], tmp_path, warm)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_slow_examples_print_what_is_shown(page: Path, tmp_path: Path, warm: list[str]) -> None:
    check(page, [example for example in examples(page) if example.code.startswith(SLOW)], tmp_path, warm)


def test_there_is_something_to_run() -> None:
    kinds = [example.kind for example in examples(README)]
    assert kinds.count("console") >= 3 and kinds.count("python") >= 1
    assert "memsize report notebooks/model.py:Test --input 3,64,64" in [example.code for example in examples(README)]
    assert len(RUN) >= 8
    code = [example.code for page in RUN for example in examples(page)]
    assert all(any(text.startswith(begin) for text in code) for begin in SLOW)


def commands() -> Iterator[tuple[str, str]]:
    """Every `memsize` command line on a page, with the page's name."""
    for page in PAGES:
        for line in (line for kind, text in blocks(page) if kind in ("sh", "console") for line in text.splitlines()):
            if line.startswith(("memsize ", "$ memsize ")):
                yield page.name, line.removeprefix("$ ")


@pytest.mark.parametrize(("page", "line"), [*commands()])
def test_every_command_can_be_parsed(page: str, line: str) -> None:
    """Options are read and checked as far as they can be without building a model."""
    name, *arguments = shlex.split(line, comments=True)[1:]
    context = click.Context(cli.memsize, obj=Session())
    command = cli.memsize.get_command(context, name)
    assert command is not None, page
    command.make_context(name, arguments, parent=context)


# Nothing is left out, and nothing is made up.


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables below a heading of a page, without the tables' headings."""
    section = text_of(DOCS / page).partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"][
        2:
    ]


def quoted(cells: list[list[str]], column: int) -> list[str]:
    return [cell[column].strip("`") for cell in cells if cell[column].startswith("`")]


def test_every_scenario_is_documented() -> None:
    text = text_of(DOCS / "scenarios.md").partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == list(SCENARIOS)
    usual = text.partition("Without `--scenario`")[2].partition("\n\n")[0]
    assert tuple(dict.fromkeys(re.findall(r"`([\w-]+)`", usual))) == DEFAULT


def test_every_column_is_documented() -> None:
    documented = {row[1].strip("`"): row[0] for row in rows("report.md", "The layer table")}
    empty = Report("", Trace("", "as-given", True, None, "", (), (), ()))
    sections = document(empty, columns=COLUMNS).sections()
    layers = next(part for part in sections if isinstance(part, Table) and part.name == "layers")
    assert documented == {column.key: column.title for column in layers.columns}


def has_option(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){option}(?![\w-])", text) is not None


SHARED = ("report.md", "peaks.md", "targets.md", "compile.md")
"""The pages of the options that several commands have; each command's own options are on its own page."""


def test_every_option_is_documented() -> None:
    context = click.Context(cli.memsize)
    known = {"--help", "--version"}
    shared = "\n".join(map(text_of, [DOCS / name for name in SHARED]))
    for name in cli.memsize.list_commands(context):
        command = cli.memsize.get_command(context, name)
        assert command is not None
        page = agents.PAGES.get(name, name)
        text = "\n".join(map(text_of, sorted(DOCS.glob(f"{page}[._]*"))))
        assert f"`memsize {name}`" in text and f"`memsize {name}`" in text_of(README)
        for option in (parameter for parameter in command.params if isinstance(parameter, click.Option)):
            known |= {*option.opts, *option.secondary_opts}
            assert any(has_option(text + shared, each) for each in option.opts), (name, option.opts)
    lines = [line for page in PAGES for line in text_of(page).splitlines() if "memsize" in line or line.startswith("|")]
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join(lines))) <= known | OTHERS


OTHERS = {"--config", "--epochs", "--index-url", "--lr", "--memsize-update", "--page", "--resume", "--sources"}
"""Options of other programs on the same lines."""


def test_every_finding_is_documented() -> None:
    assert set(quoted(rows("layout.md", "Findings"), 0)) == set(sentences.codes("analysis/findings/layout"))
    assert quoted(rows("generate.md", "Findings"), 0) == [*generation.RULES.codes]
    assert quoted(rows("serve.md", "Findings"), 0) == [*generation.SERVING_RULES.codes]
    assert quoted(rows("sweep.md", "Findings"), 0) == sentences.codes("analysis/findings/sweep")
    assert quoted(rows("run.md", "Findings"), 0) == [
        *program.RULES.codes,
        *sentences.codes("analysis/findings/after_steps"),
    ]
    assert quoted(rows("run_gpus.md", "Findings"), 0) == [*RANK_RULES.codes]
    assert quoted(rows("explain.md", "Findings"), 0) == [*error_text.RULES.codes, *explanation.RULES.codes]
    page = text_of(DOCS / "findings.md")
    # A page that says "in this order" means it.
    of_two = sentences.codes("analysis/compare")
    assert re.findall(r"^### `(.+)`$", page, re.MULTILINE) == ["no-input", *report_rules.RULES.codes, *of_two]
    assert quoted(rows("findings.md", "Fits"), 0) == [*fit.RULES.codes]
    assert set(quoted(rows("findings.md", "Checkpoints"), 0)) == set(sentences.codes("checkpoints/findings"))


def test_every_make_target_exists() -> None:
    makefile = text_of(ROOT / "Makefile")
    written = text_of(README) + text_of(DOCS / "development.md")
    targets = re.findall(r"`make (?:\w+=\S+ )?(\w+)`|^make (\w+)", written, re.MULTILINE)
    assert targets
    for target in targets:
        assert f"\n{''.join(target)}:" in makefile


def anchors(page: Path) -> set[str]:
    """What links may name after ``#``: the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKED = (*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "zoo" / "results.md")


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text_of(page)):
        if link.startswith("https://"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_the_index_lists_every_page() -> None:
    listed = re.findall(r"^- \[.+?\]\((\w+)\.md\)", text_of(DOCS / "index.md"), re.MULTILINE)
    assert sorted([*listed, "index"]) == [page.stem for page in PAGES if page != README]


def test_the_site_lists_every_page() -> None:
    listed = re.findall(r"docs/(\w+)\.md$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(listed) == [page.stem for page in PAGES if page != README]


def test_every_picture_is_shown_and_small() -> None:
    for picture in (DOCS / "pictures").glob("*.png"):
        assert f"](pictures/{picture.name})" in text_of(DOCS / f"{picture.stem}.md")
        assert picture.stat().st_size < 150_000


def test_the_vocabulary_has_every_role() -> None:
    assert {row[0] for row in rows("vocabulary.md", "Roles")} == set(get_args(Role))


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= 150


def test_the_development_page_has_every_folder_of_the_package() -> None:
    folders = {path.parent.name for path in (ROOT / "memsize").glob("*/__init__.py")}
    assert {row[0].strip("`") for row in rows("development.md", "The package")} == folders
