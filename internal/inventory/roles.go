// SPDX-License-Identifier: Apache-2.0

package inventory

import "slices"

// Role is the purpose of a program.
type Role string

// Roles.
const (
	Collector Role = "telemetry collector"
	DNS       Role = "DNS server"
	Web       Role = "web server"
	Routing   Role = "routing daemon"
	Access    Role = "remote access" // never steered: a mistake would lock the operator out
	Own       Role = "weir"
	Other     Role = "server"
)

// roles are the known programs, by the name of their process.
var roles = map[Role][]string{
	Collector: {"nfacctd", "sfacctd", "pmbmpd", "pmtelemetryd", "goflow2", "nfcapd", "sfcapd", "telegraf", "fluent-bit", "vector",
		"akvorado", "rsyslogd", "syslog-ng", "snmptrapd", "logstash", "openbmpd", "flow-capture"},
	DNS:     {"knotd", "named", "unbound", "nsd", "kresd", "dnsmasq", "pdns_server", "pdns_recursor", "coredns", "dnsdist"},
	Web:     {"nginx", "haproxy", "apache2", "httpd", "caddy", "envoy", "traefik", "h2o", "lighttpd"},
	Routing: {"zebra", "bfdd", "bgpd", "ospfd", "ospf6d", "isisd", "ripd", "ripngd", "pathd", "staticd", "ldpd", "pimd", "babeld", "bird", "bird6", "gobgpd"},
	Access:  {"sshd", "sshd-session", "dropbear", "dhclient", "dhcpcd", "systemd", "systemd-network", "systemd-resolve", "chronyd", "ntpd"},
	Own:     {"weir"},
}

// ports are the usual ports of roles, for other programs.
var ports = map[Role][]uint16{
	Collector: {162, 514, 1790, 2055, 2056, 4432, 4739, 6343, 9995, 9996, 11019},
	DNS:       {53, 853},
	Web:       {80, 443, 8080, 8443},
	Access:    {22},
}

// roleOf returns a program's role by its name, else by its ports.
func roleOf(name string, listens []Listen) Role {
	for role, names := range roles {
		if slices.Contains(names, name) {
			return role
		}
	}
	for _, role := range []Role{Access, Collector, DNS, Web} {
		if slices.ContainsFunc(listens, func(l Listen) bool { return slices.Contains(ports[role], l.Local.Port()) }) {
			return role
		}
	}
	return Other
}

// CollectorPorts returns the ports of telemetry known to [Gather].
func CollectorPorts() []uint16 { return slices.Clone(ports[Collector]) }
