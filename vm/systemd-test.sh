#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The driver of the systemd VM: runs inside it, as root, under systemd. /weir is
# in PATH and contains weir and sink, the steered daemon. Prints one line per
# check and exits with 1 if one failed.
set -uo pipefail

failed=0

# check WHAT COMMAND... runs COMMAND and prints its verdict, its time and WHAT.
check() {
	local what=$1 output verdict=ok start=${EPOCHREALTIME/./}
	shift
	output=$("$@" 2>&1) || verdict=FAIL
	printf '%-4s %5d ms  %s\n' "$verdict" $(((${EPOCHREALTIME/./} - start) / 1000)) "$what"
	if [ "$verdict" = FAIL ]; then
		printf '%s\n' "$output" | sed 's/^/      /'
		failed=1
	fi
}

# answers WANT udp|tcp ADDRESS:PORT [FROM [WAIT]] succeeds if WANT answers.
answers() {
	local got
	got=$(sink ask ${4:+-from "$4"} ${5:+-wait "$5"} "$2" "$3") || return
	[ "$got" = "$1" ] || { echo "$2 $3${4:+ from $4}: got $got, want $1"; return 1; }
}

# eventually SECONDS COMMAND... retries until success.
eventually() {
	local deadline=$((SECONDS + $1)) output
	shift
	until output=$("$@" 2>&1); do
		[ "$SECONDS" -lt "$deadline" ] || { printf '%s\n' "$output"; return 1; }
		sleep 1 # leave the only CPU to weir serve
	done
}

# unit NAME writes a unit file from standard input.
unit() {
	cat >"/etc/systemd/system/$1"
	systemctl daemon-reload
}

# slot SERVICE FIELD SLOT prints a field of one slot of `weir steer status`.
slot() {
	weir steer status --json |
		jq -r --arg service "$1" --arg field "$2" --argjson slot "$3" \
			'.services[] | select(.name == $service) | .slots[] | select(.slot == $slot) | .[$field]'
}

# slot_is STATE SERVICE SLOT succeeds if the slot has the state.
slot_is() {
	local got
	got=$(slot "$2" state "$3") || return
	[ "$got" = "$1" ] || { echo "slot $3 of $2 is $got ($(slot "$2" reason "$3")), want $1"; return 1; }
}

# each_source_answers SERVICE PORT [EMPTY] asks from 16 addresses, over both
# protocols. The slot reported by weir must answer, or none if it is EMPTY.
each_source_answers() {
	weir steer where --json --service "$1" 127.0.1.{1..16} >/tmp/where || return
	jq -r --arg service "$1" --arg empty "${3:-}" \
		'.addresses[] | "\(.address) \(if "\(.slot)" == $empty then "refused" else "\($service)-\(.slot)" end)"' /tmp/where >/tmp/answers
	[ "$(wc -l </tmp/answers)" = 16 ] || { cat /tmp/where; return 1; }
	sink each "127.0.0.1:$2" </tmp/answers
}

main_pid() {
	systemctl show --property MainPID --value "$1"
}

# crash UNIT kills its main process and stores its number in $pid.
crash() {
	pid=$(main_pid "$1")
	if [ "$pid" = 0 ]; then
		echo "$1 does not run"
		return 1
	fi
	kill -9 "$pid"
}

slot_names_main() { # SERVICE SLOT UNIT: the slot's process is the unit's
	[ "$(slot "$1" pid "$2")" = "$(main_pid "$3")" ]
}

another_pid() { # UNIT PID: the unit runs with a main process other than PID
	local now
	now=$(main_pid "$1")
	[ "$now" != 0 ] && [ "$now" != "$2" ]
}

# Daemons without any knowledge of weir: one admitted by a line of its unit, two
# with a shared address, and one on sockets passed by systemd.
unit registered.service <<'EOF'
[Service]
Type=exec
ExecStart=/weir/sink serve -name registered-0 -listen 127.0.0.1:4740
ExecStartPost=/weir/weir steer admit registered --slot 0 --pid $MAINPID
Restart=always
RestartSec=2
EOF
unit weir.service <<'EOF'
[Service]
ExecStart=/weir/weir serve
EOF
unit named@.service <<'EOF'
[Service]
Type=exec
ExecStart=/weir/sink serve -name named-%i -listen 127.0.0.1:4741 -reuseport
Restart=always
RestartSec=15
EOF
unit activated.socket <<'EOF'
[Socket]
ListenDatagram=127.0.0.1:4742
ListenStream=127.0.0.1:4742
EOF
unit activated.service <<'EOF'
[Unit]
Requires=activated.socket
[Service]
ExecStart=/weir/sink serve -name activated-0
Restart=always
RestartSec=1
EOF

# On demand: systemd starts it only when a packet arrives.
unit demanded.socket <<'EOF'
[Socket]
ListenDatagram=127.0.0.1:4743
ListenStream=127.0.0.1:4743
EOF
unit demanded.service <<'EOF'
[Unit]
Requires=demanded.socket
[Service]
ExecStart=/weir/sink serve -name demanded-0
EOF
unit supervised.service <<'EOF'
[Service]
Type=exec
ExecStart=/weir/weir steer run supervised --slot 0 --listen-fds --restart -- /weir/sink serve -name supervised-0
Restart=always
RestartSec=1
EOF

cat >/weir/weir.yaml <<'EOF'
services:
  registered:
    listen: [udp 127.0.0.1:4740, tcp 127.0.0.1:4740]
    steer: {slots: 1}
  named:
    listen: [udp 127.0.0.1:4741, tcp 127.0.0.1:4741]
    steer: {slots: 2}
    members:
      - {slot: 0, unit: named@0.service}
      - {slot: 1, unit: named@1.service}
  activated:
    listen: [udp 127.0.0.1:4742, tcp 127.0.0.1:4742]
    steer: {slots: 1}
    members:
      - {slot: 0, unit: activated.service}
  demanded:
    listen: [udp 127.0.0.1:4743, tcp 127.0.0.1:4743]
    steer: {slots: 1}
    members:
      - {slot: 0, unit: demanded.service, keep: true, ready: {command: [/bin/sh, -c, "grep -q sink /proc/$WEIR_PID/comm"]}}
  supervised:
    listen: [udp 127.0.0.1:4744, tcp 127.0.0.1:4744]
    steer: {slots: 1}
EOF
check 'weir apply' weir apply -f /weir/weir.yaml

# ExecStartPost: no weir process runs.
check 'a slot without member rejects' answers refused udp 127.0.0.1:4740
check 'ExecStartPost admits the unit' systemctl start registered.service
check 'its slot is admitted when the start is done' slot_is admitted registered 0
check 'it gets every source' each_source_answers registered 4740
crash registered.service
check 'killed: its slot rejects' eventually 1 answers refused udp 127.0.0.1:4740
check 'killed: over TCP too' answers refused tcp 127.0.0.1:4740
check 'Restart= brings it back' eventually 120 another_pid registered.service "$pid"
check 'ExecStartPost admits it anew' eventually 120 slot_is admitted registered 0
check 'it gets every source again' each_source_answers registered 4740

# Members named by unit: weir serve finds their processes and follows them.
check 'weir serve runs as a unit' systemctl start weir.service
check 'two units start' systemctl start named@0.service named@1.service
for number in 0 1; do
	check "unit named@$number holds slot $number" eventually 120 slot_is admitted named "$number"
done
check 'each source reaches its slot' each_source_answers named 4741
systemctl kill --signal KILL weir.service
check 'weir serve killed: each source still does' each_source_answers named 4741
check 'weir serve returns' systemctl restart weir.service
crash named@1.service
check 'killed: only its sources are rejected' each_source_answers named 4741 1
check 'Restart= brings the unit back' eventually 120 another_pid named@1.service "$pid"
check 'its slot is admitted again' eventually 120 slot_is admitted named 1
check 'the same sources return to it' each_source_answers named 4741
check 'stopping a unit empties its slot' systemctl stop named@0.service
check 'stopped: only its sources are rejected' each_source_answers named 4741 0

# LISTEN_FDS: the sockets stay open after the daemon's death, and its successor
# gets them.
check 'a unit with LISTEN_FDS starts' systemctl start activated.service
check 'its inherited sockets are adopted' eventually 120 slot_is admitted activated 0
check 'they get every source' each_source_answers activated 4742
crash activated.service
check 'killed: Restart= brings it back' eventually 120 another_pid activated.service "$pid"
check 'its slot is admitted again' eventually 120 slot_is admitted activated 0
check 'it gets every source again' each_source_answers activated 4742

# The successor serves requests queued in systemd's sockets at the daemon's death.
# queued PORT UNIT NAME stops the unit's process, sends over both protocols, kills
# the process, and expects NAME to answer both.
queued() {
	local status=0 asked
	pid=$(main_pid "$2")
	kill -STOP "$pid"
	answers "$3" udp "127.0.0.1:$1" 127.0.1.1 30s &
	asked=$!
	answers "$3" tcp "127.0.0.1:$1" 127.0.1.2 30s &
	sleep 1
	kill -9 "$pid"
	wait "$asked" || status=1
	wait $! || status=1
	return "$status"
}
check 'what waits when it dies is answered by the next' queued 4742 activated.service activated-0
check 'its slot is admitted once more' eventually 120 slot_is admitted activated 0

# On demand, with keep: the slot stays open without a process.
check 'a unit on demand starts' systemctl start demanded.service
check 'its slot is admitted' eventually 120 slot_is admitted demanded 0
check 'it gets every source' each_source_answers demanded 4743
check 'stopped, systemd holds its sockets' systemctl stop demanded.service
check 'its slot stays admitted' slot_is admitted demanded 0
check 'a datagram starts it, and is answered' answers demanded-0 udp 127.0.0.1:4743 127.0.1.1 30s
check 'the slot names its new process' eventually 120 slot_names_main demanded 0 demanded.service
check 'its socket unit stopped, the slot is empty' systemctl stop demanded.socket demanded.service
check 'and rejects' eventually 5 answers refused udp 127.0.0.1:4743

# weir steer run as a unit's process.
check 'weir steer run starts as a unit' systemctl start supervised.service
check 'its daemon is admitted' eventually 120 slot_is admitted supervised 0
check 'it gets every source' each_source_answers supervised 4744
pid=$(slot supervised pid 0)
check 'the daemon is killed' kill -9 "$pid"
check 'its slot stays admitted' slot_is admitted supervised 0
check 'its next run answers what waited' answers supervised-0 udp 127.0.0.1:4744 127.0.1.1 30s
check 'weir steer run is killed' crash supervised.service
check 'Restart= brings both back' eventually 120 another_pid supervised.service "$pid"
check 'the slot is admitted again' eventually 120 slot_is admitted supervised 0
check 'it gets every source again' each_source_answers supervised 4744
check 'stopping the unit ends both' systemctl stop supervised.service
check 'stopped: its slot rejects' eventually 5 answers refused tcp 127.0.0.1:4744

check 'weir remove' weir remove
check 'nothing is left pinned' test ! -e /sys/fs/bpf/weir
[ "$failed" = 0 ] || journalctl --no-pager --lines 60 --unit weir.service --unit 'registered.service' --unit 'named@*' --unit activated.service --unit demanded.service --unit supervised.service

exit "$failed"
