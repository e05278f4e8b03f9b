// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/inventory"
)

var _ feature.Suggester = Feature{}

// tried are the collectors tested with steering (docs/COLLECTORS.md).
var tried = []string{"nfacctd", "sfacctd", "goflow2", "nfcapd"}

// maxSuggested is the maximum number of listens of a suggested service. A slot has at most [spec.MaxEndpoints] sockets,
// and a listen has up to two.
const maxSuggested = 4

// Suggest implements feature.Suggester: slots for collectors, and for other servers with several processes.
func (Feature) Suggest(h inventory.Host) (out []feature.Suggestion) {
	for _, p := range h.Programs {
		if p.Local() || len(p.Listens) > maxSuggested {
			continue
		}
		switch {
		case p.Role == inventory.Collector:
			out = append(out, suggestCollector(p))
		case p.Role == inventory.Web && p.Has("tcp"):
			out = append(out, feature.Suggestion{Service: p.Service, Text: "steer: {by: flow, slots: 1, share_port: true, generations: {idle: 30s, deadline: 5m}}\n",
				Reason: []string{"Replace the server under traffic. Its clients finish at the old process:",
					fmt.Sprintf("weir steer run %s --slot 0 --replace -- %s …", p.Service, p.Name)}})
		case (p.Role == inventory.DNS || p.Role == inventory.Other) && len(p.Instances) > 1 && p.Sockets() == 1:
			members, _ := suggestMembers(p)
			out = append(out, feature.Suggestion{Service: p.Service, Text: fmt.Sprintf("steer: {by: flow, slots: %d, on_empty: pass}\n", len(p.Instances)) + members,
				Reason: []string{fmt.Sprintf("Spread the flows over the %d processes. A flow stays at its process.", len(p.Instances))}})
		}
	}
	return out
}

func suggestCollector(p inventory.Program) feature.Suggestion {
	members, lack := suggestMembers(p)
	s := feature.Suggestion{Service: p.Service, Text: fmt.Sprintf("steer: {by: source, slots: %d, on_empty: pass}\n", len(p.Instances)) + members,
		Reason: []string{"All telemetry of a router goes to one slot. on_empty: reject, in place of pass, keeps it from other slots",
			"while the collector of its slot restarts: choose it once weir serve runs."}}
	if len(p.Instances) == 1 {
		s.Reason = append(s.Reason, "For a second collector raise slots, and add its member.")
	}
	switch {
	case lack != "":
		s.Reason = append(s.Reason, "Not in force: "+lack+".")
	case p.Sockets() > 1:
		s.Reason = append(s.Reason, fmt.Sprintf("Not in force: a process has %d sockets at one address, and a slot takes one (docs/COLLECTORS.md).", p.Sockets()))
	case !slices.Contains(tried, p.Name):
		s.Reason = append(s.Reason, fmt.Sprintf("Not in force: steering is not tested with %s (docs/COLLECTORS.md).", p.Name))
	default:
		s.Active = true
	}
	return s
}

// suggestMembers returns the key members of a service. lack is the reason if a member has no lasting name.
func suggestMembers(p inventory.Program) (text, lack string) {
	var b strings.Builder
	var named []string
	b.WriteString("members:\n")
	for slot, i := range p.Instances {
		member := fmt.Sprintf("pid: %d", i.PID)
		switch {
		case strings.HasSuffix(i.Unit, ".service") && i.Container == "":
			member = "unit: " + feature.Scalar(i.Unit)
		case i.PIDFile != "":
			member = "pidfile: " + feature.Scalar(i.PIDFile)
		case i.Cgroup != "" && i.Container == "":
			member = "cgroup: " + feature.Scalar(i.Cgroup)
		default:
			lack = fmt.Sprintf("process %d has no unit, pidfile or cgroup of its own, and its number changes with each start. weir finds pidfiles at %s", i.PID, inventory.PIDFileSources)
		}
		if slices.Contains(named, member) {
			lack = fmt.Sprintf("two processes have the same name %q: a slot needs one of its own", member)
		}
		named = append(named, member)
		fmt.Fprintf(&b, "  - {slot: %d, %s}\n", slot, member)
	}
	return b.String(), lack
}
