#!/usr/bin/env bash
# For a machine where no registry and no Docker can be reached: makes a stand-in for the Dockerfile's base image out of
# Debian's packages, and tells buildah and podman how to do without systemd and without rights over limits.
#   eval "$(deploy/image/offline_base.sh FOLDER)" && deploy/image.sh
# Everything goes into FOLDER, images too. Needs root, and buildah podman runc debootstrap (apt-get install); for Compose
# also netavark aardvark-dns, by which containers find each other. The stand-in has Debian's own Python: the release that
# the base names, but not its last digit. Debian's Prometheus, where it is installed, stands in for the newer one that
# deploy/compose.yaml names.
set -euo pipefail

if [[ $# != 1 ]]; then
  echo "usage: eval \"\$($0 FOLDER)\"" >&2
  exit 2
fi
for tool in buildah podman runc debootstrap python3; do
  command -v "$tool" > /dev/null || { echo "$0 needs $tool, which is not installed." >&2; exit 2; }
done
repository=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)

base=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$repository/Dockerfile")
release=${base##*-} # such as bookworm

cat > "$folder/containers.conf" << END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
$([[ ! -x /usr/lib/podman/aardvark-dns ]] || printf '[network]\nnetwork_backend = "netavark"')
END
cat > "$folder/storage.conf" << END
[storage]
driver = "overlay"
graphroot = "$folder/images"
runroot = "$folder/run"
END
export CONTAINERS_CONF=$folder/containers.conf
export CONTAINERS_STORAGE_CONF=$folder/storage.conf
export BUILDAH_ISOLATION=chroot

make_base() {
  local root=$folder/root mirror
  # shellcheck disable=SC2016 # apt-get fills them in
  mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' 'Identifier: Packages' \
    | awk -v release="$release" '$2 == release { print $1; exit }')
  rm -rf "$root"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-pip \
    "$release" "$root" "${mirror:-http://deb.debian.org/debian}"
  rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/archives/*.deb "$root"/usr/share/{doc,man,locale,info}/*
  rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED
  : > "$root/etc/resolv.conf"
  for name in python3 python; do ln -s /usr/bin/python3 "$root/usr/local/bin/$name"; done
  local found=${base##*python:}
  found=${found%.*}
  chroot "$root" python3 -c "import sys; sys.exit('.'.join(map(str, sys.version_info[:2])) != '$found')" \
    || { echo "Debian's $release has another Python than the $found of $base." >&2; exit 1; }
  tar -C "$root" --numeric-owner -c . | podman import --quiet - "$base"
  rm -rf "$root"
}

make_prometheus() {
  local container
  container=$(buildah from --pull-never "$base")
  buildah copy --quiet "$container" "$(command -v prometheus)" /bin/prometheus
  buildah run "$container" -- install -d -o 65534 -g 65534 /prometheus
  buildah config --user 65534 --workingdir /prometheus --entrypoint '["/bin/prometheus"]' --cmd '' "$container"
  buildah commit --quiet --rm --format docker "$container" "$prometheus"
}

prometheus=$(sed -n 's|^ *image: *\([^ ]*/prometheus:[^ ]*\).*|\1|p' "$repository/deploy/compose.yaml")
{
  podman image exists "$base" || make_base
  ! command -v prometheus > /dev/null || podman image exists "$prometheus" || make_prometheus
} >&2

# Builds find packages as pip finds them here: its settings, certificates and folders are lent to them, and not kept.
build_flags=$(python3 - "$folder" << 'END'
"""Writes what pip is set to on this machine into FOLDER/pip.conf; prints the flags that lend it to a build."""

import ast
import re
import subprocess
import sys
from pathlib import Path

LISTS = ("find-links", "extra-index-url")
KNOWN = ("cert", "index-url", "proxy", "trusted-host", *LISTS)

lines = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
found = {}
for name, value in re.findall(r"^[^=]*\.([a-z-]+)=(.*)$", lines, re.MULTILINE):
    words = ast.literal_eval(value).split()
    if name in KNOWN:
        found[name] = list(dict.fromkeys([*found.get(name, []), *words])) if name in LISTS else words
config = Path(sys.argv[1], "pip.conf")
config.write_text("[global]\n" + "".join(f"{name} = {' '.join(words)}\n" for name, words in found.items()))
folders = {"/etc/ssl/certs"} if "cert" in found else set()
for word in (word for name in LISTS + ("index-url",) for word in found.get(name, [])):
    path = Path(word.removeprefix("file://"))
    if path.is_absolute() and path.is_dir():
        folders.add(str(path.parent if path.name == "simple" else path))  # the files of an index lie beside its pages
mounts = [f"{config}:/etc/pip.conf", *(f"{path}:{path}" for path in sorted(folders))]
print(*(f"--volume {mount}:ro" for mount in mounts), "--pull-never --build-arg TORCH_INDEX_URL=")
END
)

echo "The base $base is a stand-in from Debian's packages." >&2
for name in CONTAINERS_CONF CONTAINERS_STORAGE_CONF BUILDAH_ISOLATION; do printf 'export %s=%q\n' "$name" "${!name}"; done
printf 'export IMAGE_BUILD_FLAGS=%q\n' "$build_flags"
