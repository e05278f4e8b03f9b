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
	// unservedFor is for how long a service has to be without a member before the load balancer is told. A member that takes over
	// from its predecessor may be ready a moment later, and new flows wait in the listener that the keeper keeps.
	unservedFor = 250 * time.Millisecond
	// servedEvery is how often a service without a member is looked at. The keeper tells of its members at once; of a backend that is
	// no member nothing tells.
	servedEvery = time.Second
)

// watchServed tells the load balancer which services nobody serves here: it gives this backend no new flows of them.
func (a *Agent) watchServed(ctx context.Context) {
	since := map[string]time.Time{} // services that nobody serves
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

// absentAddresses are the services of which no address is local: the kernel forwards or drops their packets, whoever listens. Without
// an answer of the kernel there is none.
func (a *Agent) absentAddresses() map[string]bool {
	out := map[string]bool{}
	var local []netip.Prefix
	err := a.inside(func() (err error) {
		if local, err = svc.LocalRoutes(netlink.FAMILY_ALL, unix.RTN_LOCAL); err != nil {
			return err
		}
		all, err := net.InterfaceAddrs() // those of VRFs have their routes elsewhere
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

// pollServed has watchServed look.
func (a *Agent) pollServed() {
	select {
	case a.served <- struct{}{}:
	default: // it has yet to
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
	a.o.Log.Info("services that nobody serves at this backend", "services", none)
	if c := a.lb.conn(); c != nil {
		_ = c.Register(a.registration()) // a connection that fails is made again, and begins with the registration
	}
}

// serves says whether new flows of a service have somebody here to go to: a member that is ready, or a backend that is no member. Where
// that cannot be told it says yes.
func (a *Agent) serves(ctx context.Context, name string) bool {
	know := a.known.Load()
	if p := know.home[name]; p != nil && p.members.Load() > 0 {
		return true
	}
	kept := map[uint64]bool{} // listeners of members: none is ready
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

// covers says whether connections to an address come to a listener.
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
