// SPDX-License-Identifier: Apache-2.0

package state

import (
	"slices"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// addDraining adds the previous generations of a service's slots.
func (s *Service) addDraining(e *kernel.Opened) error {
	g := s.Record.Service.Generations
	if g == nil || e.Maps["gens"] == nil {
		return nil
	}
	o, err := s.Root.Open(record.Instance(s.PinScope, s.Name), "peers")
	if err != nil {
		return err
	}
	defer o.Close()
	peers, err := slots.CountPeers(o.Maps["peers"], uint64(g.Idle))
	if err != nil {
		return err
	}
	for i := range s.Slots {
		slot := &s.Slots[i]
		slot.Peers = new(int)
		*slot.Peers = peers[s.Record.Row(slot.Slot)]
		d, err := slots.ReadPredecessor(e, s.Record, slot.Slot)
		if err != nil {
			return err
		}
		if !d.DrainsFor(s.Record.Row(slot.Slot)) || !d.Who.Alive() {
			continue
		}
		slot.Draining = &slots.Draining{PID: d.Who.PID, Since: kernel.WallTime(d.Since), Until: kernel.WallTime(d.Until), Kept: d.Kept, Back: d.Back, Sessions: -1}
		if !d.Over() {
			slot.Draining.Peers = peers[d.Row]
		}
		s.addRemaining(e, d, slot.Draining)
	}
	return nil
}

// addRemaining reads the remaining work of the previous generation from sock_diag. Without root, Sessions stays -1.
func (s *Service) addRemaining(e *kernel.Opened, d slots.Predecessor, out *slots.Draining) {
	left, err := s.Remaining(s.CookiesIn(e, d.Row), d.Who.PID)
	if err != nil {
		return
	}
	out.Waiting, out.Unread, out.Sessions = left.Waiting, left.Unread, left.Sessions
}

// CookiesIn returns the cookies of a row's sockets.
func (s *Service) CookiesIn(e *kernel.Opened, row uint32) map[uint64]bool {
	cookies := map[uint64]bool{}
	for i := range s.Endpoints {
		var cookie uint64
		if e.Maps["sockets"].Lookup(row*spec.MaxEndpoints+uint32(i), &cookie) == nil {
			cookies[cookie] = true
		}
	}
	return cookies
}

// Remaining returns the remaining work in the sockets with cookies, and the connections of a process and its
// descendants.
func (s *Service) Remaining(cookies map[uint64]bool, pid int) (out slots.Remaining, err error) {
	out.Opening = map[string]bool{}
	ns, err := s.OpenNetns()
	if err != nil {
		return out, err
	}
	defer ns.Close()
	var socks []sockdiag.Socket
	err = ns.Do(func() error {
		for _, q := range s.drainQueries() {
			more, err := sockdiag.Dump(q)
			if err != nil {
				return err
			}
			socks = append(socks, more...)
		}
		return nil
	})
	if err != nil {
		return out, err
	}
	own, err := slots.Inodes(pid) // read last, to include connections accepted meanwhile
	for _, sk := range socks {
		out.Count(sk, cookies, own)
	}
	return out, err
}

// drainQueries returns queries for the sockets of a draining generation. Its UDP sockets and listeners may be bound
// anywhere. Its connections have the service's ports.
func (s *Service) drainQueries() []sockdiag.Query {
	out := []sockdiag.Query{
		{Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Close},
		{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen},
	}
	for _, ep := range s.Endpoints {
		q := sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: ep.Port,
			States: 1<<sockdiag.Established | 1<<sockdiag.CloseWait | 1<<sockdiag.SynRecv | 1<<sockdiag.NewSynRecv}
		if ep.Proto == unix.IPPROTO_TCP && !slices.Contains(out, q) {
			out = append(out, q)
		}
	}
	return out
}
