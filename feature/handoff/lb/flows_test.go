// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/packetbuf"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// newTable returns a data path without programs, with n flows.
func newTable(t testing.TB, n int) *DataPath {
	t.Helper()
	nstest.NeedRoot(t)
	kernel.LiftMemlock()
	spec, err := bpf.LoadLB()
	if err != nil {
		t.Fatal(err)
	}
	f := &DataPath{stays: true, buffer: &bufferDevice{Device: &packetbuf.Device[Key]{}}}
	for name, m := range map[string]**ebpf.Map{"lb_flows": &f.maps.LbFlows, "lb_setup": &f.maps.LbSetup, "lb_backends": &f.maps.LbBackends, "lb_ring": &f.maps.LbRing, "lb_room": &f.maps.LbRoom, "lb_sources": &f.maps.LbSources} {
		if *m, err = ebpf.NewMap(spec.Maps[name]); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*m).Close() })
	}
	if f.names, err = names.Open(nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.names.Close)
	fill(t, f, n)
	return f
}

// fill adds n flows.
func fill(t testing.TB, f *DataPath, n int) {
	t.Helper()
	keys, values := make([]bpf.LBLbFlowKey, n), make([]bpf.LBLbFlow, n)
	for i := range keys {
		client := netip.AddrFrom4([4]byte{10, 1, byte(i >> 16), byte(i >> 8)})
		keys[i] = *Key{Client: netip.AddrPortFrom(client, uint16(1024+i&0xff))}.Raw()
		values[i] = bpf.LBLbFlow{Word: uint64(1 + i&1), Seen: kernel.Monotonic(), In: 1, Out: 1}
	}
	if made, err := f.maps.LbFlows.BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(made, err)
	}
}

// TestFlowsOnce checks that each flow is read once, even if others are forgotten meanwhile. Without
// batches it checks the same for an unchanged table.
func TestFlowsOnce(t *testing.T) {
	const n = 3*flow.Batch + 7
	f := newTable(t, n)
	seen := map[Key]int{}
	see := func(k Key, fl Flow) bool {
		if seen[k]++; fl.Owner != 1 && fl.Owner != 2 || fl.In != 1 {
			t.Errorf("%v: %+v", k, fl)
		}
		return true
	}
	once := func(what string) {
		t.Helper()
		for k, times := range seen {
			if times != 1 {
				t.Fatalf("%s: %v is seen %d times", what, k, times)
			}
		}
		if len(seen) != n {
			t.Errorf("%s: %d flows, want %d", what, len(seen), n)
		}
	}
	if err := flow.EachAlone(f.maps.LbFlows, func(k bpf.LBLbFlowKey, v bpf.LBLbFlow) bool { return see(flow.ParseKey(k), flow.Parse(v)) }); err != nil {
		t.Error(err)
	}
	once("alone")
	all := maps.Clone(seen)
	clear(seen)
	err := f.Flows(func(k Key, fl Flow) bool {
		if len(seen)%1000 == 0 {
			if err := f.maps.LbFlows.Delete(k.Raw()); err != nil {
				t.Error(err)
			}
		}
		return see(k, fl)
	})
	if err != nil || !maps.Equal(seen, all) {
		t.Errorf("%v: batches tell of other flows", err)
	}
	once("in batches")
	few := 0
	if err := f.Flows(func(Key, Flow) bool { few++; return few < flow.Batch+3 }); err != nil || few != flow.Batch+3 {
		t.Errorf("%d flows, %v: want an end", few, err)
	}
}

// BenchmarkForget measures the agent's work per second with a full table.
func BenchmarkForget(b *testing.B) {
	f := newTable(b, 1<<18)
	cpu := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := cpu()
	for b.Loop() {
		if n, err := f.Forget(time.Second, time.Hour); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
	b.ReportMetric(float64((cpu()-before).Milliseconds())/float64(b.N), "cpu-ms/op")
}
