"""Keys: how they are written, whose they are, and a file of them that changes while the server runs."""

import os
from pathlib import Path

import pytest

from server import api_keys
from server.api_keys import KeyRing, UnusableKeys


def name_of(ring: KeyRing, key: str) -> str | None:
    holder = ring.holder(key.encode())
    return None if holder is None else holder.name


@pytest.fixture
def looks_each_time(monkeypatch):
    monkeypatch.setattr(api_keys, "_SECONDS_BETWEEN_LOOKS", 0.0)


@pytest.mark.parametrize(
    ("written", "key", "name"),
    [
        ("secret", "secret", "key-1"),
        ("alice:secret", "secret", "alice"),
        ("team.a_1-x: secret", "secret", "team.a_1-x"),
        ("alice:sk:with:colons", "sk:with:colons", "alice"),
        ("!secret:x", "!secret:x", "key-1"),
        ("zwölf", "zwölf", "key-1"),
    ],
)
def test_a_key_may_have_a_name(written, key, name):
    ring = KeyRing([written])
    assert name_of(ring, key) == name
    for wrong in ("", key[:-1], key + "x", key.upper() if key != key.upper() else "?", name):
        assert name_of(ring, wrong) is None
    assert not ring.is_open


def test_without_keys_it_is_open():
    assert KeyRing().is_open
    assert KeyRing(admin_key="root").is_open
    assert KeyRing().holder(b"x") is None


def test_several_keys_may_share_a_name():
    ring = KeyRing(["alice:old", "alice:new", "bob:other"])
    assert [name_of(ring, key) for key in ("old", "new", "other")] == ["alice", "alice", "bob"]


@pytest.mark.parametrize(
    "keys", [["a b"], ["alice:"], ["alice: "], [""], ["admin:x"], ["alice:x", "bob:x"], ["alice:x", "x"], ["a\tb"]]
)
def test_keys_that_cannot_be_used(keys):
    with pytest.raises(UnusableKeys) as error:
        KeyRing(keys)
    assert "a b" not in str(error.value)


@pytest.mark.parametrize("key", ["root\n", "root ", " root", "ro ot", "", " "])
def test_an_admin_key_that_no_header_could_carry_is_refused(key):
    """As `echo root | base64` makes one for a Secret: it would open nothing, and nobody would know why."""
    with pytest.raises(UnusableKeys, match="admin key") as refusal:
        KeyRing(admin_key=key)
    assert "root" not in str(refusal.value)


def test_the_admin_key_is_a_key_of_its_own():
    ring = KeyRing(["alice:a"], admin_key="root")
    holder = ring.holder(b"root")
    assert holder is not None
    assert (holder.name, holder.is_admin) == ("admin", True)
    assert ring.holder(b"a").is_admin is False
    with pytest.raises(UnusableKeys, match="also the key of alice"):
        KeyRing(["alice:root"], admin_key="root")


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes("\ufeff# people\n\nalice: a\r\n  bob:b  \nbare\n".encode())
    ring = KeyRing(["carol:c"], file)
    assert [name_of(ring, key) for key in ("a", "b", "bare", "c", "people")] == [
        "alice",
        "bob",
        "file-key-3",
        "carol",
        None,
    ]


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"two words\n", b"\xff\xfe", b"x\n" * 3_000_000])
def test_a_file_that_cannot_be_used(tmp_path, content):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(UnusableKeys, match="keys"):
        KeyRing(file=file)
    with pytest.raises(UnusableKeys, match="cannot be read"):
        KeyRing(file=tmp_path / "none")


def test_a_file_is_read_again_when_it_changes(tmp_path, looks_each_time, caplog):
    file = tmp_path / "keys"
    file.write_text("alice: a\n")
    ring = KeyRing(["carol:c"], file)
    new = tmp_path / "new"
    new.write_text("bob: b\n")
    new.replace(file)
    assert [name_of(ring, key) for key in ("a", "b", "c")] == [None, "bob", "carol"]
    file.write_text("# all gone, by mistake\n")
    assert name_of(ring, "b") == "bob"
    file.unlink()
    assert name_of(ring, "b") == "bob"
    file.write_text("dora: c\n")  # a key that has another name already
    assert [name_of(ring, key) for key in ("b", "c")] == ["bob", "carol"]
    assert sum("stay as they were" in record.getMessage() for record in caplog.records) == 3
    file.write_text("erin: e\n")
    assert [name_of(ring, key) for key in ("b", "c", "e")] == [None, "carol", "erin"]


def test_a_key_without_a_name_keeps_the_one_it_was_given_when_lines_move(tmp_path, looks_each_time, caplog):
    """The name tells whose cached prefixes and whose requests they are: those of who left are nobody else's."""
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    ring = KeyRing(["c"], file)
    assert [name_of(ring, key) for key in "abc"] == ["file-key-1", "file-key-2", "key-1"]
    file.write_text("b\nd\n")  # a left
    assert [name_of(ring, key) for key in "abc"] == [None, "file-key-2", "key-1"]
    new = name_of(ring, "d")
    assert new not in {None, "file-key-1", "file-key-2", "key-1"}
    file.write_text("e\nd\na\n")
    assert [name_of(ring, key) for key in "ad"] == ["file-key-1", new]
    assert name_of(ring, "e") not in {None, new, "file-key-1", "file-key-2", "key-1"}
    for name in ("file-key-1", "key-1"):
        file.write_text(f"{name}: f\n")  # by hand, after the server gave it
        assert name_of(ring, "f") is None
    assert sum("stay as they were" in record.getMessage() for record in caplog.records) == 2


def test_no_key_is_given_a_name_that_another_one_has(tmp_path):
    file = tmp_path / "keys"
    file.write_text("d\nkey-2: e\nfile-key-1: f\n")
    ring = KeyRing(["key-1: a", "b", "c"], file)
    names = [name_of(ring, key) for key in "abcdef"]
    assert None not in names
    assert len(set(names)) == 6


def test_a_file_that_could_not_be_read_is_tried_again(tmp_path, looks_each_time, monkeypatch, caplog):
    file = tmp_path / "keys"
    file.write_text("alice: revoked\n")
    ring = KeyRing(file=file)
    file.write_text("alice: new\n")

    def refuse(*_args: object) -> None:
        raise PermissionError(13, "Permission denied")

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", refuse)
            assert [name_of(ring, key) for key in ("revoked", "new", "new")] == ["alice", None, None]
        assert [name_of(ring, key) for key in ("revoked", "new")] == [None, "alice"]
        file.write_text("alice: revoked\n")
        assert name_of(ring, "revoked") == "alice"
        file.write_text("alice: new\n")
    assert sum("stay as they were" in record.getMessage() for record in caplog.records) == 2


def test_a_change_that_keeps_size_and_time_is_seen(tmp_path, looks_each_time):
    file = tmp_path / "keys"
    file.write_text("alice: old\n")
    ring = KeyRing(file=file)
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files has its steps
        file.write_text("alice: new\n")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [name_of(ring, key) for key in ("old", "new")] == [None, "alice"]


def test_a_file_is_not_looked_at_for_every_request(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice: a\n")
    ring = KeyRing(file=file)
    assert name_of(ring, "a") == "alice"
    file.write_text("bob: b\n")
    assert name_of(ring, "a") == "alice"


def test_every_key_is_compared(monkeypatch):
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    ring = KeyRing(["a:first", "b:second", "c:a-much-longer-one"], admin_key="root")
    for key in (b"first", b"second", b"", b"x" * 1000):
        compared.clear()
        ring.holder(key)
        assert compared == [(32, 32)] * 4


def test_whose_keys_there_are_is_told_without_the_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("bob: b\nsecret\n")
    ring = KeyRing(["a:first", "a:second", "third"], file, "root")
    assert ring.names == ["admin", "a", "key-3", "bob", "file-key-2"]
    assert KeyRing().names == []
    assert KeyRing(admin_key="root").names == ["admin"]
