// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/admit"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// register processes a backend's registration. The announcements repeat a rejection until the backend registers again:
// the last one told is the backend's status.
func (a *Agent) register(c *peer.Conn, r peer.Registration) {
	if err := a.enroll(c, r); err != nil {
		a.o.Log.Warn("registration rejected", "backend", c.Peer.Name, "err", err)
		a.reject(c, err)
		return
	}
	a.kicked()
}

// reject reports a rejected registration to its backend, with the latest announcement.
func (a *Agent) reject(c *peer.Conn, reason error) {
	c.Reject(reason.Error())
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.announced != nil {
		c.Post(*a.announced)
		return
	}
	a.news = true // the first announcement
	a.kicked()
}

func (a *Agent) enroll(c *peer.Conn, r peer.Registration) error {
	own := false
	if err := a.f.ns.Do(func() error { own = locate.Own(r.Address.Unmap()); return nil }); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	m := a.members[c.Peer.Number]
	err := admit.Registration(&r, a.o.Services)
	switch {
	case !a.o.Manage:
		return fmt.Errorf("this load balancer accepts no registrations")
	case a.backends[c.Peer.Number] != c:
		return nil // of a replaced connection
	case err != nil:
		return err
	case own:
		return fmt.Errorf("address %s is the load balancer's own: give the backend's", r.Address)
	case m != nil && m.told != nil && m.Address.IsValid() && m.Address != r.Address:
		return fmt.Errorf("address %s: lb.backends has %s for this backend", r.Address, m.Address)
	}
	for _, o := range a.members {
		if o.Number != c.Peer.Number && o.Address == r.Address {
			return fmt.Errorf("address %s is backend %s's%s", r.Address, o.Name, a.refusal(o.Number, "address", c.Peer))
		}
	}
	if _, named := a.names[c.Peer.Number]; !named { // the partner may have named it since the connection began
		if err := a.owns(c.Peer.Number, c.Peer.Name); err != nil {
			return err
		}
	}
	if err := a.f.names.Loosen(c.Peer.Number, false); err != nil {
		return err
	}
	if m == nil {
		m = &member{}
		a.members[c.Peer.Number] = m
		delete(a.forgotten, c.Peer.Number)
	}
	if m.Address != r.Address {
		m.placed, m.checked, m.rival = time.Time{}, time.Time{}, ""
	}
	m.Number, m.Name, m.Address, m.Weight, m.Services = c.Peer.Number, c.Peer.Name, r.Address, r.Weight, r.Services
	if t := m.told; t != nil && t.Weighted && r.Weight > 0 {
		m.Weight = t.Weight
	}
	if t := m.told; t != nil && len(t.Services) > 0 {
		m.Services = t.Services
	}
	m.Agent = cmp.Or(r.Agent, m.Agent)
	m.said = c
	c.Registered()
	if !slices.Equal(m.unserved, r.Unserved) {
		a.o.Log.Info("services without a member at backend", "backend", c.Peer.Name, "services", r.Unserved)
	}
	m.unserved = r.Unserved
	a.news = true
	a.o.Log.Info("backend registered", "name", m.Name, "number", m.Number, "address", m.Address, "weight", m.Weight)
	return nil
}

// fit shortens the members to the longest message. It logs the omitted ones.
func (a *Agent) fit(p peer.Peers) peer.Peers {
	p, left := p.Fit()
	if len(left) > 0 {
		a.o.Log.Warn("backend list too long, omitting backends", "backends", len(left), "first", left[0])
	}
	return p
}
