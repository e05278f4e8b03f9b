// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// MaxTold limits the processes named by a warning.
const MaxTold = 5

// BindingConflicts returns warnings about traffic lost to bindings in a namespace. Sockets bound to the same addresses
// lose their traffic. A binding of every port also takes the answers to this host's own requests.
func BindingConflicts(r *kernel.Root, ns *netns.Handle, bindings ...bindings.Binding) (warnings []string) {
	own := sync.OnceValue(func() map[uint64]bool { return registeredCookies(r, ns) }) // up to 65,536 services
	_ = ns.Do(func() error {
		routes, err := service.LocalRoutes(netlink.FAMILY_ALL, unix.RTN_LOCAL)
		if err != nil {
			return err
		}
		var local []netip.Addr // single addresses, without local networks
		for _, p := range routes {
			if p.IsSingleIP() {
				local = append(local, p.Addr())
			}
		}
		for _, b := range bindings {
			if b.Port != 0 {
				continue
			}
			here := slices.DeleteFunc(slices.Clone(local), func(a netip.Addr) bool { return !b.Prefix.Contains(a) })
			if len(here) == 0 {
				continue // previously nobody received packets to these addresses
			}
			if b.Proto == unix.IPPROTO_UDP {
				warnings = append(warnings, fmt.Sprintf("%s takes every UDP port of this host's address %s, including source ports of its own requests: answers of DNS, NTP and others to unconnected sockets go to %s: bind single ports instead", b, here[0], b.Service))
			}
			warnings = append(warnings, socketConflicts(b, here, own())...)
		}
		return nil
	})
	return warnings
}

// socketConflicts names the processes whose sockets lose traffic to a binding.
func socketConflicts(b bindings.Binding, here []netip.Addr, own map[uint64]bool) (out []string) {
	socks, err := engine.Bound(uint8(b.Proto), 0)
	if err != nil {
		return nil
	}
	return ConflictsAmong(b, here, socks, own)
}

// ConflictsAmong is socketConflicts for the given sockets of the binding's protocol.
func ConflictsAmong(b bindings.Binding, here []netip.Addr, socks []sockdiag.Socket, own map[uint64]bool) (out []string) {
	for _, s := range socks {
		if b.Port != 0 && s.Local.Port() != b.Port {
			continue
		}
		a := s.Local.Addr().Unmap()
		covered := a.IsUnspecified() && (a.Is6() && !s.V6Only || a.Is4() == b.Prefix.Addr().Is4()) || slices.Contains(here, a)
		if own[s.Cookie] || s.Inode == 0 || s.Local.Port() == 0 || !covered {
			continue
		}
		if len(out) == MaxTold {
			return append(out, "and more sockets: ss -lntup lists them")
		}
		who := "a socket"
		if pids := PIDs(s.Inode); len(pids) > 0 {
			who = ProcessName(pids[0])
		}
		out = append(out, fmt.Sprintf("%s at %s loses its traffic to %s", who, s.Local, b.Prefix))
	}
	return out
}

// registeredCookies returns the sockets that weir delivers packets to in a namespace.
func registeredCookies(r *kernel.Root, ns *netns.Handle) map[uint64]bool {
	own := map[uint64]bool{}
	for _, kind := range record.Engines {
		services, _, err := record.ReadAll(r, record.Scope(ns), kind)
		if err != nil {
			continue
		}
		o, err := r.Open(record.EngineInstance(record.Scope(ns), kind), "sockets")
		if err != nil {
			continue
		}
		for _, p := range services {
			for _, row := range append(p.Rows[:len(p.Rows):len(p.Rows)], p.Spare...) {
				for ep := range uint32(len(p.Service.Endpoints())) {
					var cookie uint64
					if o.Maps["sockets"].Lookup(row*spec.MaxEndpoints+ep, &cookie) == nil {
						own[cookie] = true
					}
				}
			}
		}
		o.Close()
	}
	named, _ := bindings.Registered(r, record.Scope(ns), false)
	for _, n := range named {
		for _, s := range n.Sockets {
			own[s.Cookie] = true
		}
	}
	return own
}

// WithoutSteering returns warnings about members that receive nothing while the service is bypassed. The kernel then
// delivers a port's packets to the sockets bound to it.
func (s *Service) WithoutSteering() (warnings []string) {
	for _, m := range s.Record.Service.Members {
		for i, b := range m.Bound {
			l := s.Record.Service.Listen[i]
			if b.Port != l.Port || b.Prefix != l.Prefix && b.Prefix.Bits() > 0 {
				warnings = append(warnings, fmt.Sprintf("slot %d's member is bound to %s: while %s is bypassed it gets no traffic of %s", m.Slot, b, s.Name, l))
			}
		}
	}
	for _, l := range s.Record.Service.Listen {
		if l.Prefix.IsValid() && l.Prefix.Bits() > 0 && !l.Prefix.IsSingleIP() {
			warnings = append(warnings, fmt.Sprintf("%s is a prefix: while %s is bypassed only sockets bound to the wildcard address get it", l, s.Name))
		}
	}
	return warnings
}
