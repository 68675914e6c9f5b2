"""The cache folder on a volume as Kubernetes hands it over: whether packed weights are kept there, and used again."""

import logging
import os
import stat

import pytest

from models.packed_weights import PackedWeights
from tests.models.test_packed_weights import made_weights, model  # noqa: F401 - a fixture

GROUP_OF_FILES, GROUP_OF_FOLDERS = 0o660, stat.S_ISGID | 0o770


def give_to_group(volume):
    """What kubelet does for `fsGroup` (pkg/volume/volume_linux.go), but for the owner, who is the same user here."""
    for path in (volume, *volume.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (GROUP_OF_FOLDERS if path.is_dir() else GROUP_OF_FILES))


@pytest.fixture
def volume(tmp_path):
    """A new one, given to the group before the first pod starts: its top folder alone."""
    path = tmp_path / "cache"
    path.mkdir()
    give_to_group(path)
    return path


def packed_weights(volume):
    return PackedWeights(volume / "octavo" / "packed", 2)


def test_the_second_pod_finds_what_the_first_one_packed(volume, model):  # noqa: F811
    """With fsGroupChangePolicy: OnRootMismatch nothing is changed, since the top folder is as it should be."""
    assert packed_weights(volume).write(model, made_weights())
    assert packed_weights(volume).read(model) is not None
    assert (volume / "octavo").stat().st_gid == volume.stat().st_gid


def test_what_was_given_to_the_group_again_is_not_used(volume, model, caplog):  # noqa: F811
    """With Always, kubelet would let the group write to the files at each start, and every start would pack again."""
    assert packed_weights(volume).write(model, made_weights())
    give_to_group(volume)
    with caplog.at_level(logging.WARNING):
        assert packed_weights(volume).read(model) is None
        assert not packed_weights(volume).write(model, made_weights())
    assert "other users may write to it" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_volume_that_another_user_filled_is_not_used(volume, model, caplog):  # noqa: F811
    """As after changing runAsUser: the models are read, the packed weights are not."""
    assert packed_weights(volume).write(model, made_weights())
    for path in volume.rglob("*"):
        os.chown(path, 10001, 10001)
    with caplog.at_level(logging.WARNING):
        assert packed_weights(volume).read(model) is None
    assert "belongs to another user" in caplog.text
