// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"

	"github.com/weir-project/weir/kernel/hook"
)

// function is the segment of this router for a session's peer. Its route is on no link's device, because
// systemd-networkd, for example, deletes foreign routes of links when it starts.
type function struct {
	hook.Segment
	vrf  int  // index of the VRF whose table has the route; 0: the main table
	kept bool // the route exists, though rules prefer another; listing routes each second costs too much
}

// findFunction returns the function of a session with a device, or nil if nobody probes it. It runs in the session's
// namespace.
func findFunction(s *Session) *function {
	full := s.filled()
	if !full.judges() {
		return nil
	}
	p, err := findDevice(full.Device)
	if err != nil {
		return nil
	}
	f := &function{Segment: hook.Segment{SID: full.Function, Table: p.table}}
	if p.table != 0 {
		f.vrf = p.master
	}
	return f
}

// unrouted reports the first session without the route of its function; "": none. It runs in the namespace.
func (k *known) unrouted() (string, error) {
	for i := range k.assignments {
		p := &k.assignments[i]
		if p.device == 0 {
			continue
		}
		if p.function == nil {
			if p.function = findFunction(p.Session); p.function == nil {
				continue
			}
		}
		if p.function.kept || p.function.Chosen(p.function.vrf) {
			continue
		}
		lost, err := p.function.Lost()
		if err != nil {
			return "", err
		}
		p.function.kept = !lost
		if lost {
			return fmt.Sprintf("the route to %s, the function of session %s, was removed", p.function.SID, p.Name), nil
		}
	}
	return "", nil
}

// routeProblem reports a missing route for the peer's probes; "": the route exists, or this is unknown. It runs in
// the namespace.
func routeProblem(s *Session) string {
	f := findFunction(s)
	if f == nil || f.Chosen(f.vrf) {
		return ""
	}
	if lost, err := f.Lost(); err != nil || !lost {
		return ""
	}
	return fmt.Sprintf("the route to its function %s was removed, so probes of the peer are not answered", f.SID)
}
