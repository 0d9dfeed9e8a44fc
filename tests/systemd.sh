#!/usr/bin/env bash
# Boots a real systemd with the project's units and runs tests/systemd_check.sh in it: tests/systemd.sh BINARY MODEL.
# It has namespaces of its own and, as root, a layer over this machine's files: whatever it writes goes to memory and is
# gone with it. Its exit status is that of the checks.
set -euo pipefail
binary=$(realpath "$1")
model=$(realpath "$2")
project=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)
# A group of its own, so that what systemd makes below it can be taken away again.
groups=$(awk '{ for (i = 7; i < NF; i++) if ($i == "-" && $(i + 1) == "cgroup2") print $5 }' /proc/self/mountinfo | tail -1)
group=$groups$(sed -n 's/^0:://p' /proc/self/cgroup)/ggufuse-test-$$
mkdir "$group"
cleanup() {
  [ ! -f "$group/cgroup.kill" ] || echo 1 >"$group/cgroup.kill"
  for _ in $(seq 100); do
    grep -qs 'populated 0' "$group/cgroup.events" && break
    sleep 0.05
  done
  find "$group" -depth -type d -exec rmdir {} +
  rm -f "$work"/result/*
  rmdir "$work/root" "$work/result" "$work"
}
trap cleanup EXIT
mkdir "$work/root" "$work/result"

boot() {
  layer "$work/root"
  cd "$work/root"
  umount -l sys/fs/cgroup
  mount -t cgroup2 cgroup2 sys/fs/cgroup
  mkdir run/result
  mount --bind "$work/result" run/result
  # Only what the checks start: nothing of this machine's own boot.
  rm -rf lib/systemd/system/*.wants etc/systemd/system/* etc/systemd/user/* etc/fstab
  mkdir -p etc/ggufuse usr/lib/systemd/system usr/lib/systemd/user usr/share/man/man1
  cp "$model" srv/m.gguf
  cp "$binary" usr/bin/ggufuse
  cp "$binary" usr/sbin/mount.fuse.ggufuse
  usr/bin/ggufuse man >usr/share/man/man1/ggufuse.1
  cp "$project"/systemd/system/* usr/lib/systemd/system/
  cp "$project"/systemd/user/* usr/lib/systemd/user/
  cp "$project"/systemd/ggufuse.conf.example "$project"/systemd/examples/* run/
  cp "$project"/tests/systemd_check.sh usr/bin/check
  mount -t tmpfs -o mode=1777 tmp tmp
  cat >etc/systemd/system/check.service <<'UNIT'
[Unit]
Description=checks
[Service]
Type=oneshot
ExecStart=/bin/bash /usr/bin/check
StandardOutput=append:/run/result/log
StandardError=append:/run/result/log
ExecStopPost=/bin/sh -c 'echo "$EXIT_STATUS" >/run/result/status.new && mv /run/result/status.new /run/result/status'
UNIT
  exec env -i container=test PATH="$PATH" chroot . /lib/systemd/systemd --system --unit=check.service \
    --show-status=no --log-target=null
}
. "$project/tests/layer.sh"
export -f layer boot
export binary model project work

(
  echo $BASHPID >"$group/cgroup.procs"
  exec unshare --pid --mount --cgroup --uts --ipc --fork --kill-child bash -euc boot
) &
for _ in $(seq 1200); do
  [ ! -e "$work/result/status" ] || break
  kill -0 $! 2>/dev/null || break
  sleep 0.1
done
cat "$work/result/log" >&2 || true
disown
[ "$(cat "$work/result/status" 2>/dev/null)" = 0 ]
