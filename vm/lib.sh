# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Shared code of the scripts in vm/: Debian's kernels from the machine's own
# mirror, an initramfs, QEMU. It does not use KVM, because nested KVM may hang
# and software emulation boots these kernels in seconds.

vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export root=${vm%/*}
# Kernels and root filesystems, kept between runs.
cache=${WEIR_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/weir-vm}
. "$vm/apt.sh"

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}

# need_tools fails with the remedy if a program is missing.
need_tools() {
	local tool
	for tool in "$@"; do
		command -v "$tool" >/dev/null || die "no $tool here: sudo ./bootstrap --install vm vm-systemd bare"
	done
}

# use_cache creates the cache and locks it against concurrent unpacking.
# release_cache releases the lock before VMs run.
use_cache() {
	mkdir -p "$cache/kernels"
	exec 9>"$cache/lock"
	flock 9
}

release_cache() {
	exec 9>&-
}

# A series of kernels, set by use_series: its architecture, the folder of apt's
# state, the pattern of the versions and the lines for apt's sources.
arch=amd64
state=$cache/apt
pattern=''

# use_series SERIES selects a series for the functions below.
use_series() {
	arch=amd64 state=$cache/apt
	case $1 in
	5.10) pattern='5\.10\.0-[0-9]+-cloud-amd64' ;;
	6.1) pattern='6\.1\.0-[0-9]+-cloud-amd64' ;;
	6.12) pattern='6\.12\.[0-9]+\+deb12-cloud-amd64' ;;
	newest) pattern='[0-9.]+\+deb13-cloud-amd64' ;;
	arm64) arch=arm64 state=$cache/apt-arm64 pattern='6\.12\.[0-9]+\+deb12-cloud-arm64' ;;
	ubuntu-22.04) state=$cache/apt-$1 pattern='5\.15\.0-[0-9]+-generic' ;;
	ubuntu-24.04) state=$cache/apt-$1 pattern='6\.8\.0-[0-9]+-generic' ;;
	*) die "no kernel series $1: 5.10, 6.1, 6.12, newest, arm64, ubuntu-22.04 or ubuntu-24.04" ;;
	esac
	mkdir -p "$state/lists/partial" "$state/archives/partial"
}

# sources SERIES prints the lines for apt's sources. No key of Ubuntu is in
# Debian. The kernel is not verified, and runs only under QEMU without network.
sources() {
	local archive security signed='' suite=noble
	archive=$(debian_mirror archive) && security=$(debian_mirror security) || return 1
	[ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] ||
		signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
	case $1 in
	ubuntu-*)
		[ "$1" = ubuntu-24.04 ] || suite=jammy
		printf "deb [trusted=yes] ${archive%/debian*}/ubuntu %s main\n" "$suite" "$suite-updates"
		;;
	arm64) printf 'deb %s\n' "$signed $archive bookworm main" "$signed $security bookworm-security main" ;;
	*) printf 'deb %s\n' "$signed $archive trixie-backports main" \
		"$signed $security bookworm-security main" "$signed $security bullseye-security main" ;;
	esac
}

# vm_apt TOOL ARGUMENTS runs apt-get or apt-cache with a separate state. The
# machine's sources and lists do not change.
vm_apt() {
	local tool=$1
	shift
	"$tool" -q -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o APT::Sandbox::User=root \
		-o Dir::State="$state" -o Dir::State::lists="$state/lists" \
		-o Dir::State::status=/dev/null -o Dir::Cache="$state" \
		-o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=- "$@"
}

# update_lists SERIES reads the suites' lists, at most once a day. Without
# network the cached kernels are used.
update_lists() {
	[ -z "$(find "$state/updated" -mtime -1 2>/dev/null)" ] || return 0
	sources "$1" >"$state/sources.list" || return 1
	vm_apt apt-get -o APT::Update::Error-Mode=any update >"$state/update.log" 2>&1 || return 1
	touch "$state/updated"
}

# newest_kernel prints the newest version of the series. From 7.x Debian's image
# is an empty package depending on linux-binary and linux-modules. It may be
# published a little later than these.
newest_kernel() {
	vm_apt apt-cache pkgnames linux- | grep -xE "linux-(image|binary)-$pattern" |
		sed -E 's/^linux-(image|binary)-//' | sort -V | tail -1
}

# fetch_kernel SERIES prints the directory with vmlinuz and lib/modules of the
# newest kernel of the series, and fetches it if necessary. If the fetch fails,
# it uses the kernel of an earlier run.
fetch_kernel() {
	local series=$1 version dir part package packages=()
	use_series "$series"
	if update_lists "$series" && version=$(newest_kernel) && [ -n "$version" ]; then
		dir=$cache/kernels/$version
		for part in base image binary modules modules-extra; do
			package=linux-$part-$version
			[ -z "$(vm_apt apt-cache --names-only search "^${package//+/\\+}\$")" ] || packages+=("$package")
		done
		if [ -e "$dir/vmlinuz" ] || unpack_kernel "$dir" "${packages[@]}" >&2; then
			keep_kernel "$series" "$dir"
			echo "$dir"
			return
		fi
	fi
	dir=$(readlink -e "$cache/kernels/$series") ||
		die "kernel $series is not in $cache and cannot be fetched (see $state/update.log)"
	echo "${0##*/}: cannot fetch the newest $series; using ${dir##*/}" >&2
	echo "$dir"
}

# unpack_kernel DIR PACKAGES creates DIR completely or not at all.
unpack_kernel() {
	local dir=$1 part=$1.part deb vmlinuz
	shift
	echo "fetching $*"
	rm -rf "$part"
	mkdir -p "$part/debs" "$part/root" "$part/lib"
	(cd "$part/debs" && vm_apt apt-get download "$@") || return 1
	for deb in "$part"/debs/*.deb; do dpkg-deb -x "$deb" "$part/root" || return 1; done
	if [ -d "$part/root/usr/lib/modules" ]; then # newer packages are usr-merged
		mv "$part/root/usr/lib/modules" "$part/lib/"
	else
		mv "$part/root/lib/modules" "$part/lib/"
	fi
	vmlinuz=$(find "$part/root/boot" "$part/lib/modules" -maxdepth 2 -name 'vmlinuz*' 2>/dev/null | head -1)
	mv "$vmlinuz" "$part/vmlinuz" || return 1
	depmod -b "$part" "$(ls "$part/lib/modules")" || return 1
	rm -rf "$dir" "$part/root" "$part/debs"
	mv "$part" "$dir"
}

# keep_kernel SERIES DIR makes DIR the series' kernel and removes the old one.
keep_kernel() {
	local before
	before=$(readlink -e "$cache/kernels/$1" || true)
	ln -sfn "$(basename "$2")" "$cache/kernels/$1"
	[ -z "$before" ] || [ "$before" = "$2" ] || rm -rf "$before"
}

# add_modules KERNEL_DIR INITRAMFS MODULES copies the modules and their
# dependencies into INITRAMFS/modules, in the order of INITRAMFS/modules/list.
# It skips built-in and missing modules, because tests declare their needs.
add_modules() {
	local kernel=$1 into=$2/modules version module path
	shift 2
	version=$(ls "$kernel/lib/modules")
	mkdir -p "$into"
	for module in "$@"; do
		modprobe -S "$version" -d "$kernel" --show-depends "$module" 2>/dev/null |
			sed -n 's/^insmod \(\S*\).*/\1/p' || true
	done | awk '!seen[$0]++' | while read -r path; do
		module=$(basename "$path" .xz)
		module=$(basename "$module" .zst)
		case $path in
		*.xz) xz -dc "$path" >"$into/$module" ;;
		*.zst) zstd -qdc "$path" >"$into/$module" ;;
		*) cp "$path" "$into/$module" ;;
		esac
		echo "$module"
	done >"$into/list"
}

# new_initramfs DIR INIT creates DIR with busybox and INIT as /init.
new_initramfs() {
	mkdir -p "$1"/{bin,proc,sys,dev,run,tmp,etc}
	if [ "$arch" = amd64 ]; then
		cp "$(command -v busybox)" "$1/bin/busybox"
	else
		cp "$(userland)/bin/busybox" "$1/bin/busybox"
	fi
	cp "$2" "$1/init"
	chmod +x "$1/init"
}

# add_program INITRAMFS PROGRAM adds a program of this machine with its
# libraries, or one of the userland with all libraries. It precedes busybox's
# program of that name.
add_program() {
	local program file from
	mkdir -p "$1/sbin"
	if [ "$arch" != amd64 ]; then
		from=$(userland)
		cp -L "$from/bin/$2" "$1/sbin/$2"
		cp -r "$from/lib" "$1/"
		return
	fi
	program=$(command -v "$2")
	ldd "$program" | grep -o '/[^ ]*' | while read -r file; do
		mkdir -p "$1$(dirname "$file")"
		cp -L "$file" "$1$file"
	done
	cp -L "$program" "$1/sbin/$2"
}

# userland prints a folder with bin and lib of another architecture: busybox and
# ip. It fetches them with their dependencies if necessary.
userland() {
	local dir=$cache/userland-$arch part=$cache/userland-$arch.part deb
	if [ ! -e "$dir" ]; then
		rm -rf "$part"
		mkdir -p "$part/root" "$part/bin" "$part/lib"
		vm_apt apt-get -y --no-install-recommends --download-only install busybox-static iproute2 >&2 ||
			die "cannot fetch busybox and ip for $arch"
		for deb in "$state"/archives/*.deb; do dpkg-deb -x "$deb" "$part/root"; done
		cp -L "$part/root/bin/busybox" "$part/root/bin/ip" "$part/bin/"
		cp -L "$part"/root/lib/*-linux-gnu/*.so* "$part/lib/"
		cp -L "$part"/root/usr/lib/*-linux-gnu/*.so* "$part/lib/"
		rm -rf "$part/root" "$state"/archives/*.deb
		mv "$part" "$dir"
	fi
	echo "$dir"
}

pack_initramfs() {
	(cd "$1" && find . | cpio -o -H newc --quiet)
}

# start_qemu SECONDS DIR KERNEL CMDLINE ARGUMENTS boots KERNEL with
# DIR/initramfs in the background. The guest's serial ports are files: ttyS0
# (ttyAMA0 on arm64) the console, ttyS1 the tests' output, ttyS2 the exit status.
# Wait for the process $!. It ends QEMU after the time limit, or at its own end.
start_qemu() {
	local seconds=$1 dir=$2 kernel=$3 cmdline=$4 machine port
	shift 4
	machine=(qemu-system-x86_64 -cpu max -serial "file:$dir/console" -serial "file:$dir/output" -serial "file:$dir/status")
	cmdline="console=ttyS0 random.trust_cpu=on $cmdline"
	if [ "$arch" = arm64 ]; then
		# Pointer authentication of "max" is slow under emulation.
		machine=(qemu-system-aarch64 -M virt -cpu neoverse-n1 -serial "file:$dir/console")
		for port in unused output status; do
			machine+=(-chardev "file,id=$port,path=$dir/$port" -device "pci-serial,chardev=$port")
		done
		cmdline="console=ttyAMA0 ${cmdline#console=ttyS0 }"
	fi
	# The unpacked initramfs may take half of the memory that the packed one leaves.
	timeout -k 5 "$seconds" "${machine[@]}" -accel tcg -smp 1 -m 1536 \
		-display none -monitor none -no-reboot -nic none \
		-kernel "$kernel" -initrd "$dir/initramfs" \
		-append "quiet loglevel=4 panic=-1 mitigations=off $cmdline" \
		"$@" </dev/null >"$dir/qemu" 2>&1 &
}

# debian_root SUITE DIR PACKAGES creates a minimal Debian in DIR.
debian_root() {
	local suite=$1 dir=$2 log=$2.log mirror
	shift 2
	[ "$(id -u)" = 0 ] || die "debootstrap needs root"
	mirror=$(debian_mirror archive) || return 1
	echo "${0##*/}: making a Debian $suite with $* (kept in $cache)"
	if ! debootstrap --variant=minbase --include="$(IFS=, && echo "$*")" "$suite" "$dir" "$mirror" >"$log" 2>&1; then
		tail -20 "$log" >&2
		return 1
	fi
	rm -rf "$log" "$dir"/var/cache/apt/archives/*.deb "$dir"/var/lib/apt/lists/*
}
