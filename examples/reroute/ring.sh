#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# A ring of four routers, each a network namespace: ring-a, ring-b, ring-c, ring-d. A switch, ring-switch, is between
# a and b. Needs root.
#   ring.sh up     make the ring
#   ring.sh cut    stop the switch; a and b keep their carrier
#   ring.sh heal   start the switch
#   ring.sh down   remove the ring
set -eu

routers="a b c d"

link() { # link A B: addresses of interface to-B of A and to-A of B
	ip -n "ring-$1" addr add "fd00:$1$2::$1/64" dev "to-$2" nodad
	ip -n "ring-$2" addr add "fd00:$1$2::$2/64" dev "to-$1" nodad
	ip -n "ring-$1" link set "to-$2" up
	ip -n "ring-$2" link set "to-$1" up
}

cable() { # cable A B: interface to-B of A, to-A of B
	ip -n "ring-$1" link add "to-$2" type veth peer name "to-$1" netns "ring-$2"
}

switch() { # the link between a and b
	ip netns add ring-switch
	ip -n ring-switch link add switch type bridge
	for r in a b; do
		ip -n ring-switch link add "port-$r" type veth peer name "cable-$r" netns "ring-$r"
		ip -n ring-switch link set "port-$r" up master switch
	done
	ip -n ring-a link set cable-a name to-b
	ip -n ring-b link set cable-b name to-a
	ip -n ring-switch link set switch up
}

route() { # route ROUTER TO VIA DEVICE: the address and the segments of TO
	ip -n "ring-$1" route add "2001:db8:$2::/48" via "$3" dev "$4" src "2001:db8:$1::1"
	ip -n "ring-$1" route add "fc00:$2::/32" via "$3" dev "$4"
}

up() {
	for r in $routers; do
		ip netns add "ring-$r"
		ip -n "ring-$r" link set lo up
		ip netns exec "ring-$r" sysctl -qw net.ipv6.conf.all.forwarding=1 net.ipv6.conf.all.seg6_enabled=1 net.ipv6.conf.default.seg6_enabled=1
		ip -n "ring-$r" addr add "2001:db8:$r::1/128" dev lo
	done
	switch
	cable b c
	cable c d
	cable a d
	link a b
	link b c
	link c d
	link a d
	# Shortest paths, as a routing protocol would install them. Only traffic between a and b uses the link a-b, and
	# traffic of c to a and of d to b.
	route a b fd00:ab::b to-b; route a c fd00:ad::d to-d; route a d fd00:ad::d to-d
	route b a fd00:ab::a to-a; route b c fd00:bc::c to-c; route b d fd00:bc::c to-c
	route c b fd00:bc::b to-b; route c d fd00:cd::d to-d; route c a fd00:bc::b to-b
	route d a fd00:ad::a to-a; route d c fd00:cd::c to-c; route d b fd00:ad::a to-a
	# Segments End.DT6 of c and d: they remove the outer header and route the packet. A route goes with its device.
	ip -n ring-c route add fc00:c::d6 encap seg6local action End.DT6 table 254 dev to-b
	ip -n ring-d route add fc00:d::d6 encap seg6local action End.DT6 table 254 dev to-a
}

case "${1:-}" in
up) up ;;
cut) ip -n ring-switch link set switch down ;;
heal) ip -n ring-switch link set switch up ;;
down) for r in $routers switch; do ip netns del "ring-$r" 2>/dev/null || true; done ;;
*)
	echo "usage: ring.sh up|cut|heal|down" >&2
	exit 2
	;;
esac
