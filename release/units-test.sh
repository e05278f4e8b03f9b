# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The units of a fresh installation under a booted systemd: a part of release/package-test.sh. /weir also contains
# register-go, and a certificate authority (ca.pem, lb.pem, lb.key, s1.pem, s1.key).

unit() {
	cat >"/etc/systemd/system/$1"
	systemctl daemon-reload
}

# prepared creates two users, and daemons of one of them. bfdd's socket is at first missing, with its directory.
prepared() {
	useradd --create-home --groups weir member && useradd --system frr &&
		echo fine >/home/member/fine && chown member /home/member/fine && chmod 600 /home/member/fine || return
	cat >/usr/local/bin/ready-check <<-'SH'
		#!/bin/sh
		# A private /tmp, a hidden /home or a capability is a fault of weir.service.
		exec 2>&1
		grep -q fine "$HOME/fine" && grep -q fine /tmp/fine && [ "$(id -un)" = member ] &&
			! grep -E '^Cap(Prm|Eff|Amb|Inh):.*[1-9a-f]' /proc/self/status
	SH
	chmod 755 /usr/local/bin/ready-check
	unit member.service <<-'UNIT'
		[Service]
		Type=exec
		User=member
		ExecStart=/weir/sink serve -name member-unit -listen 127.0.0.1:4741
	UNIT
	unit register.service <<-'UNIT'
		[Service]
		Type=exec
		User=member
		ExecStart=/weir/register-go 127.0.0.1:4739
	UNIT
	unit bfdd.socket <<-'UNIT'
		[Socket]
		ListenStream=/run/frr/bfd-dplane
		SocketUser=frr
		SocketMode=0700
		Accept=yes
	UNIT
	unit bfdd@.service <<-'UNIT'
		[Service]
		StandardInput=socket
		ExecStart=/bin/sleep infinity
	UNIT
	systemctl start member
}

# file MORE writes the configuration, with more services.
file() {
	cat >/etc/weir/weir.yaml <<-'YAML'
		filter:
		  - name: noise
		    hook: clsact
		    interfaces: [up0]
		    rules: [{name: noise, match: 'udp.dstport == 9', action: drop}]
		reroute:
		  - {name: frr, frr: "unix:/run/frr/bfd-dplane"}
		services:
		  shop:
		    listen: [udp 127.0.0.1:4741, tcp 127.0.0.1:4741]
		    guard: {limit: 20kpps}
		    steer: {slots: 1}
		    members: [{slot: 0, unit: member.service, ready: {command: [/usr/local/bin/ready-check]}}]
		  telemetry:
		    listen: [udp 127.0.0.1:4739]
		    members: [{slot: 0, user: member}]
		  supervised:
		    listen: [udp 127.0.0.1:4744, tcp 127.0.0.1:4744]
		    steer: {slots: 1}
	YAML
	printf '%s\n' "$@" >>/etc/weir/weir.yaml
}

first_file() {
	ip link add up0 type veth peer name down0 && ip link add up1 type veth peer name down1 || return
	for device in up0 down0 up1 down1; do ip link set "$device" up; done
	ip address add 10.2.0.1/24 dev up0 && ip route add fc00:3::/64 dev up1 && file
}

slot_state() { weir steer status --json | jq -r --arg s "$1" '.services[] | select(.name == $s) | .slots[0] | "\(.state) \(.reason)"'; }

# slot_is STATE SERVICE compares the state of slot 0.
slot_is() { [[ $(slot_state "$2") == "$1 "* ]] || { slot_state "$2"; return 1; }; }

answers() { [ "$(/weir/sink ask udp "127.0.0.1:$2")" = "$1" ]; }

# in_namespace NAME creates a namespace with a daemon.
in_namespace() {
	ip netns add "$1" && ip -n "$1" link set lo up || return
	ip netns exec "$1" /weir/sink serve -name "$1" -listen 127.0.0.1:4742 >/dev/null 2>&1 &
	echo $! >"/run/$1.pid"
}

service_in() { printf '  %s:\n    netns: %s\n    listen: [udp 127.0.0.1:4742]\n    members: [{slot: 0, pidfile: /run/%s.pid}]\n' "$1" "$1" "$1"; }

# later_by_root applies a service in a namespace that is younger than weir serve's mounts. weir serve admits its member.
later_by_root() {
	in_namespace later && file "$(service_in later)" && weir apply -f /etc/weir/weir.yaml && eventually 180 slot_is admitted later
}

# later_by_serve applies another one by weir serve.
later_by_serve() {
	in_namespace last && file "$(service_in later)" "$(service_in last)" && systemctl kill --kill-who main --signal HUP weir &&
		eventually 180 slot_is admitted last && eventually 180 nothing_to_apply
}

# gone_namespace deletes a namespace. weir serve sees that, and root's apply forgets it.
gone_namespace() {
	kill "$(cat /run/last.pid)" && ip netns del last && file "$(service_in later)" && weir apply -f /etc/weir/weir.yaml --allow-outage &&
		eventually 180 nothing_to_apply
}

frr_later() { systemctl start bfdd.socket && eventually 180 in_journal weir "connected to bfdd"; }
in_journal() { journalctl --no-pager --quiet --unit "$1" | grep -F -- "$2" >/dev/null || { journalctl --no-pager --unit "$1" --lines 20; return 1; }; }
nothing_denied() { ! journalctl --no-pager --quiet --unit "$1" | grep -iE 'not permitted|permission denied|read-only file system|lacks CAP'; }

supervises() {
	weir steer run supervised --slot 0 --listen-fds --user member -- /weir/sink serve -name run >/tmp/run.log 2>&1 &
	supervisor=$!
	eventually 180 answers run 4744 || { cat /tmp/run.log; return 1; }
}

# as_member runs a command as user member, of group weir.
as_member() { setpriv --reuid member --regid member --init-groups "$@"; }

# refused_as_member: the group reads, and changes nothing.
refused_as_member() {
	! as_member weir steer run supervised --slot 0 --take-over -- /bin/true && ! as_member weir apply -f /etc/weir/weir.yaml --allow-outage &&
		! as_member weir remove && ! as_member rm -f /run/weir/records 2>/dev/null && answers run 4744
}

# crashes kills weir serve. Its successor has the state.
crashes() {
	local pid
	pid=$(systemctl show --property MainPID --value weir)
	systemctl kill --kill-who main --signal KILL weir && eventually 180 another_pid "$pid" && eventually 180 slot_is admitted shop && answers member-unit 4741
}

another_pid() { local now; now=$(systemctl show --property MainPID --value weir) && [ "$now" != 0 ] && [ "$now" != "$1" ]; }

# exposed prints the exposure of each unit: at most 5.0.
exposed() {
	local u failed=0
	for u in weir weir-lb weir-backend weir-keeper; do
		systemd-analyze security --no-pager --threshold=50 "$u.service" >/tmp/exposure || failed=1
		tail -1 /tmp/exposure
	done
	return $failed
}

lb_file() {
	cat >/etc/weir/weir.yaml <<-YAML
		lb:
		  name: lb
		  devices: [up0]
		  listen: 10.2.0.1:946
		  tls: {certificate: $1$2, key: $1$3, ca: $1$4}
		  services:
		    web: {number: 0, listen: [tcp 192.0.2.1:80]}
		  register: true
		handoff:
		  keeper: {hold: 2m, allow: ["telemetry:user=member"]}
		  backend:
		    name: s1
		    number: 1
		    address: 10.2.0.1
		    listen: 10.2.0.1:947
		    lb: {address: 10.2.0.1:946, names: [lb]}
		    tls: {certificate: /etc/weir/tls/s1.pem, key: /etc/weir/tls/s1.key, ca: /etc/weir/tls/ca.pem}
		    devices: [down0]
	YAML
}

listens() { ss --listening --tcp --numeric | grep -F "$1" >/dev/null || { ss --listening --tcp --numeric; return 1; }; }

# roles starts the other units, without credentials in /etc/credstore.
roles() {
	mkdir -p /etc/weir/tls && cp /weir/{ca.pem,lb.pem,lb.key,s1.pem,s1.key} /etc/weir/tls/ && chmod 700 /etc/weir/tls &&
		lb_file /etc/weir/tls/ lb.pem lb.key ca.pem && systemctl start weir-lb weir-keeper && eventually 180 listens 10.2.0.1:946
}

# credentials renews them from /etc/credstore: only the unit reads them.
credentials() {
	mkdir -p /etc/credstore && chmod 700 /etc/credstore && cp /etc/weir/tls/ca.pem /etc/credstore/weir-ca &&
		mv /etc/weir/tls/lb.pem /etc/credstore/weir-cert && mv /etc/weir/tls/lb.key /etc/credstore/weir-key &&
		lb_file credential: weir-cert weir-key weir-ca && systemctl restart weir-lb && eventually 180 listens 10.2.0.1:946 && lb_works
}

lb_works() { weir lb status && nothing_denied weir-lb; }

of_weir() { # UNIT
	[ "$(stat -c %U "/proc/$(systemctl show --property MainPID --value "$1")")" = weir ] && nothing_denied "$1"
}

# removal_refused: lb spreads traffic.
removal_refused() { ! dpkg_says -r weir && said "give --allow-outage"; }
removed() { weir remove --allow-outage && dpkg_says -r weir; }

keeper_bare() { grep -E '^Cap(Prm|Eff|Bnd|Amb|Inh):' "/proc/$(systemctl show --property MainPID --value weir-keeper)/status" && ! grep -E '^Cap(Prm|Eff|Bnd|Amb|Inh):.*[1-9a-f]' "/proc/$(systemctl show --property MainPID --value weir-keeper)/status"; }

check "fresh install" dpkg_says -i /weir/weir.deb
check "users, daemons, a missing bfdd" prepared
check "the configuration" first_file
touch /tmp/fine && echo fine >/tmp/fine
check "exposure" exposed
cat /tmp/output
check "weir.service starts" systemctl enable --now weir
check "as user weir" runs_as weir
check "with the unit's capabilities and no more" bounded
check "ready.command sees /home and /tmp, and has no capability" eventually 180 slot_is admitted shop
check "its traffic arrives" answers member-unit 4741
check "a bfdd with a later socket of FRR's user" frr_later
check "a collector of another user registers" systemctl start register
check "and has its slot" eventually 180 slot_is admitted telemetry
check "root's commands use a later name in /run/netns" later_by_root
check "and weir serve by itself" later_by_serve
check "a deleted namespace" gone_namespace
check "weir steer run --user" supervises
check "its slot is admitted" eventually 180 slot_is admitted supervised
check "nothing is denied to weir serve" nothing_denied weir
check "reload" systemctl reload weir
check "a member of the group reads" as_member weir status
check "and changes nothing" refused_as_member
check "weir serve is killed: all stays" crashes
check "weir doctor" weir doctor
check "all pins and records are of user weir" all_of_weir
kill "$supervisor"
check "weir remove" weir remove
systemctl stop weir
check "lb and keeper start without credentials" roles
check "lb is of user weir" of_weir weir-lb
check "the keeper is of user weir" of_weir weir-keeper
check "and has no capability" keeper_bare
check "credentials from /etc/credstore" credentials
check "the backend's agent starts" systemctl start weir-backend
check "and listens" eventually 180 listens 10.2.0.1:947
check "it is of user weir" of_weir weir-backend
check "a removal would end traffic" removal_refused
check "remove" removed
check "no pins" gone /sys/fs/bpf/weir
check "purge" dpkg_says -P weir
check "no runtime files" gone /run/weir
[ "$failed" = 0 ] || journalctl --no-pager --lines 80 --unit 'weir*'
