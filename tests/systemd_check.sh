# What has to hold under a real systemd; run in it by tests/systemd.sh.
set -euo pipefail
step() { echo "== $*"; }
fail() { echo "failed: $*"; exit 1; }
mounts() { grep -c " /srv/mnt fuse.ggufuse " /proc/self/mounts || true; }
wait_for() {
  for _ in $(seq 200); do
    if "$@" >/dev/null 2>&1; then return; fi
    sleep 0.05
  done
  fail "waited in vain for: $*"
}
pid() { systemctl show -P MainPID ggufuse@t; }
served() { cmp /srv/m.gguf /srv/mnt/m.gguf; }
new_pid() { [ "$(pid)" != "$1" ] && systemctl is-active -q ggufuse@t; }

mkdir -p /srv/mnt /srv/auto
cat >/etc/ggufuse/t.conf <<'CONF'
SOURCE=/srv/m.gguf
MOUNTPOINT=/srv/mnt
OPTIONS=--view merged -o allow_other
CONF

step verify
# As units of instances, and of the example beside a llama-server.service.
mkdir -p /etc/systemd/system/llama-server.service.d
cp /run/llama-server.service.d-ggufuse.conf /etc/systemd/system/llama-server.service.d/ggufuse.conf
cat >/etc/systemd/system/llama-server.service <<'UNIT'
[Service]
ExecStart=/bin/sh -c 'cat /srv/mnt/m.gguf >/dev/null && exec sleep infinity'
UNIT
cp /etc/ggufuse/t.conf /etc/ggufuse/models.conf
systemctl daemon-reload
said=$(systemd-analyze verify ggufuse@t.service llama-server.service 2>&1) || fail "verify: $said"
[ -z "$said" ] || fail "verify: $said"
mkdir /run/verify
said=$(XDG_RUNTIME_DIR=/run/verify systemd-analyze verify --user ggufuse@t.service 2>&1) || fail "verify --user: $said"
[ -z "$said" ] || fail "verify --user: $said"

step "ready when started, seen from outside and by other users"
systemctl start ggufuse@t
served
setpriv --reuid 65534 --regid 65534 --clear-groups cmp /srv/m.gguf /srv/mnt/m.gguf
[[ "$(systemctl show -P StatusText ggufuse@t)" == *"serving 1 file(s) (merged) on /srv/mnt" ]] || fail status
[ "$(readlink /proc/"$(pid)"/ns/mnt)" = "$(readlink /proc/1/ns/mnt)" ] || fail "a mount namespace of its own"

step "hardened"
grep -q '^NoNewPrivs:[[:space:]]*1' /proc/"$(pid)"/status
grep -q '^Seccomp:[[:space:]]*2' /proc/"$(pid)"/status
[ "$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/"$(pid)"/status)" = 00000000102000c4 ] || fail "$(grep CapBnd /proc/"$(pid)"/status)"

step "killed: the stale mount is cleared, and it serves again"
old=$(pid)
kill -KILL "$old"
wait_for new_pid "$old"
served
[ "$(mounts)" = 1 ] || fail "$(mounts) mounts"

step "hanging: the watchdog starts it again"
mkdir -p /run/systemd/system/ggufuse@t.service.d
printf '[Service]\nWatchdogSec=1\n' >/run/systemd/system/ggufuse@t.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart ggufuse@t
old=$(pid)
sleep 2.5
[ "$(pid)" = "$old" ] || fail "the watchdog ended a process that is well"
kill -STOP "$old"
wait_for new_pid "$old"
served
[ "$(mounts)" = 1 ] || fail "$(mounts) mounts"

step "stopped: unmounted"
systemctl stop ggufuse@t
[ "$(mounts)" = 0 ] || fail mounted
[ "$(systemctl show -P Result ggufuse@t)" = success ] || fail result
[ "$(systemctl show -P ActiveState ggufuse@t)" = inactive ] || fail state

step "stopped while a file is open: detached"
systemctl start ggufuse@t
exec 7</srv/mnt/m.gguf
systemctl stop ggufuse@t
exec 7<&-
[ "$(mounts)" = 0 ] || fail mounted
[ "$(systemctl show -P Result ggufuse@t)" = success ] || fail result

step "what another start does not mend is not tried again"
cp /srv/m.gguf /srv/good.gguf
truncate -s 100 /srv/m.gguf
if systemctl start ggufuse@t; then fail "an invalid model"; fi
sleep 1.5
[ "$(systemctl show -P ActiveState ggufuse@t)" = failed ] || fail state
[ "$(systemctl show -P ExecMainStatus ggufuse@t)" = 4 ] || fail code
[ "$(systemctl show -P NRestarts ggufuse@t)" = 0 ] || fail restarts
mv /srv/good.gguf /srv/m.gguf
systemctl reset-failed ggufuse@t

step "llama-server waits for the models, and goes before them"
systemctl start llama-server
systemctl is-active -q ggufuse@models llama-server
systemctl stop ggufuse@models
if systemctl is-active -q llama-server; then fail "without models"; fi
[ "$(systemctl show -P Result llama-server)" = success ] || fail result

step "fstab with an automount"
echo '/srv/m.gguf /srv/auto fuse.ggufuse noauto,view=merged,x-systemd.automount,_netdev 0 0' >/etc/fstab
systemctl daemon-reload
systemctl start srv-auto.automount
cmp /srv/m.gguf /srv/auto/m.gguf
systemctl is-active -q srv-auto.mount
systemctl stop srv-auto.automount srv-auto.mount
no_process() { ! pgrep -f mount.fuse.ggufuse; }
wait_for no_process

step "a user's own"
useradd -m tester
uid=$(id -u tester)
as_user() { setpriv --reuid "$uid" --regid "$uid" --init-groups env -i HOME=/home/tester XDG_RUNTIME_DIR=/run/user/"$uid" PATH="$PATH" "$@"; }
install -d -o tester -g tester -m 700 /run/user/"$uid"
as_user mkdir -p /home/tester/mnt /home/tester/.config/ggufuse
cat >/home/tester/.config/ggufuse/t.conf <<'CONF'
SOURCE=/srv/m.gguf
MOUNTPOINT=/home/tester/mnt
OPTIONS=--view merged
CONF
systemd-run -q --unit=manager --uid=tester -p Delegate=yes -E HOME=/home/tester -E XDG_RUNTIME_DIR=/run/user/"$uid" \
  /lib/systemd/systemd --user --unit=basic.target
wait_for as_user systemctl --user is-active basic.target
as_user systemctl --user start ggufuse@t
as_user cmp /srv/m.gguf /home/tester/mnt/m.gguf
if cat /home/tester/mnt/m.gguf >/dev/null 2>&1; then fail "root got in without allow_root"; fi
as_user systemctl --user kill -s KILL ggufuse@t
wait_for as_user cmp /srv/m.gguf /home/tester/mnt/m.gguf
as_user systemctl --user stop ggufuse@t
if grep -q /home/tester/mnt /proc/self/mounts; then fail mounted; fi

step "all held"
