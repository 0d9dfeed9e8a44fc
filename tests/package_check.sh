# Installs the package beside it, uses all of it, and removes it; run by tests/layered.sh.
files() { find /etc /opt /srv /usr /var/lib ! -path "/var/lib/dpkg/*" | sort; }
cd /run/test
files >before
dpkg -i ./*.deb
dpkg -s ggufuse | grep -q '^Depends:.*libc6'
# The program and the helper.
ggufuse --version
mkdir mnt
mount -t fuse.ggufuse -o view=merged /run/test/m.gguf mnt
cmp m.gguf mnt/m.gguf
umount mnt
# Manual pages, completions, units, documents.
man --path ggufuse ggufuse-mount ggufuse-unmount mount.fuse.ggufuse
bash -c '. /usr/share/bash-completion/completions/ggufuse && complete -p ggufuse'
grep -q '^#compdef ggufuse' /usr/share/zsh/vendor-completions/_ggufuse
grep -q -- '-c ggufuse' /usr/share/fish/vendor_completions.d/ggufuse.fish
said=$(systemd-analyze verify ggufuse@models.service 2>&1)
[ -z "$said" ] || { echo "$said"; exit 1; }
ls /usr/lib/systemd/user/ggufuse@.service /usr/share/doc/ggufuse/examples/ggufuse.conf.example /usr/share/doc/ggufuse/copyright
# Nothing of it is left.
files >installed
dpkg -r ggufuse
files >after
diff before after
[ "$(comm -13 before installed | wc -l)" -gt 20 ]
echo done
