// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/record"
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
	Back     uint64    `json:"back"`     // packets that it got because its successor was not complete
	Waiting  int       `json:"waiting"`  // connections in the queue of its listeners
	Sessions int       `json:"sessions"` // TCP connections that it has; -1: not known, it takes root
	Unread   uint32    `json:"unread"`   // bytes in its UDP sockets
}

// Predecessor is what the maps say of the generation before.
type Predecessor struct {
	bpf.SteerGeneration
	Row uint32
	Who Process
}

// DrainsFor says whether it drains for the row of the present generation.
func (d Predecessor) DrainsFor(row uint32) bool { return d.Who.PID != 0 && d.Heir == row+1 }

// Over says that the program gives it nothing any more.
func (d Predecessor) Over() bool { return kernel.Monotonic() >= d.Until }

// ReadPredecessor reads who drains beside a slot's member; nobody if there is no process.
func ReadPredecessor(pins *kernel.Opened, p *record.Service, slot int) (d Predecessor, err error) {
	if len(p.Spare) <= slot || pins.Maps["gens"] == nil {
		return d, nil
	}
	d.Row = p.Spare[slot]
	if err := pins.Maps["gens"].Lookup(d.Row, &d.SteerGeneration); err != nil {
		return d, fmt.Errorf("reading generations: %w", err)
	}
	if d.Heir != p.Row(slot)+1 {
		return d, nil
	}
	d.Who, err = ProcessIn(pins, d.Row)
	return d, err
}

// CountPeers counts, by row, the peers that were not silent for longer than idle.
func CountPeers(m *ebpf.Map, idle uint64) (map[uint32]int, error) {
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

// Remaining is what is in the sockets of a generation that drains.
type Remaining struct {
	Peers    int             // UDP peers that it keeps
	Waiting  int             // connections in its listeners' queues
	Unread   uint32          // bytes in its UDP sockets
	Sessions int             // TCP connections of its processes
	Opening  map[string]bool // TCP connections of the service that nobody has acknowledged yet
}

// Inodes are the sockets of a process and all that descend from it.
func Inodes(pid int) (map[uint32]bool, error) {
	inodes, err := service.ListSockets(append(Descendants(pid), pid))
	own := map[uint32]bool{}
	for _, i := range inodes {
		own[i] = true
	}
	return own, err
}

// Count adds a socket to what is left with a predecessor: own are the inodes of its
// descriptors, cookies the sockets that its row has.
func (l *Remaining) Count(sk sockdiag.Socket, cookies map[uint64]bool, own map[uint32]bool) {
	switch {
	case sk.Proto == unix.IPPROTO_UDP:
		if cookies[sk.Cookie] {
			l.Unread = max(l.Unread, sk.RecvQueue)
		}
	case sk.State == sockdiag.Listen:
		if cookies[sk.Cookie] {
			l.Waiting = max(l.Waiting, int(sk.RecvQueue))
		}
	case sk.State == sockdiag.SynRecv || sk.State == sockdiag.NewSynRecv:
		l.Opening[sk.Remote.String()] = true
	case own[sk.Inode]:
		l.Sessions++
	}
}

// Running says whether a process runs: one that is a zombie serves nobody.
func Running(pid int) bool {
	p, err := pidfd.Open(pid)
	if err != nil {
		return false
	}
	defer p.Close()
	return p.Alive()
}
