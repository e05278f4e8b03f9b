// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"encoding/binary"
	"errors"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/lab/rig"
	"github.com/weir-project/weir/lab/routers"
)

var be = binary.BigEndian

// exporter is one router. It sends its templates on request, not periodically.
type exporter struct {
	to      *collector
	from    netip.Addr
	version uint16
	number  int // in its records' source address
	conn    net.Conn

	mu  sync.Mutex
	seq uint32
	n   int
	at  map[int]time.Time // send time of each record
}

// fields of the template: source and destination address, ports, protocol, octets and packets.
var fields = [][2]uint16{{8, 4}, {12, 4}, {7, 2}, {11, 2}, {4, 1}, {1, 4}, {2, 4}}

const (
	templateID       = 300
	recordsInMessage = 2
)

// sources returns addresses of n routers of the families accepted by a collector.
func (c *collector) sources(n int) (out []netip.Addr) {
	a4, a6 := rig.Devices4.Addr().Next(), rig.Devices6.Addr().Next()
	for range n {
		if !strings.HasPrefix(c.listen, "udp6") {
			out = append(out, a4)
		}
		if !strings.HasPrefix(c.listen, "udp4") {
			out = append(out, a6)
		}
		a4, a6 = a4.Next(), a6.Next()
	}
	return out
}

func newExporter(t *testing.T, d *routers.Dialer, c *collector, from netip.Addr, version uint16, number, seq int) *exporter {
	x := &exporter{to: c, from: from, version: version, number: number, seq: uint32(seq * 100), at: map[int]time.Time{}}
	to := rig.Service4
	if from.Is6() {
		to = rig.Service6
	}
	var err error
	x.conn, err = d.Dial("udp", from, netip.AddrPortFrom(to, uint16(c.port)))
	check(t, err)
	t.Cleanup(func() { x.conn.Close() })
	return x
}

func (x *exporter) header() []byte {
	now := time.Now()
	b := be.AppendUint16(nil, x.version)
	b = be.AppendUint16(b, 0)
	if x.version == 9 {
		b = be.AppendUint32(b, 100_000) // uptime
	}
	b = be.AppendUint32(b, uint32(now.Unix()))
	b = be.AppendUint32(b, x.seq)
	return be.AppendUint32(b, uint32(x.number))
}

func (x *exporter) send(b []byte, records int) {
	if x.version == 10 {
		be.PutUint16(b[2:], uint16(len(b)))
		x.seq += uint32(records)
	} else {
		be.PutUint16(b[2:], uint16(max(records, 1)))
		x.seq++
	}
	if _, err := x.conn.Write(b); errors.Is(err, syscall.ECONNREFUSED) {
		x.conn.Write(b) // the error was about an earlier, refused datagram
	}
}

// templates sends the template.
func (x *exporter) templates() {
	x.mu.Lock()
	defer x.mu.Unlock()
	id := uint16(0)
	if x.version == 10 {
		id = 2
	}
	b := be.AppendUint16(x.header(), id)
	b = be.AppendUint16(b, uint16(8+4*len(fields)))
	b = be.AppendUint16(b, templateID)
	b = be.AppendUint16(b, uint16(len(fields)))
	for _, f := range fields {
		b = be.AppendUint16(be.AppendUint16(b, f[0]), f[1])
	}
	x.send(b, 0)
}

// data sends one message of records.
func (x *exporter) data() {
	x.mu.Lock()
	defer x.mu.Unlock()
	b := be.AppendUint16(x.header(), templateID)
	set := len(b) - 2
	b = be.AppendUint16(b, 0)
	for range recordsInMessage {
		x.n++
		x.at[x.n] = time.Now()
		b = append(b, 192, 0, 2, byte(x.number), 198, 51, 100, 1)
		b = be.AppendUint16(be.AppendUint16(b, uint16(x.n)), 443)
		b = append(b, 6)
		b = be.AppendUint32(be.AppendUint32(b, 1000), 1)
	}
	for (len(b)-set)%4 != 0 {
		b = append(b, 0)
	}
	be.PutUint16(b[set+2:], uint16(len(b)-set))
	x.send(b, recordsInMessage)
}

// sent returns the send time of each record.
func (x *exporter) sent() map[int]time.Time {
	x.mu.Lock()
	defer x.mu.Unlock()
	return maps.Clone(x.at)
}

// keepSending sends data until stop is called.
func keepSending(exporters []*exporter) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				for _, x := range exporters {
					x.data()
				}
			}
		}
	}()
	var once sync.Once
	return func() { once.Do(func() { close(end); <-ended }) }
}
