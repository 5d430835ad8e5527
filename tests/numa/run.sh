#!/bin/bash
# Runs a command of this project's on two NUMA nodes, the second without cores, as CXL memory shows itself: a virtual machine
# under QEMU's software emulation, which sees this machine's files read-only.
#
#   tests/numa/run.sh WORKDIR COMMAND...      both are of this machine; COMMAND's exit code becomes this script's
#
# Needs (Debian): qemu-system-x86 qemu-system-common busybox-static cpio kmod. The kernel is downloaded with apt-get and
# unpacked into WORKDIR, not installed; linux-image-amd64, since the one for clouds has no 9p. NUMA_LIMIT_S (400) ends it.
set -euo pipefail
work=${1:?work folder}; shift; [ $# -gt 0 ] || { echo "name a command" >&2; exit 2; }
for tool in qemu-system-x86_64 cpio modprobe busybox dpkg-deb; do
  PATH=$PATH:/usr/sbin:/sbin command -v $tool > /dev/null \
  || { echo "$tool is not there: apt-get install qemu-system-x86 qemu-system-common busybox-static cpio kmod" >&2; exit 2; }
done
export PATH=$PATH:/usr/sbin:/sbin
mkdir -p "$work"; here=$PWD; cd "$work"
if ! ls k/boot/vmlinuz-* > /dev/null 2>&1; then
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/{print $2}')
  apt-get download -q "$package" > /dev/null && dpkg-deb -x "$package"_*.deb k && rm "$package"_*.deb
fi
version=$(basename k/lib/modules/*)
[ -f "k/lib/modules/$version/modules.dep" ] || depmod -b k "$version"
rm -rf r; mkdir -p r/bin r/proc r/sys r/dev r/h r/lib/modules
cp "$(command -v busybox)" r/bin/busybox
for module in virtio_pci 9pnet_virtio 9p; do modprobe -d k -S "$version" --show-depends $module; done \
| awk '$1 == "insmod" { print $2 }' | awk '!seen[$0]++' > modules
while read -r file; do cp "$file" r/lib/modules/; done < modules
printf 'cd %q\n' "$here" > r/command; printf '%q ' "$@" >> r/command; echo >> r/command
{
  echo '#!/bin/busybox sh'
  echo 'b=/bin/busybox; $b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev'
  while read -r file; do echo "\$b insmod /lib/modules/$(basename "$file")"; done < modules
  echo '$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=524288,cache=loose host /h || echo "no files: 9p failed"'
  echo 'for d in proc sys dev; do $b mount -o bind /$d /h/$d; done; $b mount -t tmpfs t /h/run'
  echo '$b mount -t tmpfs t /h/tmp; $b cp /command /h/run/command'
  echo 'export HOME=/run TMPDIR=/tmp PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1'
  echo 'echo "guest: up after $($b cut -d" " -f1 /proc/uptime) s"; $b chroot /h /bin/bash /run/command'
  echo 'echo "guest: exit code $? after $($b cut -d" " -f1 /proc/uptime) s"; $b poweroff -f'
} > r/init
chmod +x r/init
(cd r && find . | cpio -o -H newc --quiet | gzip -1) > initrd.gz
timeout "${NUMA_LIMIT_S:-400}" nice qemu-system-x86_64 -accel tcg,thread=multi -machine q35 -cpu max -smp 2 -m 3G \
  -nographic -no-reboot -nodefaults -serial stdio \
  -object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=1G \
  -numa node,nodeid=0,memdev=m0,cpus=0-1 -numa node,nodeid=1,memdev=m1 \
  -numa dist,src=0,dst=1,val=40 -numa dist,src=1,dst=0,val=40 \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -kernel k/boot/vmlinuz-* -initrd initrd.gz \
  -append "console=ttyS0 quiet panic=-1 numa_balancing=disable mitigations=off" < /dev/null | tr -d '\r' | tee guest.log
code=$(sed -n 's/^guest: exit code \([0-9]*\) .*/\1/p' guest.log)
[ -n "$code" ] || { echo "the guest did not come to its end" >&2; exit 1; }
exit "$code"
