// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/lab"
	"golang.org/x/sys/unix"
)

func source() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// Hosts of a set differ, are outside the services' own range, and are equal for the same seed.
func TestDrawSet(t *testing.T) {
	s := drawSet(5000, 128, source())
	seen := map[uint32]bool{}
	for i, h := range s.hosts {
		if h>>24 < 11 || h>>24 > 126 || seen[h] || s.at[h] != i {
			t.Fatalf("host %d, %s, is a duplicate or out of range", i, serviceAddr(h))
		}
		seen[h] = true
	}
	if !slices.Equal(s.hosts, drawSet(5000, 128, source()).hosts) {
		t.Error("different hosts for the same seed")
	}
	r := source()
	for range 1000 {
		if h := s.unbound(r); seen[h] {
			t.Errorf("%s is bound", serviceAddr(h))
		}
		hit, miss := s.hit(100)(r), s.miss()(r)
		if i, ok := s.at[uint32(hit.addr[0])<<24|uint32(hit.addr[1])<<16|uint32(hit.addr[2])<<8|uint32(hit.addr[3])]; !ok || i >= 100 || hit.tcp != (i%2 == 1) {
			t.Errorf("%s is none of the first hundred", hit)
		}
		if seen[uint32(miss.addr[0])<<24|uint32(miss.addr[1])<<16|uint32(miss.addr[2])<<8|uint32(miss.addr[3])] {
			t.Errorf("%s is bound", miss)
		}
	}
	if b := s.binding(129); b.Service != "svc-00001" || b.Proto != unix.IPPROTO_TCP || b.Prefix.Bits() != 32 || b.Port != boundPort {
		t.Errorf("%+v", b)
	}
}

// No two sockets of services share an address and port, or use a client's.
func TestOwnAddresses(t *testing.T) {
	seen := map[netip.AddrPort]bool{}
	for service := range 1 << 16 {
		at := netip.AddrPortFrom(netip.AddrFrom4(ownAddress(service)), uint16(ownPort(service)))
		if seen[at] || at.Addr() == netip.AddrFrom4(clientAddress) || at.Port() >= 32768 {
			t.Fatalf("service %d: %s", service, at)
		}
		seen[at] = true
	}
}

// The file equals weir's own output.
func TestWriteFile(t *testing.T) {
	for _, n := range []int{1, 3, 1000} {
		all := drawSet(n, 128, source()).bindings(n)
		path := filepath.Join(t.TempDir(), "bindings.json")
		if err := writeFile(path, all); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		want, err := bindings.WriteBindings(all)
		if err != nil || string(got) != string(want)+"\n" {
			t.Errorf("%d bindings: %v\n%.300s\nwant\n%.300s", n, err, got, want)
		}
	}
}

// decide returns the deciding binding for a target, following the documentation.
func decide(all []bindings.Binding, q target) (service string) {
	longest, exact := -1, false
	for _, b := range all {
		tcp := b.Proto == unix.IPPROTO_TCP
		if !b.Prefix.Contains(netip.AddrFrom4(q.addr)) || tcp != q.tcp || b.Port != 0 && int(b.Port) != q.port {
			continue
		}
		if b.Prefix.Bits() > longest || b.Prefix.Bits() == longest && b.Port != 0 && !exact {
			longest, exact, service = b.Prefix.Bits(), b.Port != 0, b.Service
		}
	}
	return service
}

// Every target has different services in the two sets, the expected ones, of its own protocol. Targets of
// both protocols alternate, and crowds change none.
func TestScenes(t *testing.T) {
	sets, questions := scenes()
	x := &experiment{env: &lab.Env{Seed: 1}}
	for i := range sets {
		sets[i] = append(sets[i], x.crowd(500, "test")...)
	}
	for n, q := range questions {
		if q.tcp != (n%2 == 1) || q.want[0] == q.want[1] {
			t.Errorf("question %d: %s, %v", n, q.target, q.want)
		}
		for i, want := range q.want {
			if got := decide(sets[i], q.target); got != serviceName(want) || want >= fewServices || (want%2 == 1) != q.tcp {
				t.Errorf("set %d: %s leads to %s, want %s", i, q.target, got, serviceName(want))
			}
		}
	}
}

// Answers count by the sets in force meanwhile. No answer is always wrong.
func TestNote(t *testing.T) {
	for _, c := range []struct {
		service int
		err     error
		legal   uint32
		wrong   int
		of      [2]int
	}{
		{4, nil, 1, 0, [2]int{1, 0}},
		{6, nil, 1, 1, [2]int{0, 1}},
		{6, nil, 3, 0, [2]int{0, 1}},
		{4, nil, 2, 1, [2]int{1, 0}},
		{8, nil, 3, 1, [2]int{}},
		{4, unix.ECONNREFUSED, 3, 1, [2]int{}},
	} {
		a := &askers{x: &experiment{result: lab.NewResult("test", lab.Smoke, 1)}}
		a.note(question{want: [2]int{4, 6}}, c.service, c.err, c.legal, 0)
		if a.answers != 1 || a.wrong != c.wrong || a.of != c.of {
			t.Errorf("%+v: wrong %d, of %v", c, a.wrong, a.of)
		}
	}
}

func TestMedians(t *testing.T) {
	if m := median([]float64{4, 1, 3, 2}); m != 2.5 {
		t.Errorf("median %g", m)
	}
	if m := medianRatio([]float64{4, 9, 8}, []float64{2, 3, 1}); m != 3 {
		t.Errorf("median of the ratios %g", m)
	}
	for n, want := range map[int]string{1: "1", 1000: "1k", 100_000: "100k", maxBindings: "1m"} {
		if got := sizeName(n); got != want {
			t.Errorf("%d: %q", n, got)
		}
	}
}
