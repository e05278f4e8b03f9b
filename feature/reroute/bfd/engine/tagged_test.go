// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/internal/nstest"
)

// A frame with a VLAN tag belongs to the VLAN device and its session. It neither keeps this device's session up nor
// takes it down. A priority tag has no such meaning.
func TestTaggedFrame(t *testing.T) {
	const pass, taken = -1, 2 // TC_ACT_UNSPEC, TC_ACT_SHOT
	b := newBench(t)
	s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: time.Second, RequiredRx: time.Second, EchoRx: time.Second},
		Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000, Echo: time.Second}
	if err := b.w.put(0, s, 1); err != nil {
		t.Fatal(err)
	}
	p := bfdtest.Packet{State: bfd.Down, Multiplier: 3, Mine: 5, Yours: s.Discriminator, DesiredTx: time.Second, RequiredRx: time.Second, EchoRx: time.Second}
	control := frame(peer4, local4, bfdtest.HopLimit, p.Append(nil))
	echo := frame(local4, local4, bfdtest.HopLimit-1, make([]byte, bfd.EchoLength))
	echo[36], echo[37] = bfdtest.EchoPort>>8, bfdtest.EchoPort&0xff
	copy(echo[42+4:], "\x01\x02\x03\x04")
	for name, c := range map[string]struct {
		frame []byte
		count func(Status) uint64
	}{
		"control": {control, func(s Status) uint64 { return s.In }},
		"echo":    {echo, func(s Status) uint64 { return s.Echo.Refused }}, // with a wrong number
	} {
		for _, x := range []struct {
			vlan uint16
			want int32
		}{{10, pass}, {4094, pass}, {7 << 13, taken}} {
			count := func() uint64 {
				st, _, err := b.w.status(0)
				if err != nil {
					t.Fatal(err)
				}
				return c.count(st)
			}
			before := count()
			if got := b.run(nstest.Tagged(t, b.o.BfdReceive, x.vlan), c.frame); got != x.want {
				t.Errorf("%s, tag %#x: verdict %d, want %d", name, x.vlan, got, x.want)
			}
			if n := count() - before; (n == 1) != (x.want == taken) {
				t.Errorf("%s, tag %#x: counted %d times", name, x.vlan, n)
			}
		}
	}
}
