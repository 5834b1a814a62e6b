"""Every sentence of findings in one page, to be read in one sitting: ``python -m tests.sentences`` writes it.

Templates are read from the source; examples have the values of `_VALUES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import memsize

PACKAGE = Path(memsize.__file__).parent
PAGE = PACKAGE.parent / "docs" / "sentences.md"
_SHORTEST = 12
"""The fewest letters of a template: shorter texts are names and parts of words."""
_HEAD = """\
# Sentences

Every sentence of a finding, by the rule that writes it. What is *in italics* stands for the figures and names of an
answer; angle brackets hold a part of the sentence, which is among those around it.
[Findings](findings.md) says what they mean; `python -m tests.sentences` writes this page anew.
"""


_VALUES = {
    "1.5 GiB": "",  # every other figure
    "A100 40GB": "gpu card cards name_of_card gpus",
    "fp32": "scenario name first other",
    "amp-bf16": "best",
    "batch": "vary",
    "64": "size next batch start least most step count all of matching times sizes elements blocks",
    "8": "ranks rank cells missing tensors matched real seqs",
    "2,048": "tokens about context prompt new parameters theirs ours longest each",
    "blocks.0 and fc": "layers names owners left done layer place",
    "train.py:12": "line at",
    "train.py --lr 1": "command",
    "backward": "phase where grows_in",
    "activations": "role roles noun kinds main",
    "float32[8,512]": "spec",
    "float16": "dtypes dtype",
    "addmm": "op",
    "29%": "share",
    "29": "trained bits printed",
    "adamw": "optimizer",
    "sample": "unit",
    "Training under fp32": "what",
    "7 processes": "others",
    "4321": "processes",
    "1 to 10 MiB": "tensor",
    "13 differ in shape": "problems",
    "net.py:Net": "model cell targets target",
    "torchinfo": "tool",
    "ValueError: no": "failure reason instead",
    "LoRA": "remedy together",
}
_VALUE_OF = {name: value for value, names in _VALUES.items() for name in names.split()}


def sentences() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        rules = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _makes_findings(node)]
        tables = [node for node in tree.body if isinstance(getattr(node, "value", None), ast.Dict)]
        tables = tables if path.parent.name == "findings" else []
        if entries := [entry for node in (*tables, *rules) for entry in _entry(node)]:
            parts += [f"## {path.relative_to(PACKAGE).with_suffix('').as_posix()}\n", *entries]
    return "\n".join(parts).rstrip() + "\n"


def codes(module: str) -> list[str]:
    """The codes of the rules that a module declares, as on the page and in its order: ``analysis/compare``."""
    section = PAGE.read_text("utf-8").partition(f"\n## {module}\n")[2].partition("\n## ")[0]
    rules = re.findall(r"^\*\*([\w-]+(?:, [\w-]+)*)\*\*$", section, re.MULTILINE)
    return [code for rule in rules for code in rule.split(", ")]


def _makes_findings(function: ast.FunctionDef) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
    return bool(names & {"Finding", "_about", "_copied", "out_of_memory", "rule"})


def _entry(rule: ast.stmt) -> Iterator[str]:
    if templates := list(dict.fromkeys(_templates(rule))):
        yield f"**{', '.join(_codes(rule)) or 'parts of sentences'}**\n"
        for template in templates:
            parts = re.split(r"{(\w+)[^}]*}", template)
            parts[1::2] = [f"*{_VALUE_OF.get(name, '1.5 GiB')}*" for name in parts[1::2]]
            parts[::2] = map(_escaped, parts[::2])
            yield f"- {''.join(parts)}"
        yield ""


def _codes(rule: ast.stmt) -> Iterator[str]:
    for decorator in getattr(rule, "decorator_list", ()):
        if isinstance(decorator, ast.Call):
            yield from (arg.value for arg in decorator.args if isinstance(arg, ast.Constant))


def _templates(node: ast.AST) -> Iterator[str]:
    """The sentences and parts of them below `node`: texts of several words, docstrings apart."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Compare | ast.Raise | ast.keyword) and not _is_sentence(child):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            text = _text(child)
            if " " in text.strip() and sum(map(str.isalpha, text)) >= _SHORTEST:
                yield text.strip()
        else:
            yield from _templates(child)


def _is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg in ("brief", "text")


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        f"⟨{ast.unparse(part.value)}⟩" if isinstance(part, ast.FormattedValue) else str(getattr(part, "value", ""))
        for part in node.values
    )


def _escaped(text: str) -> str:
    return text.translate(str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|#~"}))


if __name__ == "__main__":
    PAGE.write_text(sentences(), encoding="utf-8")
