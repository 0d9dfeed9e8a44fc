# A stick is plugged in and pulled out, but for udev and FAT: a loop device; run by tests/layered.sh.
cd /run/test
install -m 755 ggufuse /usr/bin/ggufuse
stick=project/contrib/udev/ggufuse-stick
mkdir models
cp m.gguf models/
truncate -s 8M image
mkfs.ext4 -q -d models image
device=$(losetup --find --show --read-only image)
trap 'losetup -d "$device"' EXIT
name=${device##*/}
$stick mount "$device" &
for _ in $(seq 200); do
  [ ! -e "/media/ggufuse/$name/m-00001-of-00001.gguf" ] || break
  sleep 0.05
done
ggufuse check "/media/ggufuse/$name/m-00001-of-00001.gguf"
grep " /run/ggufuse/stick/$name ext4 ro,nosuid,nodev,noexec" /proc/self/mounts
kill %1
wait %1
$stick unmount "$device"
if grep "$name" /proc/self/mounts; then exit 1; fi
[ ! -e "/media/ggufuse/$name" ]
# Pulled out under an open file: the process is killed, and all goes away the same.
$stick mount "$device" &
for _ in $(seq 200); do
  [ ! -e "/media/ggufuse/$name/m-00001-of-00001.gguf" ] || break
  sleep 0.05
done
exec 7<"/media/ggufuse/$name/m-00001-of-00001.gguf"
kill -KILL %1
wait %1 || true
$stick unmount "$device"
exec 7<&-
if grep "$name" /proc/self/mounts; then exit 1; fi
echo done
