"""The command `octavo`: `serve`, `pull`, `load-test`. Turns wrong usage into one sentence and exit code 2.

Flags of `serve` come from the fields of Settings. Heavy parts are imported only by the command that needs them.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic_settings import CliSettingsSource

from kernels import __version__
from server.config import Settings, flag_of, load_settings
from server.settings_error import SettingsError, suggestion

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as shells report it
_LOAD_TEST = "load-test"
_UNSET_DEFAULT = re.compile(r" \(default: (?:None|\(\))\)")


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage as one sentence, without the whole usage text before it."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message[0].upper() + message[1:].rstrip(".") + ".")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (the process's own by default); returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == [_LOAD_TEST]:
        return _load_test(arguments[1:])
    parser, serve_parser = _build_parsers()
    flags_source = CliSettingsSource[argparse.ArgumentParser](
        Settings, root_parser=serve_parser, add_argument_method=_add_argument
    )
    try:
        parsed, unknown = parser.parse_known_args(arguments)
        if unknown:
            _refuse_unknown(unknown[0], parsed.command)
        match parsed.command:
            case "serve":
                return _serve(_flags_of(flags_source, parsed))
            case "pull":
                return _pull(parsed.model, {} if parsed.home is None else {"home": parsed.home})
            case _:
                parser.print_help(sys.stderr)
                return EXIT_USAGE
    except SettingsError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _build_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The whole command's parser and, inside it, that of `serve`, which has no flags yet."""
    parser = _Parser(prog="octavo", description="An LLM serving server on a paged KV cache.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. A flag goes before its variable, a variable before the --config file.",
        allow_abbrev=False,
    )
    serve.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    pull = commands.add_parser(
        "pull", help="download a model", description="Download a model into the cache folder.", allow_abbrev=False
    )
    pull.add_argument("model", metavar="MODEL", help="a known name (smollm2, gemma3-270m) or a hub id (org/name)")
    pull.add_argument("--home", metavar="DIR", help="cache folder [env: OCTAVO_HOME]")
    # Has its flags from its own package, which main hands the arguments to; here it stands for the list of commands.
    commands.add_parser(_LOAD_TEST, help="send load to any OpenAI-compatible server and measure it", add_help=False)
    return parser, serve


def _add_argument(parser: Any, *names: str, **options: Any) -> argparse.Action:  # noqa: ANN401
    """Add a flag as pydantic-settings asks, with a help text for people: no Python types, no empty defaults."""
    if isinstance(options.get("help"), str):
        options["help"] = _UNSET_DEFAULT.sub("", options["help"]).replace("%", "%%")
    if options.get("metavar") == "{bool,None}":  # a switch without a default is a switch all the same
        del options["metavar"]
        options["action"] = argparse.BooleanOptionalAction
    metavar = options.get("metavar")
    if isinstance(metavar, str) and (not metavar.startswith("{") or metavar.endswith(",None}")):
        options["metavar"] = names[-1].removeprefix("--").rpartition("-")[2].upper()
    action: argparse.Action = argparse.ArgumentParser.add_argument(parser, *names, **options)
    return action


def _flags_of(source: "CliSettingsSource[argparse.ArgumentParser]", parsed: argparse.Namespace) -> dict[str, Any]:
    for name, value in vars(parsed).items():
        # `--api-key "$KEY"` with nothing in $KEY must not start a server that asks for no key.
        if value == "" or (isinstance(value, list) and "" in value):
            raise SettingsError(f"{flag_of(name)} must not be empty.")
    source(parsed_args=parsed)
    flags: dict[str, Any] = {name: value for name, value in source().items() if name in Settings.model_fields}
    if parsed.model_argument is not None:
        if "model" in flags:
            raise SettingsError("Give the model once, either as MODEL or as --model.")
        flags["model"] = parsed.model_argument
    return flags


def _refuse_unknown(argument: str, command: str | None) -> NoReturn:
    if not argument.startswith("-"):
        raise SettingsError(f"There is one argument too many: {argument}.")
    name = argument.split("=")[0]
    known = [flag_of(field) for field in Settings.model_fields] if command == "serve" else ["--home"]
    raise SettingsError(f"There is no flag {name}{suggestion(name, known)}")


def _serve(flags: dict[str, Any]) -> int:
    settings = load_settings(flags)
    from server.serve import serve

    return serve(settings)


def _pull(model: str, flags: dict[str, Any]) -> int:
    settings = load_settings(flags)
    from server.download_progress import terminal_progress
    from server.model_store import ModelStoreError, pull

    try:
        with terminal_progress() as on_progress:
            path = pull(model, settings.home, on_progress)
    except ModelStoreError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return EXIT_FAILURE
    print(path)
    return 0


def _load_test(arguments: Sequence[str]) -> int:
    from server.load_test.command import main as load_test

    return load_test(arguments)


if __name__ == "__main__":
    sys.exit(main())
