"""What is found out about a server before any load: the model to ask for, its window; and with which key to ask."""

import argparse
from pathlib import Path

from server.config import client_api_key
from server.load_test.client import Client
from server.load_test.exchange_errors import ExchangeFailed
from server.settings_error import SettingsError


async def meet(client: Client, options: argparse.Namespace) -> tuple[str, int | None]:
    """The model to ask for, and the most tokens that it takes where the server says so.

    Raises:
        SettingsError: no model was given, and the server names none.
        ExchangeFailed: nobody listens.
    """
    if options.model is not None and options.max_model_len is not None:
        return options.model, options.max_model_len
    try:
        listed = (await client.get_json("/v1/models"))["data"]
        models = {str(row["id"]): row.get("max_model_len") for row in listed}
    except (ExchangeFailed, KeyError, TypeError, AttributeError) as failure:
        if isinstance(failure, ExchangeFailed) and failure.kind == "connect":
            raise
        if options.model is None:
            reason = failure.message if isinstance(failure, ExchangeFailed) else "its list has another form"
            raise SettingsError(f"The server does not list its models ({reason}): give --model.") from None
        return options.model, options.max_model_len
    if options.model is None and not models:
        raise SettingsError("The server lists no model: give --model.")
    model = options.model or next(iter(models))
    length = models.get(model)
    return model, options.max_model_len or (length if isinstance(length, int) else None)


def headers_of(options: argparse.Namespace) -> dict[str, str]:
    """Headers of each request: the key, and what else was given.

    Raises:
        SettingsError: there is no key where one was named, or none that can be sent.
    """
    key = options.api_key or client_api_key()
    if options.api_key_file is not None:
        key = _first_line(options.api_key_file)
    headers = dict(options.header)
    if key:
        if not (key.isascii() and key.isprintable()):
            raise SettingsError("The key has characters that cannot stand in a header.")
        headers = {"Authorization": f"Bearer {key}", **headers}
    return headers


def _first_line(path: Path) -> str:
    try:
        line = path.read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The key file {path} cannot be read: {error}.") from None
    if not line:
        raise SettingsError(f"The first line of {path} has no key.")
    return line
