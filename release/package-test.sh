#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The life of a package, inside a Debian that it may change: install, first table, upgrade
# under traffic, remove, purge. /weir contains previous.deb, weir.deb and sink. In previous.deb
# weir serve runs as root. Under systemd the units of a fresh installation follow (units-test.sh). It runs under a
# booted systemd (vm/systemd) or without one (release/chroot). Prints one line per check and
# exits with 1 if one failed.
set -uo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin

failed=0
systemd=
[ ! -d /run/systemd/system ] || systemd=yes

# check WHAT COMMAND... runs COMMAND and prints its verdict and WHAT.
check() {
	local what=$1 verdict=ok start=${EPOCHREALTIME/./}
	shift
	"$@" >/tmp/output 2>&1 || verdict=FAIL
	printf '%-4s %6d ms  %s\n' "$verdict" $(((${EPOCHREALTIME/./} - start) / 1000)) "$what"
	if [ "$verdict" = FAIL ]; then
		sed 's/^/      /' /tmp/output
		failed=1
	fi
}

# said TEXT succeeds if the previous check's command printed TEXT.
said() {
	grep -qF -- "$1" /tmp/said || { echo "no $1 in:"; cat /tmp/said; return 1; }
}

# dpkg_says ARGUMENTS runs dpkg and keeps its output for said.
dpkg_says() {
	dpkg "$@" </dev/null >/tmp/said 2>&1
	local status=$?
	cat /tmp/said
	return "$status"
}

eventually() {
	local deadline=$((SECONDS + $1)) output
	shift
	until output=$("$@" 2>&1); do
		[ "$SECONDS" -lt "$deadline" ] || { printf '%s\n' "$output"; return 1; }
		sleep 1
	done
}

exists() { [ -e "$1" ] || { echo "$1 does not exist"; return 1; }; }
gone() { [ ! -e "$1" ] || { echo "$1 still exists"; ls -la "$1"; return 1; }; }

# members starts two daemons without any knowledge of weir, on one address.
# bound_member starts a daemon on another port than its service's: without weir the service gets no traffic.
bound_member() {
	/weir/sink serve -name bound -listen 127.0.0.1:7000 >/dev/null 2>&1 &
	echo $! >/run/bound.pid
	cat >>/etc/weir/weir.yaml <<-'YAML'
		  office:
		    listen: [tcp 127.0.0.1:4742]
		    steer: {by: source, slots: 1}
		    members: [{slot: 0, pidfile: /run/bound.pid, bound: [tcp 127.0.0.1:7000]}]
	YAML
	eventually 20 bound_answers
}

bound_answers() {
	weir apply -f /etc/weir/weir.yaml && [ "$(/weir/sink ask tcp 127.0.0.1:4742)" = bound ]
}

readable() {
	local private
	private=$(find /usr/share/man/man8/weir* /usr/share/doc/weir /usr/share/bash-completion/completions/weir /usr/lib/systemd/system/weir* ! -perm -044)
	[ -z "$private" ] || { echo "$private"; return 1; }
}

enabled_link() { [ -L /etc/systemd/system/multi-user.target.wants/weir.service ]; }

refused() { ! dpkg_says -r weir; }
still_there() {
	[ "$(/weir/sink ask tcp 127.0.0.1:4742)" = bound ] || return 1
	[ -z "$systemd" ] || { running && systemctl is-enabled weir.service; }
}

members() {
	local n
	for n in 0 1; do
		/weir/sink serve -name "member-$n" -listen 127.0.0.1:4741 -reuseport >/dev/null 2>&1 &
		echo $! >"/run/member-$n.pid"
	done
	eventually 10 any_answers
}

any_answers() { [[ $(/weir/sink ask udp 127.0.0.1:4741) == member-? ]]; }

configuration() {
	cat >/etc/weir/weir.yaml <<-'YAML'
		services:
		  shop:
		    listen: [udp 127.0.0.1:4741, tcp 127.0.0.1:4741]
		    steer: {by: source, slots: 2}
		    members:
		      - {slot: 0, pidfile: /run/member-0.pid}
		      - {slot: 1, pidfile: /run/member-1.pid}
	YAML
	weir apply --dry-run -f /etc/weir/weir.yaml
}

start() {
	if [ -n "$systemd" ]; then
		systemctl enable --now weir
	else
		weir apply -f /etc/weir/weir.yaml && { weir serve -f /etc/weir/weir.yaml >/tmp/serve.log 2>&1 & echo $! >/tmp/serve.pid; }
	fi
}

full() { weir steer status --json | jq -e "[.services[].slots[] | select(.state == \"admitted\")] | length == 2"; }

# expected lists addresses with the member that weir names for each.
expected() {
	weir steer where --json --service shop 127.0.1.{1..16} >/tmp/where || return
	jq -r '.addresses[] | "\(.address) member-\(.slot)"' /tmp/where >/tmp/expected
	[ "$(wc -l </tmp/expected)" = 16 ] || { cat /tmp/where; return 1; }
}

each_source() { /weir/sink each -wait 20s 127.0.0.1:4741 </tmp/expected; }

# traffic asks without a pause until /tmp/stop exists. Every question counts.
traffic() {
	local n=0
	: >/tmp/lost
	while [ ! -e /tmp/stop ]; do
		each_source >>/tmp/lost 2>&1
		n=$((n + 1))
		echo $n >/tmp/rounds
	done
}

nothing_lost() {
	touch /tmp/stop
	wait "$traffic"
	echo "$(cat /tmp/rounds) rounds of 32 questions"
	if [ "$(cat /tmp/rounds)" -lt 3 ] || [ -s /tmp/lost ]; then
		cat /tmp/lost
		return 1
	fi
}

runs_as() { [ "$(stat -c %U "/proc/$(systemctl show --property MainPID --value weir)")" = "$1" ]; }

# bounded compares the capabilities of weir serve with its unit, and finds none for its children.
bounded() {
	local status
	status=/proc/$(systemctl show --property MainPID --value weir)/status
	grep -E '^Cap(Prm|Eff|Bnd|Amb|Inh)' "$status"
	[ "$(awk '/^CapEff/ {print $2}' "$status")" = "$(awk '/^CapBnd/ {print $2}' "$status")" ] && grep -q '^CapAmb:.0*$' "$status" && grep -q '^CapInh:.0*$' "$status"
}

as_group() { setpriv --reuid 4242 --regid "$(getent group weir | cut -d: -f3)" --clear-groups weir status; }

# shared changes the file, and applies it by root and by weir serve in turn. All pins stay of user weir.
shared() {
	sed -i 's/slots: 2/slots: 2, backlog: 200/' /etc/weir/weir.yaml && weir apply -f /etc/weir/weir.yaml &&
		sed -i 's/backlog: 200/backlog: 300/' /etc/weir/weir.yaml && systemctl kill --signal HUP weir &&
		eventually 20 nothing_to_apply && all_of_weir
}

all_of_weir() {
	local others
	others=$(find /sys/fs/bpf/weir /run/weir ! -user weir)
	[ -z "$others" ] || { echo "not of user weir: $others"; return 1; }
}

nothing_to_apply() { weir apply --dry-run -f /etc/weir/weir.yaml | grep -i nothing; }

version_is() { [[ $(weir version) == "weir $1,"* ]] || { weir version; return 1; }; }
upgraded() { weir upgrade >/tmp/said 2>&1 && said "nothing"; }
same_pid() { [ "$(systemctl show --property MainPID --value weir)" = "$pid" ]; }
running() { systemctl is-active weir.service; }
installed_version() { dpkg-deb -f "$1" Version; }

check "install" dpkg_says -i /weir/previous.deb
check "the install names the next steps" said "weir doctor"
check "nothing runs before it is enabled" gone /sys/fs/bpf/weir
check "weir doctor" weir doctor
check "the man page of weir apply" exists /usr/share/man/man8/weir-apply.8.gz
check "the man page of weir steer run" exists /usr/share/man/man8/weir-steer-run.8.gz
check "completion in bash" bash -c '. /usr/share/bash-completion/completions/weir && complete -p weir'
check "completion in zsh" test -e /usr/share/zsh/vendor-completions/_weir
check "other users read the man pages" readable
check "examples keep the right to run" test -x /usr/share/doc/weir/examples/handoff/certificates
check "two members share an address" members
check "weir apply --dry-run" configuration
check "weir serve starts" start
check "both slots serve" eventually 30 full
[ -z "$systemd" ] || check "weir serve runs as root" runs_as root
check "weir status" weir status
check "weir names the member of each source" expected
check "this member answers" each_source

traffic &
traffic=$!
if [ -n "$systemd" ]; then
	# A builder of images forbids starts: nothing restarts then.
	pid=$(systemctl show --property MainPID --value weir)
	printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
	chmod +x /usr/sbin/policy-rc.d
	check "an installation without permission for starts" dpkg_says -i /weir/weir.deb
	check "it restarts no unit" same_pid
	rm /usr/sbin/policy-rc.d
fi
check "upgrade under traffic" dpkg_says -i /weir/weir.deb
check "the new version is in force" version_is "$(installed_version /weir/weir.deb)"
check "its programs too" upgraded
[ -z "$systemd" ] || check "weir.service runs" eventually 30 running
check "both slots serve" eventually 30 full
check "no question was lost" nothing_lost
check "the members are the same" each_source
if [ -n "$systemd" ]; then
	check "weir serve runs as user weir" runs_as weir
	check "with the unit's capabilities and no more" bounded
	check "all pins and records are of user weir" all_of_weir
	check "weir status of the group" as_group
	check "root's apply and serve share pins" shared
	check "the members are still the same" each_source
fi

check "a service depends on weir" bound_member
check "the removal of the package is refused" refused
check "the refusal names the remedy" said "weir remove --allow-outage"
check "nothing was changed" still_there
check "weir remove --allow-outage" weir remove --allow-outage

[ -n "$systemd" ] || kill "$(cat /tmp/serve.pid)"
check "remove" dpkg_says -r weir
check "the removal reports the kernel's own behaviour" said "the kernel's own behaviour is back"
check "no pins" gone /sys/fs/bpf/weir
check "the members still answer" any_answers
check "the configuration stays" exists /etc/weir/weir.yaml
[ -z "$systemd" ] || check "no unit" gone /usr/lib/systemd/system/weir.service
if [ -n "$systemd" ]; then
	check "the unit stays enabled for a later installation" enabled_link
fi
check "purge" dpkg_says -P weir
check "no enabled unit" gone /etc/systemd/system/multi-user.target.wants/weir.service
check "no configuration" gone /etc/weir
check "no runtime files" gone /run/weir
check "the members still answer" any_answers
if [ -n "$systemd" ]; then
	kill "$(cat /run/member-0.pid)" "$(cat /run/member-1.pid)"
	# shellcheck source=release/units-test.sh
	. /weir/units-test.sh
fi
exit $failed
