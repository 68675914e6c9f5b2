"""The keys that open the server: whose they are, and where they come from. Knows no HTTP.

A key may have a name, which stands for whoever holds it wherever a key must not show. Several keys may share a name,
so that one can be exchanged for another. A key without one is given one of its own: what belongs to its holder, such as
cached prefixes and reports of requests, must never come to another.
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as SetOf
from dataclasses import dataclass
from pathlib import Path

from server.config import Settings
from server.settings_error import SettingsError

logger = logging.getLogger("octavo.api_keys")

ADMIN = "admin"  # the name of the admin key
MAX_KEYS = 10_000
_MAX_FILE_BYTES = 4 << 20
_SECONDS_BETWEEN_LOOKS = 2.0
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):\s*(.*)")


_Entries = tuple[tuple[bytes, str | None], ...]  # digests, and the names that are written before the keys


class UnusableKeys(ValueError):
    """Keys that cannot be served with; the message never holds one of them."""


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Whoever brought a key."""

    name: str
    is_admin: bool = False


class KeyRing:
    """All keys. A file of keys is read again when it changes."""

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None, admin_key: str | None = None) -> None:
        """`keys` are written `key` or `name:key`, and so are the lines of `file`. Raises UnusableKeys."""
        self._names_given: dict[bytes, str] = {}  # to keys without one, for as long as the server runs
        self._reserved: set[str] = set()  # those names
        self._last_number = 0
        listed = _parse(keys, "--api-key")
        if admin_key is not None and not _is_usable(admin_key):
            raise UnusableKeys("The admin key is empty, or has a space or a line break in it; one often ends a file.")
        self._admin = None if admin_key is None else _digest(admin_key.encode())
        self._file = None if file is None else file.expanduser()
        self._file_state: tuple[int, ...] | None = None  # in which its content is known
        self._complaint: tuple[tuple[int, ...] | None, str] | None = None  # the last one, while it stands
        self._next_look = 0.0
        from_file: _Entries = ()
        if self._file is not None:
            self._file_state = _state_of(self._file)
            from_file = _entries_of(self._file, _content_of(self._file))
        self._written_names = {name for _, name in listed if name is not None}
        names = self._written_names | {name for _, name in from_file if name is not None}
        self._listed = self._with_names(listed, "key", names)
        self._from_file = self._with_names(from_file, "file-key", names)
        self._all = _merged(self._listed, self._from_file, self._admin)
        self.is_open = not self._listed and self._file is None  # to everyone, but for what needs the admin key
        self.has_admin_key = self._admin is not None

    @property
    def names(self) -> list[str]:
        """Whose keys there are now, each once; where everyone may ask without a key, none but the admin's."""
        of_keys = dict.fromkeys(name for _, name in self._all)
        return [*([ADMIN] if self.has_admin_key else []), *of_keys]

    def holder(self, key: bytes) -> KeyHolder | None:
        """Whose key it is. Takes the same time whatever the key, so that it tells nothing about which one is close."""
        self._look_at_file()
        given = _digest(key)
        found = None
        for digest, name in self._all:
            if hmac.compare_digest(given, digest):
                found = KeyHolder(name)
        if self._admin is not None and hmac.compare_digest(given, self._admin):
            found = KeyHolder(ADMIN, is_admin=True)
        return found

    def _look_at_file(self) -> None:
        """Read the file again if it has changed; one that cannot be used changes nothing.

        One that cannot be read is tried at each look, so that no key outlives it once it can; the log says it once.
        """
        now = time.monotonic()
        if self._file is None or now < self._next_look:
            return
        self._next_look = now + _SECONDS_BETWEEN_LOOKS
        state = complaint = None
        try:
            state = _state_of(self._file)
            if state != self._file_state:
                content = _content_of(self._file)
                self._file_state = state
                entries = _entries_of(self._file, content)
                names = self._written_names | {name for _, name in entries if name is not None}
                self._from_file = self._with_names(entries, "file-key", names)
                self._all = _merged(self._listed, self._from_file, self._admin)
                logger.info("Read %d keys from %s again.", len(self._from_file), self._file)
        except UnusableKeys as error:
            complaint = (state, str(error))
            if complaint != self._complaint:
                logger.error("The keys stay as they were: %s", error)
        self._complaint = complaint

    def _with_names(self, entries: _Entries, prefix: str, names: SetOf[str]) -> tuple[tuple[bytes, str], ...]:
        """Give keys without a name one by their place, which they keep when the file's lines move.

        `names` are all that are written; one of them that was given to a key without a name raises UnusableKeys.
        """
        if clashing := names & self._reserved:
            raise UnusableKeys(f"The name {min(clashing)} was given to a key that has none; choose another.")
        keys = []
        for number, (digest, name) in enumerate(entries, start=1):
            if name is None and digest not in self._names_given:
                while (given := f"{prefix}-{number}") in names or given in self._reserved:
                    number = self._last_number = max(self._last_number, number) + 1
                self._last_number = max(self._last_number, number)
                self._names_given[digest] = given
                self._reserved.add(given)
            keys.append((digest, self._names_given[digest] if name is None else name))
        return tuple(keys)


def key_ring(settings: Settings) -> KeyRing:
    """The keys that the settings name. Raises SettingsError."""
    try:
        return KeyRing(settings.api_key, settings.api_key_file, settings.admin_api_key)
    except UnusableKeys as error:
        raise SettingsError(str(error)) from None


def _parse(lines: Iterable[str], where: str) -> _Entries:
    keys: list[tuple[bytes, str | None]] = []
    for number, line in enumerate(lines, start=1):
        named = _NAMED.fullmatch(line)
        name, key = (named[1], named[2]) if named else (None, line)
        if name == ADMIN:
            raise UnusableKeys(f"{where} has a key with the name {ADMIN}, which is that of --admin-api-key.")
        if not _is_usable(key):
            raise UnusableKeys(f"{where} has an entry (number {number}) that is neither a key nor name:key.")
        keys.append((_digest(key.encode()), name))
    if len(keys) > MAX_KEYS:
        raise UnusableKeys(f"{where} has {len(keys)} keys; at most {MAX_KEYS} are looked through for a request.")
    return tuple(keys)


def _is_usable(key: str) -> bool:
    return bool(key) and not any(char.isspace() for char in key)


def _merged(
    listed: tuple[tuple[bytes, str], ...], from_file: tuple[tuple[bytes, str], ...], admin: bytes | None
) -> tuple[tuple[bytes, str], ...]:
    names: dict[bytes, str] = {}
    for digest, name in (*listed, *from_file):
        if names.setdefault(digest, name) != name:
            raise UnusableKeys(f"One key has two names, {names[digest]} and {name}.")
    if admin in names:
        raise UnusableKeys(f"The admin key is also the key of {names[admin]}.")
    return tuple(names.items())


def _content_of(file: Path) -> bytes:
    """At most a byte more than it may have."""
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UnusableKeys(f"The file of keys {file} cannot be read: {error.strerror}.") from None


def _entries_of(file: Path, content: bytes) -> _Entries:
    try:
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise UnusableKeys(f"The file of keys {file} is not UTF-8 text.") from None
    if len(content) > _MAX_FILE_BYTES:
        raise UnusableKeys(f"The file of keys {file} has more than {_MAX_FILE_BYTES} bytes.")
    keys = _parse((line for line in lines if line and not line.startswith("#")), str(file))
    if not keys:
        raise UnusableKeys(f"The file of keys {file} holds none.")
    return keys


def _state_of(file: Path) -> tuple[int, ...]:
    """Differs after a change: a file is replaced or written to, or may be read by others than before."""
    try:
        status = file.stat()
    except OSError as error:
        raise UnusableKeys(f"The file of keys {file} cannot be read: {error.strerror}.") from None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys: comparing two keys would tell whether theirs is."""
    return hashlib.sha256(key).digest()
