# Sourced by scripts that change a whole machine, in namespaces of their own.

# layer ROOT: this machine's files at ROOT under a layer in memory, which takes all writes and is gone with the namespace.
# It has proc, sys, dev and an empty run of its own, and /dev/fuse as udev leaves it.
layer() {
  mount --make-rprivate /
  mount -t tmpfs -o mode=755 layer "$1"
  mkdir "$1"/upper "$1"/work "$1"/root
  mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
  mount --move "$1/root" "$1"
  mount -t proc proc "$1/proc"
  mount --rbind /sys "$1/sys"
  mount --rbind /dev "$1/dev"
  mount -t tmpfs -o mode=755 run "$1/run"
  mknod -m 666 "$1/run/fuse" c 10 229
  mount --bind "$1/run/fuse" "$1/dev/fuse"
}
