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

// Draining is the previous generation of a slot while it still serves.
type Draining struct {
	PID      int       `json:"pid"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until"`    // end of the drain: afterwards it gets nothing new
	Peers    int       `json:"peers"`    // UDP peers it keeps: not silent for longer than generations.idle
	Kept     uint64    `json:"kept"`     // datagrams of those peers since
	Back     uint64    `json:"back"`     // packets it got while its successor was not complete
	Waiting  int       `json:"waiting"`  // connections in the queues of its listeners
	Sessions int       `json:"sessions"` // its TCP connections; -1: unknown without root
	Unread   uint32    `json:"unread"`   // bytes in its UDP sockets
}

// Predecessor is the previous generation in the maps.
type Predecessor struct {
	bpf.SteerGeneration
	Row uint32
	Who Process
}

// DrainsFor reports whether d drains for the current generation's row.
func (d Predecessor) DrainsFor(row uint32) bool { return d.Who.PID != 0 && d.Heir == row+1 }

// Over reports whether the drain has ended. The program then sends it no more packets.
func (d Predecessor) Over() bool { return kernel.Monotonic() >= d.Until }

// ReadPredecessor reads the draining predecessor of a slot. Without one, the field Who is zero.
func ReadPredecessor(pins *kernel.Opened, p *record.Service, slot int) (d Predecessor, err error) {
	if len(p.Spare) <= slot || pins.Maps["gens"] == nil {
		return d, nil
	}
	d.Row = p.Spare[slot]
	if err := pins.Maps["gens"].Lookup(d.Row, &d.SteerGeneration); err != nil {
		return d, fmt.Errorf("read generations: %w", err)
	}
	if d.Heir != p.Row(slot)+1 {
		return d, nil
	}
	d.Who, err = ProcessIn(pins, d.Row)
	return d, err
}

// CountPeers counts the peers per row that were not silent for longer than idle, in nanoseconds.
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
			return out, nil // ErrKeyNotExist marks the last batch
		} else if err != nil {
			return nil, fmt.Errorf("read peers: %w", err)
		}
	}
}

// Remaining is the remaining work in the sockets of a draining generation.
type Remaining struct {
	Peers    int             // UDP peers it keeps
	Waiting  int             // connections in its listeners' queues
	Unread   uint32          // bytes in its UDP sockets
	Sessions int             // TCP connections of its processes
	Opening  map[string]bool // TCP connections of the service during the handshake, by remote address
}

// Inodes returns the sockets of a process and its descendants, by inode.
func Inodes(pid int) (map[uint32]bool, error) {
	inodes, err := service.ListSockets(append(Descendants(pid), pid))
	own := map[uint32]bool{}
	for _, i := range inodes {
		own[i] = true
	}
	return own, err
}

// Count adds a socket to the remaining work. own are the inodes of the predecessor's descriptors. cookies are the
// sockets of its row.
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

// Running reports whether a process runs. A zombie does not.
func Running(pid int) bool {
	p, err := pidfd.Open(pid)
	if err != nil {
		return false
	}
	defer p.Close()
	return p.Alive()
}
