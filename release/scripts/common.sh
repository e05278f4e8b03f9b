# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# Shared by the scripts of both package formats: release/build puts it at their beginning.

units="weir.service weir-lb.service weir-backend.service weir-keeper.service"

# with_systemd runs systemctl if this is a booted systemd. A chroot or a container has none.
with_systemd() {
	[ ! -d /run/systemd/system ] || systemctl "$@"
}

# allowed succeeds if the host's policy permits this action for a unit. Builders of images forbid all.
allowed() {
	[ ! -x /usr/sbin/policy-rc.d ] || /usr/sbin/policy-rc.d "$1" "$2" || [ $? != 101 ]
}

# accounts creates the user of weir serve, and its directory.
accounts() {
	# A person's account of this name must not become the owner of the pins.
	if getent passwd weir | awk -F: '$3 >= 1000 && $3 < 60000 || $7 !~ /(nologin|false)$/ { found = 1 } END { exit !found }'; then
		echo "weir: user weir exists and is a person's account: rename it, or set another User= in the units, then run: weir prepare --user NAME" >&2
		return 1
	fi
	if command -v systemd-sysusers >/dev/null; then
		systemd-sysusers weir.conf || true
		systemd-tmpfiles --create weir.conf || true
	fi
}

# installed exchanges the BPF programs under traffic, then the running daemons. Only the
# programs change: pins, members and sessions stay.
installed() {
	accounts
	with_systemd daemon-reload || true
	if [ -d /sys/fs/bpf/weir ]; then
		weir upgrade || echo "weir: the programs of the previous version stay in force: see above, then run: weir upgrade" >&2
	fi
	for unit in $units; do
		allowed "${unit%.service}" restart || continue
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

# remove_all removes the programs and pins. Another process can hold weir's lock for ever.
remove_all() {
	[ -d /sys/fs/bpf/weir ] || return 0
	timeout 120 weir remove "$@" && return
	[ $? != 124 ] || echo "weir: weir remove did not end within 2 minutes: end the process that holds the lock" >&2
	return 1
}

# removing takes weir's programs out of the kernel, then ends the daemons. weir remove refuses
# to take served traffic away, and then says that nothing was changed: only it can know. After any
# failure the package stays installed.
removing() {
	remove_all || {
		echo "weir: the package stays installed: see above for the reason and for changes that were made. To remove it all the same, stop its units, run: weir remove --allow-outage, then remove the package" >&2
		return 1
	}
	for unit in $units; do
		with_systemd --quiet stop "$unit" 2>/dev/null || true # enabled units start again after an installation
	done
	# A daemon may have attached again before it ended.
	remove_all --allow-outage || {
		echo "weir: the package stays installed, because its programs stay in the kernel: see above" >&2
		return 1
	}
	rmdir /sys/fs/bpf/weir 2>/dev/null || true # user weir's own stays when empty
	echo "weir: removed its programs and pins: the kernel's own behaviour is back. /etc/weir stays."
}
