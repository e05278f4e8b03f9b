// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/internal/sockdiag"
	svc "github.com/weir-project/weir/service"
)

const (
	// unservedFor is the time without a member after which the load balancer is told. A successor may become ready a
	// moment later, and new flows wait in the listener at the keeper.
	unservedFor = 250 * time.Millisecond
	// servedEvery is the polling interval for services without a member. The keeper reports members at once; servers
	// without a keeper are not reported.
	servedEvery = time.Second
)

// watchServed reports services without a server here to the load balancer. It then sends this backend no new flows
// for them.
func (a *Agent) watchServed(ctx context.Context) {
	since := map[string]time.Time{} // services without a server, and since when
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.served:
		case <-t.C:
		}
		now, next := time.Now(), servedEvery
		var none []string
		absent := a.absentAddresses()
		for name := range a.known.Load().services {
			if !absent[name] && a.serves(ctx, name) {
				delete(since, name)
				continue
			}
			if since[name].IsZero() {
				since[name] = now
			}
			if wait := unservedFor - now.Sub(since[name]); wait > 0 {
				next = min(next, wait)
				continue
			}
			none = append(none, name)
		}
		slices.Sort(none)
		a.tellUnserved(none)
		t.Reset(next)
	}
}

// absentAddresses returns the services without a local address: the kernel forwards or drops their packets. On errors
// of the kernel it returns none.
func (a *Agent) absentAddresses() map[string]bool {
	out := map[string]bool{}
	var local []netip.Prefix
	err := a.inside(func() (err error) {
		if local, err = svc.LocalRoutes(netlink.FAMILY_ALL, unix.RTN_LOCAL); err != nil {
			return err
		}
		all, err := net.InterfaceAddrs() // addresses of VRFs have their routes in other tables
		for _, x := range all {
			if p, err := netip.ParsePrefix(x.String()); err == nil {
				local = append(local, netip.PrefixFrom(p.Addr().Unmap(), p.Addr().Unmap().BitLen()))
			}
		}
		return err
	})
	for name, listens := range a.known.Load().services {
		has := func(s Service) bool {
			return slices.ContainsFunc(local, func(p netip.Prefix) bool { return p.Contains(s.Listen.Addr().Unmap()) })
		}
		if err == nil && len(listens) > 0 && !slices.ContainsFunc(listens, has) {
			out[name] = true
		}
	}
	return out
}

// pollServed wakes watchServed.
func (a *Agent) pollServed() {
	select {
	case a.served <- struct{}{}:
	default: // a wake-up is already pending
	}
}

func (a *Agent) tellUnserved(none []string) {
	a.mu.Lock()
	same := slices.Equal(a.unserved, none)
	a.unserved = none
	a.mu.Unlock()
	if same || !a.o.Registration.Address.IsValid() {
		return
	}
	a.o.Log.Info("services without a server at this backend", "services", none)
	if c := a.lb.conn(); c != nil {
		_ = c.Register(a.registration()) // a failed connection is made again, and starts with the registration
	}
}

// serves reports whether new flows of a service have a server here: a ready member, or a server without a keeper. If
// that is unknown, it returns true.
func (a *Agent) serves(ctx context.Context, name string) bool {
	know := a.known.Load()
	if p := know.home[name]; p != nil && p.members.Load() > 0 {
		return true
	}
	kept := map[uint64]bool{} // listeners of members, none of them ready
	if p := know.home[name]; p != nil && p.members.Load() == 0 {
		r, err := handoff.Status(ctx, a.o.Keeper)
		if err != nil {
			return true
		}
		for _, v := range r.Services {
			for _, s := range v.Sessions {
				if id, err := strconv.ParseUint(s.ID, 10, 64); err == nil && v.Name == name && s.Kind == "listener" {
					kept[id] = true
				}
			}
		}
	}
	listens := false
	err := a.inside(func() error {
		for _, s := range know.services[name] {
			all, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen, LocalPort: s.Listen.Port()})
			if err != nil {
				return err
			}
			listens = listens || slices.ContainsFunc(all, func(l sockdiag.Socket) bool { return covers(l, s.Listen.Addr()) && !kept[l.Cookie] })
		}
		return nil
	})
	return listens || err != nil
}

// covers reports whether a listener receives connections to an address.
func covers(l sockdiag.Socket, at netip.Addr) bool {
	local := l.Local.Addr()
	switch {
	case !local.IsUnspecified():
		return local.Unmap() == at.Unmap()
	case at.Unmap().Is4():
		return l.Family == unix.AF_INET || !l.V6Only
	}
	return l.Family == unix.AF_INET6
}
