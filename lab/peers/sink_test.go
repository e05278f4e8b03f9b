// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/ipfix"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab/routers"
)

// In the host's namespace another test may hold a sink's port for one protocol or family only.
func TestMain(m *testing.M) { nstest.Main(m) }

func newSink(bmp io.Writer) *sink {
	return &sink{flows: json.NewEncoder(io.Discard), bmp: json.NewEncoder(bmp), flowsSeen: map[flowLine]int{}, templates: map[templateKey][]ipfix.Field{}}
}

// The sink counts records of the lab's routers, and no records without a known template.
func TestSinkIPFIX(t *testing.T) {
	now := time.Now()
	for i, a := range []string{"10.99.0.1", "fd00:99::1"} {
		s, addr := newSink(io.Discard), netip.MustParseAddr(a)
		d := routers.NewDevice(i, addr)
		for seq, template := range []bool{false, true, false} {
			if err := s.message(addr, d.IPFIX(nil, uint32(3*seq), template, 3, 9, now)); err != nil {
				t.Fatal(err)
			}
		}
		other := routers.NewDevice(i+1, addr) // another observation domain
		if err := s.message(addr, other.IPFIX(nil, 0, false, 3, 9, now)); err != nil {
			t.Fatal(err)
		}
		if got := s.flowsSeen[flowLine{Peer: a, In: 9}]; got != 6 || len(s.flowsSeen) != 1 {
			t.Errorf("%s: %v, want 6 records", a, s.flowsSeen)
		}
	}
}

// The sink logs each BMP message like nfacctd, in the fields read by the lab.
func TestSinkBMP(t *testing.T) {
	now := time.Now()
	for i, a := range []string{"10.99.0.1", "fd00:99::1"} {
		addr := netip.MustParseAddr(a)
		d := routers.NewDevice(i, addr)
		b := d.PeerUp(d.Initiation(nil), 7, now)
		b = d.RouteMonitoring(b, 3, 70001, now)
		b = d.Statistics(b, 1, now)
		var log bytes.Buffer
		if err := newSink(&log).session(addr, bytes.NewReader(b)); err != io.EOF {
			t.Fatal(err)
		}
		var got []Record
		for line := range bytes.Lines(log.Bytes()) {
			got = append(got, parseBMP(bytes.TrimSpace(line)))
		}
		want := []Record{{Kind: Other, Device: addr, Count: 1}, {Kind: PeerUp, Device: addr, Count: 1, Port: 1024 + 7},
			{Kind: Route, Device: addr, Count: 1, Epoch: 70001}, {Kind: Other, Device: addr, Count: 1}}
		if len(got) != len(want) {
			t.Fatalf("%s: %d lines, want %d", a, len(got), len(want))
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("%s: line %d: %+v, want %+v", a, i, got[i], want[i])
			}
		}
	}
}

// For any input the sink returns an error at worst.
func FuzzSink(f *testing.F) {
	for i, a := range []string{"10.99.0.1", "fd00:99::1"} {
		d := routers.NewDevice(i, netip.MustParseAddr(a))
		f.Add(d.IPFIX(nil, 1, true, 2, 3, time.Unix(0, 0)))
		f.Add(d.RouteMonitoring(d.PeerUp(nil, 1, time.Unix(0, 0)), 1, 2, time.Unix(0, 0)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newSink(io.Discard)
		_ = s.message(netip.IPv4Unspecified(), b)
		if err := s.session(netip.IPv4Unspecified(), bytes.NewReader(b)); err == nil {
			t.Error("a session ended without an error")
		}
	})
}

// A sink listens over the given families only.
func TestFamilies(t *testing.T) {
	for _, c := range []struct {
		family Family
		v4, v6 bool
	}{{IPv4, true, false}, {IPv6, false, true}, {DualStack, true, true}} {
		udp, tcp, err := open(c.family, 0)
		if err != nil {
			t.Fatal(err)
		}
		udp.Close()
		for host, want := range map[string]bool{"127.0.0.1": c.v4, "::1": c.v6} {
			conn, err := net.DialTimeout("tcp", net.JoinHostPort(host, fmt.Sprint(tcp.Addr().(*net.TCPAddr).Port)), 30*time.Second)
			if (err == nil) != want {
				t.Errorf("family %s at %s: %v", c.family, host, err)
			}
			if err == nil {
				conn.Close()
			}
		}
		tcp.Close()
	}
}
