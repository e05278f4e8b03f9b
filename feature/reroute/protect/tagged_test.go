// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"math"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"github.com/weir-project/weir/table"
)

// A frame with a VLAN tag belongs to a VLAN device, another link, though it passes this device. A priority tag has no
// such meaning.
func TestTaggedFrame(t *testing.T) {
	nstest.NeedRoot(t)
	if err := probe.RedirectNeigh.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	programs := []string{bpf.ProtectProgRerouteEgress}
	if tcx() { // without tcx the kernel lacks the ingress program's helpers
		programs = append(programs, bpf.ProtectProgRerouteIngress)
	}
	for _, name := range programs {
		t.Run(name, func(t *testing.T) {
			spec, err := bpf.LoadProtect()
			if err != nil {
				t.Fatal(err)
			}
			k, err := kernel.Load(spec, []string{name}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer k.Close()
			repair := bpf.ProtectRerouteRepair{Ifindex: loopback, Slot: loopback, Watch: 7, Row: 1, Flags: flagFor6, Mtu: 1500}
			put(t, k, bpf.ProtectMapRerouteRepairs, 1, repair)
			put(t, k, bpf.ProtectMapRerouteLinks, loopback, links.State{1})
			if name == bpf.ProtectProgRerouteEgress {
				put(t, k, bpf.ProtectMapReroutePaths, loopback, bpf.ProtectReroutePath{Ifindex: loopback, Repair: 1})
			} else {
				m, err := table.Find(k.Maps, "fast")
				if err != nil {
					t.Fatal(err)
				}
				routes, err := table.Open(m)
				if err != nil {
					t.Fatal(err)
				}
				defer routes.Close()
				if err := routes.Replace([]table.Entry{{Prefix: netip.MustParsePrefix("fd00:d::/64"), Value: 1}}); err != nil {
					t.Fatal(err)
				}
				if err := k.Variables[bpf.ProtectVarFastUntil].Set(uint64(math.MaxInt64)); err != nil {
					t.Fatal(err)
				}
			}
			for _, x := range []struct {
				vlan  uint16
				ret   uint32
				count string
			}{{10, actNext, ""}, {4094, actNext, ""}, {7 << 13, actRedirect, "packets 1"}} {
				o := &ebpf.RunOptions{Data: ipv6("fd00:d::2", 53, 63, 20), DataOut: make([]byte, 2000), Context: skb{Ifindex: loopback}}
				ret, err := nstest.Tagged(t, k.Programs[name], x.vlan).Run(o)
				if err != nil {
					t.Fatal(err)
				}
				if ret != x.ret {
					t.Errorf("tag %#x: returned %#x, want %#x", x.vlan, ret, x.ret)
				}
				sum, err := readCounts(k.Maps[bpf.ProtectMapRerouteCounts], 1)
				if err != nil {
					t.Fatal(err)
				}
				if said := counted(sum); said != x.count {
					t.Errorf("tag %#x: counted %q, want %q", x.vlan, said, x.count)
				}
			}
		})
	}
}
