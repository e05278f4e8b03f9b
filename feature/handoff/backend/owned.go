// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/sockdiag"
)

// A restarted or different load balancer routes a session's packets by the hash until it knows the owner. The agent
// therefore reports all connections of this backend to the services' addresses: after connecting, and before the load
// balancer may forget silent flows. The kernel is the source, not the keeper, so connections of servers without
// handoff are included.

const (
	ownedEvery = 20 * time.Minute // if the load balancer does not report its idle time
	ownedAgain = time.Second      // delay after an error
	ownedLeast = 50 * time.Millisecond
)

// owning is the data for reportOwned.
type owning struct {
	services []Service // services with the backend chosen by source; a.known has the others
	every    time.Duration
	to       *peer.Conn // the connection of the latest report
}

// ownedStates are the TCP states whose packets must find their socket. A connecting client retransmits, and a closed
// connection has nothing left to send.
const ownedStates = 1<<sockdiag.Established | 1<<sockdiag.FinWait1 | 1<<sockdiag.FinWait2 | 1<<sockdiag.CloseWait | 1<<sockdiag.LastAck | 1<<sockdiag.Closing

// tellOwned schedules a report to the load balancer.
func (a *Agent) tellOwned() {
	select {
	case a.owns <- struct{}{}:
	default:
	}
}

// toldServices processes the load balancer's services, and the requested report interval.
func (a *Agent) toldServices(p peer.Peers) {
	var sourced []Service
	for _, s := range p.Services {
		if s.Proto == unix.IPPROTO_TCP && s.BySource {
			sourced = append(sourced, Service{Name: s.Name, ID: s.ID, Listen: s.Listen})
		}
	}
	every := ownedEvery
	if p.Idle > 0 {
		every = max(ownedLeast, time.Duration(p.Idle)*time.Millisecond/4)
	}
	c := a.lb.conn()
	a.mu.Lock()
	again := a.owning.to != c || a.owning.every != every || !slices.Equal(a.owning.services, sourced)
	a.owning = owning{sourced, every, c}
	a.mu.Unlock()
	if again {
		a.tellOwned()
	}
}

// reportOwned reports this backend's sessions to the load balancer until ctx is done.
func (a *Agent) reportOwned(ctx context.Context) {
	t := time.NewTimer(ownedEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.owns:
		case <-t.C:
		}
		a.mu.Lock()
		next := a.owning.every
		a.mu.Unlock()
		if next == 0 {
			next = ownedEvery
		}
		if c := a.lb.conn(); c != nil {
			records, err := a.ownedNow()
			if err != nil {
				a.o.Log.Warn("cannot report sessions to the load balancer", "err", err)
				next = ownedAgain
			} else {
				_ = c.TellFlows(records, true) // a failed connection closes itself; the next one gets a new report
			}
		}
		t.Reset(next)
	}
}

// ownedNow returns the connections of this backend. It reads the quarantine and the moves after the sockets, so it
// does not report a session that departs meanwhile.
func (a *Agent) ownedNow() (out []peer.FlowRecord, err error) {
	at := a.listens()
	sockets, err := a.sockets(at)
	if err != nil {
		return nil, err
	}
	entries, err := a.quarantine.Entries()
	if err != nil {
		return nil, err
	}
	quarantined := map[repair.Flow]quarantine.Entry{}
	for _, e := range entries {
		quarantined[e.Flow] = e
	}
	there := map[peer.Flow]bool{}
	for f, s := range sockets {
		r := peer.FlowRecord{Flow: peer.Flow{Service: at[f.Local], Client: f.Remote}}
		there[r.Flow] = true
		if s.Info != nil {
			r.Age = min(s.Info.LastDataRecv, s.Info.LastDataSent)
		}
		if a.owned(&r, s, quarantined[f]) {
			out = append(out, r)
		}
	}
	return append(out, a.hadLately(there)...), nil
}

// sockets returns this backend's connections to the given addresses, of all programs.
func (a *Agent) sockets(at map[netip.AddrPort]uint16) (map[repair.Flow]sockdiag.Socket, error) {
	out := map[repair.Flow]sockdiag.Socket{}
	for _, port := range ports(at) {
		err := a.inside(func() error {
			all, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: port, States: ownedStates, Info: true})
			for _, s := range all {
				f := repair.Flow{Local: unmapped(s.Local), Remote: unmapped(s.Remote)}
				if _, ok := at[f.Local]; ok {
					out[f] = s
				}
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// owned reports whether to report a connection, and fills in its state.
func (a *Agent) owned(r *peer.FlowRecord, s sockdiag.Socket, e quarantine.Entry) bool {
	a.mu.Lock()
	l, c := a.sending[r.Flow], a.receiving[r.Flow]
	if o, ok := a.epochs[r.Flow]; ok && o.session == s.Cookie {
		r.Epoch = o.epoch
	}
	a.mu.Unlock()
	switch e.State {
	case 0, quarantine.Pass:
		return true
	case quarantine.Shut, quarantine.Buffered: // its state may be at the destination
		if l == nil || e.Epoch == 0 {
			return false
		}
		r.Epoch, r.To = e.Epoch-1, l.to
		return true
	case quarantine.Quiet: // it has arrived, and has sent nothing
		if c == nil {
			return false
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		r.Epoch, r.Quiet = e.Epoch, true
		return c.dst.Phase == move.Active && c.dst.Epoch == e.Epoch
	}
	return false // it has left
}

// hadLately returns sessions that recently arrived here and have ended: a copy at their source is stale.
func (a *Agent) hadLately(there map[peer.Flow]bool) (out []peer.FlowRecord) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for id, o := range a.epochs {
		if !there[id] && time.Since(o.at) < nonceTime {
			out = append(out, peer.FlowRecord{Flow: id, Epoch: o.epoch, Gone: true})
		}
	}
	return out
}

// listens returns the services' addresses with their flow numbers at the load balancer.
func (a *Agent) listens() map[netip.AddrPort]uint16 {
	out := map[netip.AddrPort]uint16{}
	for _, all := range a.known.Load().services {
		for _, s := range all {
			out[unmapped(s.Listen)] = s.ID
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, s := range a.owning.services {
		out[unmapped(s.Listen)] = s.ID
	}
	return out
}

func ports(at map[netip.AddrPort]uint16) (out []uint16) {
	for a := range at {
		out = append(out, a.Port())
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
