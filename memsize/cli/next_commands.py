"""The commands that answer the next question, for an agent."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click

from memsize.cli.click_options import MANY, RequestCommand, arguments_of, is_given
from memsize.spec.options import options_of

_QUESTIONS = {
    "report": {"fit": "the largest batch that fits a GPU", "timeline": "what is alive at each moment"},
    "timeline": {"fit": "the largest batch that fits a GPU", "report": "each layer"},
    "fit": {"timeline": "what is alive at each moment", "report": "each layer"},
    "generate": {"serve": "how many sequences a server has room for"},
    "serve": {"generate": "one generation, token by token"},
}
"""What other commands answer about the model that a command was asked about."""


def next_commands() -> Iterator[str]:
    """The lines, for an agent, with the commands that answer the next question, with the options that were given."""
    context = click.get_current_context()
    assert isinstance(context.command, RequestCommand)
    group = context.parent and context.parent.command
    own = {choice.flag: key for key, choice in options_of(context.command.request).items() if not choice.positional}
    title = "Next\n"
    for name, question in _QUESTIONS.get(str(context.command.name), {}).items():
        following = group.get_command(context, name) if isinstance(group, click.Group) else None
        if not isinstance(following, RequestCommand):
            continue
        texts: list[str] = []
        for key, choice in options_of(following.request).items():
            key = own.get(choice.flag, key)
            if choice.written and key in context.params and (choice.positional or is_given(key)):
                value = context.params[key]
                if isinstance(value, tuple) and choice.kind not in MANY:  # such as GPUs, where this takes one
                    value = str(value[0]).partition(",")[0]
                texts += arguments_of(choice, value)
        yield f"{title}  {shlex.join(('memsize', name, *texts))}  # {question}\n"
        title = ""
