// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Draining is the generation before a slot's member: what it still serves.
type Draining struct {
	PID      int       `json:"pid"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until"`    // from then on it gets nothing new
	Peers    int       `json:"peers"`    // UDP peers that it keeps: not silent for longer than generations.idle
	Kept     uint64    `json:"kept"`     // datagrams that they have sent since
	Back     uint64    `json:"back"`     // packets that it got because its successor was not whole
	Waiting  int       `json:"waiting"`  // connections in the queue of its listeners
	Sessions int       `json:"sessions"` // TCP connections that it has; -1: not known, it takes root
	Unread   uint32    `json:"unread"`   // bytes in its UDP sockets
}

// predecessor is what the maps say of the generation before.
type predecessor struct {
	bpf.SteerGeneration
	row uint32
	who process
}

// is says whether it drains for the row of the present generation.
func (d predecessor) is(row uint32) bool { return d.who.pid != 0 && d.Heir == row+1 }

// over says that the program gives it nothing any more.
func (d predecessor) over() bool { return kernel.Monotonic() >= d.Until }

// readDrain reads who drains beside a slot's member; nobody if there is no process.
func readDrain(pins *kernel.Opened, p *published, slot int) (d predecessor, err error) {
	if len(p.Spare) <= slot || pins.Maps["gens"] == nil {
		return d, nil
	}
	d.row = p.Spare[slot]
	if err := pins.Maps["gens"].Lookup(d.row, &d.SteerGeneration); err != nil {
		return d, fmt.Errorf("reading generations: %w", err)
	}
	if d.Heir != p.row(slot)+1 {
		return d, nil
	}
	d.who, err = processIn(pins, d.row)
	return d, err
}

// known counts the peers that a generation that drains still has.
func (e *engine) known(p *published, d predecessor) (int, error) {
	if !d.is(d.Heir-1) || d.over() || !d.who.alive() {
		return 0, nil
	}
	o, err := e.lock.Root.Open(serviceInstance(e.scope, p.Service.Name), "peers")
	if err != nil {
		return 0, err
	}
	defer o.Close()
	n, err := countPeers(o.Maps["peers"], d.Idle)
	return n[d.row], err
}

// countPeers counts, by row, the peers that were not silent for longer than idle.
func countPeers(m *ebpf.Map, idle uint64) (map[uint32]int, error) {
	const batch = 4096
	keys, values := make([]bpf.SteerPeerKey, batch), make([]bpf.SteerPeer, batch)
	out, now := map[uint32]int{}, kernel.Monotonic()
	var at ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&at, keys, values, nil)
		for _, v := range values[:n] {
			if int64(now-v.Seen) <= int64(idle) {
				out[v.Row]++
			}
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return out, nil // how the kernel says "the last ones"
		} else if err != nil {
			return nil, fmt.Errorf("reading peers: %w", err)
		}
	}
}

// addDraining tells of the generations before of a service's slots.
func (s *ServiceState) addDraining(e *kernel.Opened) error {
	g := s.pub.Service.Generations
	if g == nil || e.Maps["gens"] == nil {
		return nil
	}
	o, err := s.root.Open(serviceInstance(s.scope, s.Name), "peers")
	if err != nil {
		return err
	}
	defer o.Close()
	peers, err := countPeers(o.Maps["peers"], uint64(g.Idle))
	if err != nil {
		return err
	}
	for i := range s.Slots {
		slot := &s.Slots[i]
		slot.Peers = new(int)
		*slot.Peers = peers[s.pub.row(slot.Slot)]
		d, err := readDrain(e, s.pub, slot.Slot)
		if err != nil {
			return err
		}
		if !d.is(s.pub.row(slot.Slot)) || !d.who.alive() {
			continue
		}
		slot.Draining = &Draining{PID: d.who.pid, Since: kernel.WallTime(d.Since), Until: kernel.WallTime(d.Until), Kept: d.Kept, Back: d.Back, Sessions: -1}
		if !d.over() {
			slot.Draining.Peers = peers[d.row]
		}
		s.addLeft(e, d, slot.Draining)
	}
	return nil
}

// addLeft asks sock_diag what the generation before has in its sockets. It needs
// root: without, Sessions stays -1.
func (s *ServiceState) addLeft(e *kernel.Opened, d predecessor, out *Draining) {
	left, err := s.left(s.cookiesIn(e, d.row), d.who.pid)
	if err != nil {
		return
	}
	out.Waiting, out.Unread, out.Sessions = left.waiting, left.unread, left.sessions
}

// left is what is in the sockets of a generation that drains.
type left struct {
	peers    int             // UDP peers that it keeps
	waiting  int             // connections in its listeners' queues
	unread   uint32          // bytes in its UDP sockets
	sessions int             // TCP connections of its processes
	opening  map[string]bool // TCP connections of the service that nobody has acknowledged yet
}

// cookiesIn are those of the sockets in a row.
func (s *ServiceState) cookiesIn(e *kernel.Opened, row uint32) map[uint64]bool {
	cookies := map[uint64]bool{}
	for i := range s.eps {
		var cookie uint64
		if e.Maps["sockets"].Lookup(row*maxEndpoints+uint32(i), &cookie) == nil {
			cookies[cookie] = true
		}
	}
	return cookies
}

// left asks what is in these sockets, and what connections a process and its children have.
func (s *ServiceState) left(cookies map[uint64]bool, pid int) (out left, err error) {
	out.opening = map[string]bool{}
	ns, err := s.openNetns()
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
	own, err := inodesOf(pid) // after what it may have accepted meanwhile
	for _, sk := range socks {
		out.count(sk, cookies, own)
	}
	return out, err
}

// inodesOf are the sockets of a process and all that descend from it.
func inodesOf(pid int) (map[uint32]bool, error) {
	inodes, err := service.SocketsOf(append(descendants(pid), pid))
	own := map[uint32]bool{}
	for _, i := range inodes {
		own[i] = true
	}
	return own, err
}

// drainQueries find the sockets of a generation that drains: its own may be bound
// anywhere, its connections have the ports of the service.
func (s *ServiceState) drainQueries() []sockdiag.Query {
	out := []sockdiag.Query{
		{Proto: unix.IPPROTO_UDP, States: 1 << sockdiag.Close},
		{Proto: unix.IPPROTO_TCP, States: 1 << sockdiag.Listen},
	}
	for _, ep := range s.eps {
		q := sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: ep.Port,
			States: 1<<sockdiag.Established | 1<<sockdiag.CloseWait | 1<<sockdiag.SynRecv | 1<<sockdiag.NewSynRecv}
		if ep.Proto == unix.IPPROTO_TCP && !slices.Contains(out, q) {
			out = append(out, q)
		}
	}
	return out
}

func (l *left) count(sk sockdiag.Socket, cookies map[uint64]bool, own map[uint32]bool) {
	switch {
	case sk.Proto == unix.IPPROTO_UDP:
		if cookies[sk.Cookie] {
			l.unread = max(l.unread, sk.RecvQueue)
		}
	case sk.State == sockdiag.Listen:
		if cookies[sk.Cookie] {
			l.waiting = max(l.waiting, int(sk.RecvQueue))
		}
	case sk.State == sockdiag.SynRecv || sk.State == sockdiag.NewSynRecv:
		l.opening[sk.Remote.String()] = true
	case own[sk.Inode]:
		l.sessions++
	}
}

// runs says whether a process runs: one that is a zombie serves nobody.
func runs(pid int) bool {
	p, err := pidfd.Open(pid)
	if err != nil {
		return false
	}
	defer p.Close()
	return p.Alive()
}
