// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/tunnel"
)

// certificateNear is the time before a certificate's expiry in which it is reported.
const certificateNear = 7 * 24 * time.Hour

// RemedyProblem is the remedy of a wrong answer at the socket of an agent.
const RemedyProblem = "restart weir serve; if another process listens there, end it"

// Findings returns the problems of a load balancer. These are a missing network namespace, a wrong
// answer of its agent, a device without its program, a backend with unprivileged tunnel ports, and a rejected or expiring
// certificate.
func (s Status) Findings() (out []feature.Finding) {
	add := func(text, remedy string) {
		out = append(out, feature.Finding{Object: "load balancer " + s.Name, Text: text, Remedy: remedy})
	}
	fail := func(text, remedy string) { out = append(out, feature.Failure("load balancer "+s.Name, text, remedy)) }
	if s.Gone {
		fail(fmt.Sprintf("its network namespace net:[%s] is gone, and its data path with it", s.Netns), feature.RemedyGone)
	}
	if s.Problem != "" {
		fail("wrong answer at its agent's socket: "+s.Problem, RemedyProblem)
	}
	for _, d := range s.Devices {
		remedy := feature.DeviceRemedy
		switch {
		case d.Device == tunnel.Device:
			remedy = "run weir serve: it creates the device again"
		case d.Absent:
			remedy = "restore the interface while weir serve runs, or remove it from lb.devices"
		}
		fail(fmt.Sprintf("device %s of namespace net:[%s]: %s: its packets do not reach the load balancer", d.Device, s.Netns, d.Reason), remedy)
	}
	for _, b := range s.Backends {
		if b.UserPorts {
			add(fmt.Sprintf("tunnel of backend %s: packets come from source ports open to every user of its host", b.Name),
				"create the backend's device with srcport 512 1023 (docs/LB.md), then set lb.tunnel_root_ports; if it is set already, a user of the host sends them")
		}
	}
	if c := s.Certificate; c != nil && c.Problem != "" {
		add("the new certificate is rejected, the previous one stays in use: "+c.Problem, "fix the files of lb.tls")
	} else if c != nil && time.Until(c.NotAfter) < certificateNear {
		add("the certificate expires at "+c.NotAfter.UTC().Format(time.RFC3339), "replace the files of lb.tls")
	}
	return out
}
