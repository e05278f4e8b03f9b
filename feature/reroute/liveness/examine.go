// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/weir-project/weir/feature"
)

// examine returns an error for conditions preventing sessions, and warns of missing ones.
func examine(plan *feature.Plan, c Config) error {
	if _, err := loopCPUs(c.CPUs); err != nil {
		return err
	}
	own, err := addresses()
	if err != nil {
		return err
	}
	for _, s := range c.Sessions {
		warnOfAddresses(plan, s, own)
		_, err := findDevice(s.Device)
		if errors.Is(err, errNoDevice) {
			plan.Warn("session %s: there is no interface %s: weir serve or weir apply starts the session once it exists", s.Name, s.Device)
		} else if err != nil {
			return fmt.Errorf("session %q: device %s: %w", s.Name, s.Device, err)
		}
		// Answers are forwarded. bpf_fib_lookup also needs a device with forwarding to return neighbours.
		if err == nil && !forwards(s.Device) {
			return fmt.Errorf("session %q: device %s does not forward IPv6, but probes need it: sysctl -w net.ipv6.conf.all.forwarding=1", s.Name, s.Device)
		}
	}
	return nil
}

// addresses returns the addresses of the calling thread's namespace.
func addresses() (map[netip.Addr]bool, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading this router's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			own[p.Addr().Unmap()] = true
		}
	}
	return own, nil
}

// warnOfAddresses warns of probes without a way back for answers, and of probes to this router itself.
func warnOfAddresses(plan *feature.Plan, s Session, own map[netip.Addr]bool) {
	if !s.sends() {
		return
	}
	if !own[s.Source] {
		plan.Warn("session %s: source %s is no address of this router: answers to its probes are lost until it is", s.Name, s.Source)
	}
	for field, a := range map[string]netip.Addr{"via": s.Via, "peer": s.Peer} {
		if own[a] {
			plan.Warn("session %s: %s %s is an address of this router itself, not of the peer", s.Name, field, a)
		}
	}
}

// forwards reports whether forwarding is on for a device of the calling thread's namespace, and for the namespace
// itself.
func forwards(device string) bool {
	for _, of := range []string{"all", device} {
		text, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + of + "/forwarding")
		if err == nil && strings.TrimSpace(string(text)) == "0" {
			return false
		}
	}
	return true
}
