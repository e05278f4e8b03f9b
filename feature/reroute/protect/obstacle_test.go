// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// theirs returns a program counting packets without changing them.
func theirs(t testing.TB) (p *ebpf.Program, seen func() uint32) {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	p, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.LoadMapValue(asm.R1, m.FD(), 0),
		asm.Mov.Imm(asm.R2, 1),
		asm.StoreXAdd(asm.R1, asm.R2, asm.Word),
		asm.Mov.Imm(asm.R0, -1), // TCX_NEXT, TC_ACT_UNSPEC
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p, func() (n uint32) {
		if err := m.Lookup(uint32(0), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// Filters of the operator, added while the fast program runs, see every packet again. The fast program is detached
// and the egress program reroutes.
func TestFastStandsAside(t *testing.T) {
	every := fastCheckInterval
	fastCheckInterval = 100 * time.Millisecond
	t.Cleanup(func() { fastCheckInterval = every })
	tool := func(w *world, name, args string) {
		w.Helper()
		if _, err := exec.LookPath(name); err != nil {
			w.Skip("need: tool", name)
		}
		w.in(w.r1, func() error {
			c := exec.Command(name, strings.Fields(args)...)
			if name == "nft" {
				c = exec.Command(name, args)
			}
			out, err := c.CombinedOutput()
			if err != nil {
				w.Logf("%s %s: %s", name, args, out)
			}
			return err
		})
	}
	attach := func(w *world, device string, egress bool, anchor link.Anchor) (seen func() uint32, off func()) {
		p, seen := theirs(w)
		at := ebpf.AttachTCXIngress
		if egress {
			at = ebpf.AttachTCXEgress
		}
		var ln link.Link
		w.in(w.r1, func() (err error) {
			ln, err = link.AttachTCX(link.TCXOptions{Interface: nstest.Ifindex(w, w.r1, device), Program: p, Attach: at, Anchor: anchor})
			return err
		})
		off = func() { ln.Close() }
		w.Cleanup(off)
		return seen, off
	}
	for name, c := range map[string]struct {
		put   func(w *world) (seen func() uint32, off func()) // seen is nil without a counter
		still bool                                            // the fast program continues behind it
	}{
		"a chain of nftables": {put: func(w *world) (func() uint32, func()) {
			tool(w, "nft", "add table ip6 t; add chain ip6 t c { type filter hook forward priority 0; }; add rule ip6 t c counter")
			return nil, func() { tool(w, "nft", "delete table ip6 t") }
		}},
		"a rule": {put: func(w *world) (func() uint32, func()) {
			w.ip(w.r1, "-6 rule add from fd00:a::99 lookup 77")
			return nil, func() { w.ip(w.r1, "-6 rule del from fd00:a::99 lookup 77") }
		}},
		"a rule for the main table": {put: func(w *world) (func() uint32, func()) {
			w.ip(w.r1, "-6 rule add priority 5 from fd00:a::/64 lookup main suppress_prefixlength 96")
			return nil, func() { w.ip(w.r1, "-6 rule del priority 5") }
		}},
		"a route by source": {put: func(w *world) (func() uint32, func()) {
			w.ip(w.r1, "route add fd00:d::/64 from fd00:a::/64 via fd00:12::2")
			return nil, func() { w.ip(w.r1, "route del fd00:d::/64 from fd00:a::/64 via fd00:12::2") }
		}},
		"a filter of tc": {put: func(w *world) (func() uint32, func()) {
			p, seen := theirs(w)
			f := kernel.Clsact{Ifindex: nstest.Ifindex(w, w.r1, "in"), Name: "theirs"}
			w.in(w.r1, func() error { return f.Attach(p) })
			return seen, func() { w.in(w.r1, func() error { return f.Detach(true) }) }
		}},
		"a filter of the qdisc ingress": {put: func(w *world) (func() uint32, func()) {
			tool(w, "tc", "qdisc add dev in ingress")
			tool(w, "tc", "filter add dev in parent ffff: protocol ipv6 u32 match u32 0 0 classid 1:1")
			return nil, func() { tool(w, "tc", "qdisc del dev in ingress") }
		}},
		"a program of netfilter": {put: func(w *world) (func() uint32, func()) {
			if err := kernel.NetfilterLink.Check(); err != nil {
				w.Skip("need: kernel", err)
			}
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "Dual BSD/GPL",
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1 /* NF_ACCEPT */), asm.Return()}})
			if err != nil {
				w.Fatal(err)
			}
			defer p.Close()
			var ln kernel.Link
			w.in(w.r1, func() (err error) {
				ln, err = kernel.Netfilter{Family: unix.NFPROTO_IPV6, Hook: kernel.Forward, Priority: 7}.Attach(p)
				return err
			})
			w.Cleanup(func() { ln.Close() })
			return nil, func() { ln.Close() }
		}},
		"a program of tcx behind it":            {still: true, put: func(w *world) (func() uint32, func()) { return attach(w, "in", false, link.Tail()) }},
		"a program of tcx before the other one": {put: func(w *world) (func() uint32, func()) { return attach(w, "main", true, link.Head()) }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if !tcx() {
				t.Skip("need: kernel with tcx (6.6)")
			}
			w.apply(w.path(around()))
			w.serve()
			w.drain(true)
			p := w.pair(true)
			fast := func() uint64 {
				before := w.state("core").Counts
				if !p.arrives(100, patience) {
					t.Error("a packet does not arrive")
				}
				after := w.state("core").Counts
				if after.Packets == before.Packets {
					t.Error("a packet was not rerouted")
				}
				return after.Fast - before.Fast
			}
			w.until("packets are rerouted at ingress", func() bool { return fast() > 0 })
			seen, off := c.put(w)
			sees := func() bool {
				if seen == nil {
					return true
				}
				n := seen()
				f := fast()
				return seen() > n && (f > 0) == c.still
			}
			// While the program moves behind another one, the old one still reroutes some packets. Then the new one
			// is loaded.
			steady := 0
			w.until("it stands aside", func() bool {
				if steady++; (fast() > 0) != c.still || !sees() {
					steady = 0
				}
				return steady >= 3
			})
			nstest.Steadily(t, 5*fastCheckInterval, func() error {
				if (fast() > 0) != c.still || !sees() {
					return errors.New("it does not stay aside")
				}
				return nil
			})
			off()
			w.until("it is back", func() bool { return fast() > 0 })
			w.healthy()
		})
	}
}
