# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# Shared by the scripts of both package formats: release/build puts it at their beginning.

units="weir.service weir-lb.service weir-backend.service weir-keeper.service"

# with_systemd runs systemctl if this is a booted systemd. A chroot or a container has none.
with_systemd() {
	[ ! -d /run/systemd/system ] || systemctl "$@"
}

# installed exchanges the BPF programs under traffic, then the running daemons. Only the
# programs change: pins, members and sessions stay.
installed() {
	with_systemd daemon-reload || true
	if [ -d /sys/fs/bpf/weir ]; then
		weir upgrade || echo "weir: the programs of the previous version stay in force: see above, then run: weir upgrade" >&2
	fi
	for unit in $units; do
		with_systemd --quiet try-restart "$unit" || echo "weir: $unit did not restart: see journalctl -u $unit" >&2
	done
}

first_steps() {
	cat <<'STEPS'
weir is installed. Nothing is steered yet. Next:
  weir doctor                     what this kernel supports
  weir init                       write /etc/weir/weir.yaml for this host
  systemctl enable --now weir     apply it, now and after each boot
STEPS
}

# removing ends the daemons and takes weir's programs out of the kernel.
removing() {
	for unit in $units; do
		with_systemd --quiet disable --now "$unit" 2>/dev/null || true
	done
	if [ -d /sys/fs/bpf/weir ]; then
		weir remove || {
			echo "weir: its programs stay in the kernel: see above, then run: weir remove" >&2
			return 1
		}
		echo "weir: removed its programs and pins: the kernel's own behaviour is back. /etc/weir stays."
	fi
}
