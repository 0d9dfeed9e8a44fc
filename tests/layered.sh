#!/usr/bin/env bash
# Runs a script as root in a layer over this machine's files (see layer.sh): tests/layered.sh SCRIPT FILE...
# The files, the project and the script are to be found in /run/test. Processes and mounts end with the script.
set -euo pipefail
project=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
trap 'rmdir "$work"' EXIT
. "$project/tests/layer.sh"
inside() {
  layer "$work"
  mkdir "$work/run/test" "$work/run/test/project"
  mount --bind "$project" "$work/run/test/project"
  cp "$@" "$work/run/test/"
  exec env -i PATH="$PATH" HOME=/root chroot "$work" bash -euo pipefail "/run/test/$(basename "$1")"
}
export -f layer inside
export project work
unshare --pid --mount --ipc --fork --kill-child bash -euo pipefail -c 'inside "$@"' sh "$@"
