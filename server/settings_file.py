"""Reads the configuration file. Knows which settings there are only from its caller, and no values they may have."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.settings_error import SettingsError, suggestion


def read_settings_file(path: Path, known: Sequence[str]) -> dict[str, Any]:
    """The settings in the TOML file at `path`; those that are `known` may stand there. Raises SettingsError."""
    try:
        with path.expanduser().open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"The configuration file {path} is not valid TOML: {error}.") from None
    # Keys may be written like flags, with hyphens.
    values = {key.replace("-", "_"): value for key, value in values.items()}
    for key in values:
        if key not in known:
            raise SettingsError(f"There is no setting {key} (in {path}){suggestion(key, list(known))}")
    return values
