"""How commands show their help: options in groups, within 80 columns, no word or name broken."""

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from mtabench.errors import near_names
from mtabench.options import COMMANDS, LIST, PANELS, Fields, Options

WIDTH = 80
NAMES = 26  # columns of an option's name; a longer one has a line of its own


class App(typer.Typer):
    """A Typer whose commands show their help as this module says; it is plain text, and Rich is not loaded for it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=CommandGroup, rich_markup_mode=None, pretty_exceptions_enable=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """As Typer's; `rich_help_panel` is the group of a command in the list of all.

        A parameter that is a dataclass, annotated with `Fields`, stands for the options that they name. Where `pass_`
        is none of them, it is the command's name.
        """
        register = super().command(name, cls=Command, **settings)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register(_with_options(function, name or function.__name__))
            return function

        return decorate


def _with_options(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with an option in the place of each field that its dataclasses are to be made of."""
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for group, hint in get_type_hints(function, include_extras=True).items():
        parts = get_args(hint)
        if parts and isinstance(parts[-1], Fields):
            found = parts[-1].parameters(parts[0])
            groups[group] = parts[0], [one.name for one in found]
            parameters += found
        elif group != "return":
            default = signature(function).parameters[group].default
            parameters.append(Parameter(group, Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    @wraps(function)
    def call(**given: Any) -> Any:
        for group, (kind, names) in groups.items():
            made = {field: given.pop(field) for field in names}
            given[group] = kind(**({"pass_": name} if kind is Options else {}), **made)
        return function(**given)

    call.__dict__["__signature__"] = Signature(parameters)
    call.__dict__["lists"] = [one.name for one in parameters if LIST in get_args(one.annotation)]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


class _Helpful:
    """What a command and a group have in common."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: usage, text, arguments, and options by groups."""
        formatter.write("\n".join(_lines(self, ctx, min(WIDTH, shutil.get_terminal_size().columns))))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As Typer's; an error says of which command it is, so that its help can be named."""
        try:
            return super().parse_args(ctx, _joined(ctx.command, args))  # type: ignore[misc]
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            if hasattr(error, "possibilities"):
                _offer_near(error, ctx)
            raise


def _joined(command: Any, args: Sequence[str]) -> list[str]:
    """What was typed, with the lists of an option that was given several times in its first place.

    Of any other option given twice the last counts.
    """
    of_lists = getattr(command.callback, "lists", ())
    lists = {name for param in command.params if param.name in of_lists for name in param.opts}
    joined: list[str] = []
    places: dict[str, int] = {}
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in lists:
            joined.append(word)
            continue
        following = value if equals else next(words, None)
        if following is None:
            joined.append(word)
        elif name in places:
            joined[places[name]] += f",{following}"
        else:
            joined += [name, following]
            places[name] = len(joined) - 1
    return joined


class Command(_Helpful, TyperCommand):
    """A command."""


class CommandGroup(_Helpful, TyperGroup):
    """A command of commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer's; an error names the commands of other groups that are called so."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            paths = _commands(ctx.find_root().command, "mtabench")
            if found := [path for path in paths if path.endswith(f" {args[0]}")]:
                error.message = f"No such command {args[0]!r}; there is `{'`, `'.join(found)}`"  # type: ignore[attr-defined]
            raise


def _offer_near(error: Any, ctx: Any) -> None:
    """Of options that Typer offers keep those that are near: it counts the dashes, which all share."""
    own = (name for param in ctx.command.params for name in param.opts)
    possible = list(dict.fromkeys(name.lstrip("-") for name in (*(error.possibilities or ()), *own)))
    word = error.option_name.lstrip("-")
    near = near_names(word, possible) or [name for name in possible if len(name) > 2 and word.startswith(name)]
    error.possibilities = [f"--{name}" for name in near]


def _commands(group: Any, path: str) -> Iterator[str]:
    """Every command as typed."""
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path} {name}"
        yield from _commands(command, f"{path} {name}")


def _lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    """The help of a command in lines of `width` columns at most, but for words that are longer."""
    yield from _wrapped(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width, "", "  ")
    yield ""
    yield from _wrapped(command.help or "", width, "  ", "  ")
    for heading, rows in _sections(command, ctx).items():
        yield ""
        yield f"{heading}:"
        for name, text in rows:
            yield from _row(name, text, width)
    for text in (command.epilog or "").splitlines():
        yield ""
        yield from _wrapped(text, width, "", "  ")


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and texts by heading: arguments, options by their groups, commands by theirs."""
    headings = ("Arguments", *PANELS, "Options", *COMMANDS, "Commands")
    sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in headings}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if param.param_type_name == "argument":
            sections["Arguments"].append((param.metavar, record[1]))
        elif record:
            sections[getattr(param, "rich_help_panel", None) or "Options"].append(record)
    for name, found in getattr(command, "commands", {}).items():
        first = (found.help or "").split(". ")[0].rstrip(".")
        sections[getattr(found, "rich_help_panel", None) or "Commands"].append((name, f"{first}."))
    return {heading: rows for heading, rows in sections.items() if rows}


def _row(name: str, text: str, width: int) -> Iterator[str]:
    """A name and its text beside it, which begins below where the name is too long."""
    column = 2 + NAMES + 2
    first, *others = _wrapped(text, width, " " * column, " " * column) or [""]
    if len(name) > NAMES:
        yield f"  {name}"
        yield first
    else:
        yield f"  {name:<{NAMES}}  {first[column:]}".rstrip()
    yield from others


def _wrapped(text: str, width: int, first: str, others: str) -> Sequence[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
