// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		of   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 100, 2}, 3}} {
		if got := median(c.of); got != c.want {
			t.Errorf("median of %v is %g, want %g", c.of, got, c.want)
		}
	}
	v := []float64{3, 1, 2}
	median(v)
	if v[0] != 3 {
		t.Errorf("median sorted its argument: %v", v)
	}
}

func TestParsePss(t *testing.T) {
	const rollup = "55d0c000-7ffd7000 ---p 00000000 00:00 0   [rollup]\nRss:    9876 kB\nPss:            4321 kB\nPss_Dirty:  11 kB\n"
	if got, err := parsePss([]byte(rollup)); err != nil || got != 4321 {
		t.Errorf("%d, %v", got, err)
	}
	for _, bad := range []string{"", "Rss: 1 kB\n", "Pss: many kB\n"} {
		if got, err := parsePss([]byte(bad)); err == nil {
			t.Errorf("%q: %d", bad, got)
		}
	}
	if kb, err := proportional(os.Getpid()); err != nil || kb < 1000 {
		t.Errorf("this process takes %d kB, %v", kb, err)
	}
}

// Counts are compared by device, protocol and epoch. Excess records are as wrong as missing ones.
func TestMissing(t *testing.T) {
	a, b := netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.99.0.2")
	y := &way{tally: newTally()}
	for i, addr := range []netip.Addr{a, b} {
		l := &lane{dev: routers.NewDevice(i, addr), collector: i}
		*l.count(7) = [2]int{6, 2}
		*l.count(6) = [2]int{100, 100} // another epoch
		y.lanes = append(y.lanes, l)
	}
	x := &experiment{epoch: 7}
	book := func(kind peers.Kind, device netip.Addr, epoch uint32, n int) {
		y.tally.book(0, peers.Record{Kind: kind, Device: device, Epoch: epoch, Count: n, Incarnation: 1})
	}
	book(peers.Flows, a, 7, 4)
	book(peers.Flows, a, 7, 2)
	book(peers.Route, a, 7, 1)
	book(peers.Route, a, 7, 1)
	book(peers.Flows, b, 7, 3)
	book(peers.Flows, b, nudge, 16)
	for range 4 {
		book(peers.Route, b, 7, 1)
	}
	if missing, surplus := x.missing(y, nil); missing != [2]int{3, 0} || surplus != 2 {
		t.Errorf("missing %v, surplus %d", missing, surplus)
	}
	first := 0
	if missing, surplus := x.missing(y, &first); missing != [2]int{} || surplus != 0 {
		t.Errorf("of the first collector: missing %v, surplus %d", missing, surplus)
	}
}

// Sink and lab share the counters.
func TestCounters(t *testing.T) {
	file := filepath.Join(t.TempDir(), "counters")
	a, err := openCounters(file)
	if err != nil {
		t.Fatal(err)
	}
	b, err := openCounters(file)
	if err != nil {
		t.Fatal(err)
	}
	a.datagrams.Add(3)
	if got := b.datagrams.Load(); got != 3 {
		t.Errorf("%d datagrams", got)
	}
}
