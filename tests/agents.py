"""What agents read about memsize, `SKILL.md` and `llms.txt`, made from its commands: ``python -m tests.agents``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import cleandoc

import click

from memsize.cli import _QUESTIONS, memsize
from tests.conftest import ROOT

SKILL, LLMS = ROOT / "SKILL.md", ROOT / "llms.txt"
PAGES = {"fit-script": "fit", "init": "check", "models": "targets", "watch": "verify"}
"""The pages of commands that have none of their own."""
ABOUT = (
    "memsize predicts how much GPU memory a PyTorch model or training script needs, what each byte belongs to, and "
    "what makes it fit. It runs the code itself on tensors without values, so it needs no GPU."
)
_WHEN = (
    "Predict the GPU memory of PyTorch models and training scripts without a GPU. Use it before starting a training or "
    "a server, to choose a batch size, a GPU or a number of GPUs, after an out-of-memory error, and where a model did "
    "not shrink as expected."
)
_SKILL = f"""\
---
name: memsize
description: {_WHEN}
---

# memsize

{ABOUT}

Run the commands below, and read stdout. `-f agent` shortens an answer to its verdict and findings, `-f json` has every
figure in bytes; stderr has errors, in one line. `--save run.memsize` keeps an answer: the same command shows it again.
Targets are `path.py:Name`, a library's model such as `timm:resnet50` or `hf:config.json`, or a Hub id such as
`meta-llama/Llama-3.1-8B`. Never estimate by hand what a command can tell. `memsize mcp` serves the same as tools.
"""


def skill() -> str:
    """The instructions for an agent that can run commands."""
    return "\n".join((_SKILL, *_lines(_skill_lines)))


def llms() -> str:
    """The pages of the documentation by the command that they are about, as https://llmstxt.org describes it."""
    index = "- [All pages, by question](docs/index.md)\n- [Python](docs/python.md): the same as functions"
    return "\n".join((f"# memsize\n\n> {ABOUT}\n", *_lines(_llms_lines), f"## More\n\n{index}\n"))


def _lines(of_command: Callable[[str, str], Iterator[str]]) -> Iterator[str]:
    for question, commands in _QUESTIONS.items():
        yield f"## {question}\n"
        for name, text in commands.items():
            yield from of_command(name, text)
        yield ""


def _skill_lines(name: str, text: str) -> Iterator[str]:
    command = memsize.get_command(click.Context(memsize), name)
    assert command is not None
    yield f"- `memsize {name}`: {text[:1].lower()}{text[1:]}"
    yield from (f"  - `{example}`" for example in _examples(command))


def _examples(command: click.Command) -> list[str]:
    """The first examples of a command's help."""
    epilog = cleandoc(command.epilog or "").replace("\b", "")
    return re.findall(r"^ *(memsize .*?)(?:  .*)?$", epilog, re.MULTILINE)[:2]


def _llms_lines(name: str, text: str) -> Iterator[str]:
    yield f"- [memsize {name}](docs/{PAGES.get(name, name)}.md): {text[:1].lower()}{text[1:]}"


if __name__ == "__main__":
    SKILL.write_text(skill(), encoding="utf-8")
    LLMS.write_text(llms(), encoding="utf-8")
