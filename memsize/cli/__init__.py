"""The command line. A command parses, calls one API function, and writes one output.

Only `main` prints an error and picks the exit status: 0 when the command did what it was asked, 2 when the user has to
change something, 1 for a bug in memsize, 130 after Ctrl-C, 141 when the reader of a pipe went away.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import click

from memsize.cli.working import Session, fill_closed_streams, give_up_stdout, say
from memsize.errors import MemsizeError, TorchMissingError, first_line, in_one_line, nearest, quoted
from memsize.interrupt import INTERRUPTED
from memsize.printable import LONGEST, shortened
from memsize.spec.other_names import other_name

_USER, _BUG, _PIPE_CLOSED = 2, 1, 141


_QUESTIONS = {
    "What is each byte for, and why did it not shrink?": {
        "report": "Show what each byte is for, and why a model did or didn't shrink.",
        "checkpoint": "Show what takes up the space in a checkpoint file.",
        "layout": "Show which layers keep channels last, and what gets copied.",
    },
    "What happens on a GPU, and when?": {
        "run": "Run your own script on a GPU you don't have.",
        "timeline": "Show live memory over a training step.",
        "explain": "Explain an out-of-memory error, from its message or a memory snapshot of a real GPU.",
        "watch": "Watch a job on this machine's GPU, beside its prediction.",
    },
    "Will it fit?": {
        "fit": "Find the largest batch that fits, and how to fit a larger one.",
        "fit-script": "Find the largest value of a script's own argument that fits.",
        "sweep": "Show which of many models and batches fit which GPUs.",
        "generate": "Show what prefill, decode and the KV cache hold.",
        "serve": "Show how many tokens and requests a paged server has room for.",
    },
    "What changed, and is it right?": {
        "diff": "Show what changed from one version of a model to another.",
        "check": "Check limits and baselines of a project's models.",
        "init": "Write the first limits of a project.",
        "verify": "Compare predictions with a real GPU.",
    },
    "Which names are there?": {
        "gpus": "List the GPUs whose memory is known.",
        "models": "List the models of timm, torchvision, transformers and the Hub.",
        "scenarios": "List the ways to store and run a model.",
    },
    "For agents": {
        "mcp": "Serve these commands to an agent, as tools of the Model Context Protocol.",
    },
}
"""The commands by the question that they answer, and what each does: the overview of them imports none. Each is in
`memsize.cli.answers` except those of `_MODULES`.
"""
_COMMANDS = {name: text for commands in _QUESTIONS.values() for name, text in commands.items()}
_MODULES = {
    "run": "program",  # `memsize.cli.run` starts them all, below
    "init": "check",
    **dict.fromkeys("gpus models scenarios".split(), "names"),
    **{name: name for name in "check mcp report watch".split()},
}


class _Commands(click.Group):
    """Imports a command when it is asked for: the others' modules would take longer than some of them run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for question, commands in _QUESTIONS.items():
            formatter.write(f"\n{question}\n")  # a section's heading would end in a colon
            with formatter.indentation():
                formatter.write_dl(list(commands.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # of which click would say an empty line
            return INTERRUPTED

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = ", ".join(nearest(args[0], tuple(_COMMANDS)))
        if args[0] not in _COMMANDS and near and not args[0].startswith("-"):
            ctx.fail(f"No such command {quoted(args[0])}: did you mean {near}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"memsize.cli.{_MODULES.get(cmd_name, 'answers')}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        command.short_help = _COMMANDS[cmd_name]
        return command


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="memsize", message="%(prog)s %(version)s")
@click.pass_context
def memsize(context: click.Context) -> None:
    """Predict the GPU memory of PyTorch models and scripts, and account for every byte.

    \b
    Start with:
      memsize report model.py:Net --input 3,64,64
      memsize fit model.py:Net --input 3,64,64 --train adamw --gpu t4
      memsize run --gpu t4 train.py

    No GPU needed: your own code runs on tensors that have shapes and dtypes but no values.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `memsize` with `arguments` (None: the process's own) and exit."""
    # A collector that scans what importing torch makes, and every record of a run, costs a tenth of a short command.
    # What it would free is little, and the process ends soon; forked ones would copy each page that it touches.
    gc.disable()
    fill_closed_streams()
    status = run(sys.argv[1:] if arguments is None else arguments)
    if status != _PIPE_CLOSED:
        give_up_stdout()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run `memsize` with `arguments`, print what goes wrong on stderr, and return the exit status."""
    session = Session()
    try:
        result = memsize.main(list(arguments), prog_name="memsize", standalone_mode=False, obj=session)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            return _without_torch(arguments, session)
        return _fail(_bug(error, session), session, _BUG)
    except TorchMissingError:
        return _without_torch(arguments, session)
    except MemsizeError as error:
        return _fail(str(error), session, _USER)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(_usage(error), session, error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        return _PIPE_CLOSED
    except OSError as error:
        path = "" if error.filename is None else f"{quoted(str(error.filename))}: "
        return _fail(f"{path}{error.strerror or first_line(error)}", session, _USER)
    except Exception as error:
        return _fail(_bug(error, session), session, _BUG)
    return result if isinstance(result, int) else 0


def _without_torch(arguments: Sequence[str], session: Session) -> int:
    """Print what is known of a preset all the same, or which have names like it, and how to install PyTorch."""
    from memsize.loading.presets import is_hub_id, presets, unknown_id

    for argument in arguments:
        name = argument.removeprefix("hf:").removeprefix("diffusers:")
        if preset := presets().get(name):
            click.echo(preset.figures)
        elif is_hub_id(name) and nearest(name, tuple(presets())):
            return _fail(f"{unknown_id(name)}; {TorchMissingError()}", session, _USER)
    return _fail(str(TorchMissingError()), session, _USER)


_INSTEAD: dict[tuple[str | None, str], str] = {
    ("check", "--compile"): 'write scenario = "fp32+compile" in the file',
    ("serve", "--compile"): "vLLM compiles models itself, which serve counts; --enforce-eager leaves it out",
}
"""What a command has in place of an option of others."""
_HELP = {"help": "--help"}


def _usage(error: click.ClickException) -> str:
    """Return the mistake in the arguments, the option that may be meant, and the command that explains them."""
    text, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    if context is None:
        return text
    if isinstance(error, click.NoSuchOption):
        flags = {flag.lstrip("-"): flag for parameter in context.command.params for flag in parameter.opts} | _HELP
        meant = other_name(error.option_name, flags.values())
        name = error.option_name.lstrip("-")
        near = (meant,) if meant else nearest(name, flags)
        hint = f": did you mean {', '.join(near)}?" if near else ""
        if not any(flag.lstrip("-").startswith(name) or flag == meant for flag in near):
            hint = _elsewhere(error.option_name, context) or hint
        text = f"no such option {quoted(error.option_name)}{hint}"
    return f"{text[:1].lower()}{text[1:]} ({context.command_path} --help)"


def _elsewhere(flag: str, context: click.Context) -> str:
    """Where an option of other commands belongs: in the file of a sweep or a check, or behind those commands."""
    if instead := _INSTEAD.get((context.info_name, flag)):
        return f": {instead}"
    names = ("report", "timeline", "fit", "generate", "serve")
    commands = {name: memsize.get_command(context, name) for name in names if name != context.info_name}
    having = [name for name, command in commands.items() if command and any(flag in p.opts for p in command.params)]
    if having and context.info_name in ("sweep", "check"):
        return f": write {flag.lstrip('-').replace('-', '_')} = … in the file"
    *others, last = having or [""]
    both = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    return f": memsize {both} it" if having else ""


def _bug(error: Exception, session: Session) -> str:
    return f"this is a bug in memsize: {in_one_line(error)}{'' if session.debug else '; --debug shows where'}"


def _fail(message: str, session: Session, status: int) -> int:
    with suppress(OSError):  # there may be nobody to tell it to
        if session.debug:
            say(traceback.format_exc().rstrip("\n"))
        lines = filter(None, map(str.strip, message.splitlines()))
        say(f"error: {shortened('; '.join(lines), LONGEST)}")
    return status
