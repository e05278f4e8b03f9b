// SPDX-License-Identifier: Apache-2.0

package main

// row is a row of the table of features. A kernel has it if all jobs of vm/objects load, all needs are there and all
// packages pass.
type row struct {
	feature  string // a name of host.Features
	part     string
	jobs     []string // of objects.Jobs
	needs    []string // checks of weir doctor beside the jobs' needs
	packages []string // empty: no package of vm/packages tests this part
}

var rows = []row{
	{"steer", "engine `sk_lookup`", []string{"steer sk_lookup"}, nil, []string{"feature/steer"}},
	{"steer", "bindings of one service by prefix and port", []string{"steer bindings"}, nil, []string{"feature/steer", "table"}},
	{"steer", "engine `sk_reuseport`", []string{"steer sk_reuseport"}, nil, []string{"feature/steer"}},
	{"steer", "`migrate`: queues of dead members", []string{"steer migrate"}, nil, []string{"feature/steer"}},
	{"steer", "withdrawal at the exit of a process", []string{"steer exit", "steer sk_reuseport exit"}, nil, []string{"feature/steer"}},
	{"steer", "new sockets by event", []string{"steer watch"}, nil, []string{"feature/steer"}},
	{"steer", "foreign programs in reuseport groups", []string{"steer groups"}, nil, []string{"feature/steer"}},
	{"steer", "`share_port`", []string{"steer share_port"}, nil, []string{"feature/steer"}},
	{"steer", "`copy`", []string{"steer copy"}, nil, nil},
	{"steer", "templates of flow exporters", []string{"steer templates", "steer inject"}, nil, nil},
	{"guard", "at the sockets of a service", []string{"guard sockets"}, nil, []string{"feature/guard", "feature/guard/guardtest"}},
	{"guard", "in one of several network namespaces", []string{"guard sockets by namespace"}, nil, []string{"feature/guard"}},
	{"guard", "at interfaces", []string{"guard interfaces"}, nil, []string{"feature/guard"}},
	{"guard", "at a program's own sockets", []string{"guard own socket", "guard client"}, nil, []string{"feature/guard"}},
	{"filter", "`xdp`", []string{"filter xdp"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "`tcx`", []string{"filter tcx"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "`clsact`", []string{"filter clsact"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "`netfilter`", []string{"filter netfilter"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "`nft`", []string{"filter nft"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "`socket`", []string{"filter socket"}, nil, []string{"feature/filter", "feature/filter/filtertest"}},
	{"filter", "lists of any size", []string{"filter lists"}, nil, []string{"feature/filter/filtertest", "table"}},
	{"keeper", "sessions across restarts", nil, []string{"pidfd_open"}, []string{"feature/handoff/keeper", "feature/handoff/sock"}},
	{"backend", "sessions between hosts", []string{"backend quarantine"}, []string{"TCP_REPAIR"}, []string{"feature/handoff/repair", "feature/handoff/backend"}},
	{"lb", "load balancer", []string{"lb"}, nil, []string{"feature/handoff/lb"}},
	{"reroute", "protected links", []string{"reroute out"}, nil, []string{"feature/reroute/protect"}},
	{"reroute", "repairs at ingress, before routing", []string{"reroute in"}, nil, nil},
	{"reroute", "liveness", []string{"reroute liveness"}, nil, []string{"feature/reroute/liveness"}},
	{"reroute", "answers to liveness probes", []string{"reroute liveness answers"}, nil, nil},
	{"reroute", "BFD", []string{"reroute bfd"}, nil, []string{"feature/reroute/bfd/engine"}},
}

// others are jobs without a row: tests of libraries and a benchmark.
var others = []string{"reroute liveness benchmark", "table", "table bindings", "guard simulation"}

// series are the columns of the page, in order.
var series = []struct{ name, title, about string }{
	{"5.10", "5.10", "Debian 11"},
	{"6.1", "6.1", "Debian 12"},
	{"6.12", "6.12", "Debian 12, backports"},
	{"newest", "newest", "Debian 13, backports"},
	{"ubuntu-22.04", "5.15 Ubuntu", "Ubuntu 22.04"},
	{"ubuntu-24.04", "6.8 Ubuntu", "Ubuntu 24.04"},
	{"arm64", "6.12 arm64", "Debian 12, backports, on arm64"},
}
