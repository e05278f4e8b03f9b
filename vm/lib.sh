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
	mkdir -p "$cache/kernels" "$cache/apt/lists/partial" "$cache/apt/archives/partial"
	exec 9>"$cache/lock"
	flock 9
}

release_cache() {
	exec 9>&-
}

# vm_apt TOOL ARGUMENTS runs apt-get or apt-cache with a separate state. The
# machine's sources and lists do not change.
vm_apt() {
	local tool=$1
	shift
	"$tool" -q -o APT::Architecture=amd64 -o APT::Sandbox::User=root \
		-o Dir::State="$cache/apt" -o Dir::State::lists="$cache/apt/lists" \
		-o Dir::State::status=/dev/null -o Dir::Cache="$cache/apt" \
		-o Dir::Etc::sourcelist="$cache/apt/sources.list" -o Dir::Etc::sourceparts=- "$@"
}

# update_lists reads the kernel suites' lists, at most once a day. Without
# network the cached kernels are used.
update_lists() {
	[ -z "$(find "$cache/apt/updated" -mtime -1 2>/dev/null)" ] || return 0
	local archive security signed=''
	archive=$(debian_mirror archive) && security=$(debian_mirror security) || return 1
	[ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ] ||
		signed='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
	cat >"$cache/apt/sources.list" <<-EOF
		deb $signed $archive trixie-backports main
		deb $signed $security bookworm-security main
		deb $signed $security bullseye-security main
	EOF
	vm_apt apt-get -o APT::Update::Error-Mode=any update >"$cache/apt/update.log" 2>&1 || return 1
	touch "$cache/apt/updated"
}

# newest_kernel SERIES prints the newest package of a series: 5.10, 6.1, 6.12
# or newest. From 7.x the image is an empty package depending on linux-binary
# and linux-modules. It may be published a little later than these.
newest_kernel() {
	local pattern
	case $1 in
	5.10) pattern='linux-image-5\.10\.0-[0-9]+-cloud-amd64' ;;
	6.1) pattern='linux-image-6\.1\.0-[0-9]+-cloud-amd64' ;;
	6.12) pattern='linux-image-6\.12\.[0-9]+\+deb12-cloud-amd64' ;;
	newest) pattern='linux-(image|binary)-[0-9.]+\+deb13-cloud-amd64' ;;
	*) die "no kernel series $1: 5.10, 6.1, 6.12 or newest" ;;
	esac
	vm_apt apt-cache pkgnames linux- | grep -xE "$pattern" |
		sed -E 's/^linux-(image|binary)-//' | sort -V | tail -1
}

# fetch_kernel SERIES prints the directory with vmlinuz and lib/modules of the
# newest kernel of the series, and fetches it if necessary. If the fetch fails,
# it uses the kernel of an earlier run.
fetch_kernel() {
	local series=$1 version dir part package packages=()
	if update_lists && version=$(newest_kernel "$series") && [ -n "$version" ]; then
		dir=$cache/kernels/$version
		for part in base image binary modules; do
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
		die "kernel $series is not in $cache and cannot be fetched (see $cache/apt/update.log)"
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
		module=$(basename "${path%.xz}")
		case $path in
		*.xz) xz -dc "$path" >"$into/$module" ;;
		*) cp "$path" "$into/$module" ;;
		esac
		echo "$module"
	done >"$into/list"
}

# new_initramfs DIR INIT creates DIR with busybox and INIT as /init.
new_initramfs() {
	mkdir -p "$1"/{bin,proc,sys,dev,run,tmp,etc}
	cp "$(command -v busybox)" "$1/bin/busybox"
	cp "$2" "$1/init"
	chmod +x "$1/init"
}

# add_program INITRAMFS PROGRAM adds a program of this machine with its
# libraries. It precedes busybox's program of that name.
add_program() {
	local program file
	program=$(command -v "$2")
	ldd "$program" | grep -o '/[^ ]*' | while read -r file; do
		mkdir -p "$1$(dirname "$file")"
		cp -L "$file" "$1$file"
	done
	mkdir -p "$1/sbin"
	cp -L "$program" "$1/sbin/$2"
}

pack_initramfs() {
	(cd "$1" && find . | cpio -o -H newc --quiet)
}

# start_qemu SECONDS DIR KERNEL CMDLINE ARGUMENTS boots KERNEL with
# DIR/initramfs in the background. The guest's serial ports are files: ttyS0
# the console, ttyS1 the tests' output, ttyS2 the exit status. Wait for the
# process $!. It ends QEMU after the time limit, or at its own end.
start_qemu() {
	local seconds=$1 dir=$2 kernel=$3 cmdline=$4
	shift 4
	timeout -k 5 "$seconds" qemu-system-x86_64 -accel tcg -cpu max -smp 1 -m 1024 \
		-display none -monitor none -no-reboot -nic none \
		-kernel "$kernel" -initrd "$dir/initramfs" \
		-append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off random.trust_cpu=on $cmdline" \
		-serial "file:$dir/console" -serial "file:$dir/output" -serial "file:$dir/status" \
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
