// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// A filter moves between all hooks, keeps its counts and leaves nothing at the former hook.
func TestMovesBetweenHooks(t *testing.T) {
	w := newWorld(t)
	all := []Filter{w.filter(HookTCX, drops(5001)), w.filter(HookClsact, drops(5001)), w.filter(HookNetfilter, drops(5001)), w.filter(HookNFT, drops(5001)),
		w.filter(HookXDP, drops(5001)), w.filter(HookXDPGeneric, drops(5001)), w.filter(HookNFT, drops(5001)), w.filter(HookNetfilter, drops(5001)),
		w.filter(HookClsact, drops(5001)), w.filter(HookXDP, drops(5001)), w.filter(HookTCX, drops(5001))}
	all[6].Priority, all[6].At = 5, "prerouting"
	all[7].Priority = 9
	for _, f := range all {
		needHook(t, f.Hook)
	}
	var passed uint64
	for i, f := range all {
		w.apply(f)
		w.want(string(f.Hook), "5002/4 5002/6", 5001, 5002)
		passed += 2
		xdpAgain := i > 0 && all[i-1].Hook.xdp() && f.Hook.xdp() // removed and recreated
		if xdpAgain {
			passed = 2
		}
		w.wantCounts(map[string]uint64{"p5001": passed})
		if left := w.attachedTo(); !slices.Equal(left, []string{string(f.Hook)}) {
			t.Errorf("moved to %s: attached to %q", f.Hook, left)
		}
		if faults, err := w.root.Check(); err != nil || len(faults) > 0 {
			t.Errorf("moved to %s: faults %v, %v", f.Hook, faults, err)
		}
	}
	w.apply()
	if left := w.attachedTo(); len(left) > 0 {
		t.Errorf("the filter is removed, but attached to %q", left)
	}
}

// attachedTo lists the hooks of B with an attachment.
func (w *world) attachedTo() (out []string) {
	w.t.Helper()
	index := nstest.Ifindex(w.t, w.B, nstest.WireDevice)
	err := w.B.Do(func() error {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			return err
		}
		if x := l.Attrs().Xdp; x != nil && x.Attached {
			out = append(out, map[uint32]string{1: "xdp", 2: "xdp-generic"}[x.AttachMode])
		}
		if n, err := tcxPrograms(index); err != nil {
			return err
		} else if n > 0 {
			out = append(out, "tcx")
		}
		there, err := kernel.Clsact{Ifindex: index}.HasQdisc()
		if there {
			out = append(out, "clsact")
		}
		return err
	})
	if w.dispatchers() > 0 {
		out = append(out, "netfilter")
	}
	if strings.Contains(ruleset(w.t, w.B, false), "weir_") {
		out = append(out, "nft")
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

// A missing interface is reported. weir serve attaches the filter when it appears and drops the
// attachment when it disappears.
func TestInterfacesComeAndGo(t *testing.T) {
	for _, h := range []Hook{HookTCX, HookClsact, HookXDP} {
		t.Run(string(h), func(t *testing.T) {
			needHook(t, h)
			w := newWorld(t)
			f := w.filter(h, drops(5001))
			f.Interfaces = []string{nstest.WireDevice, "late0"}
			w.apply(f)
			s := w.one()
			if len(s.Attachments) != 2 || !s.Attachments[0].Attached || s.Attachments[1].Attached || !strings.Contains(s.Attachments[1].Problem, "no interface late0") {
				t.Errorf("places %+v", s.Attachments)
			}
			if again := w.apply(f); len(again) > 0 {
				t.Errorf("applied again: %q", again)
			}
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.DiscardHandler)) }()
			defer func() { cancel(); <-done }()
			nstest.Cable(t, w.A, "late0", w.B, "late0")
			nstest.Address(t, w.A, "late0", netip.MustParsePrefix("10.78.0.1/24"))
			nstest.Address(t, w.B, "late0", netip.MustParsePrefix("10.78.0.2/24"))
			nstest.Until(t, "the filter is attached to the interface that came", func() bool { return w.one().Attachments[1].Attached })
			mustFlow(t, "over the interface that came", "5002/4", w.A, w.B, netip.MustParseAddr("10.78.0.2"), netip.Addr{}, 5001, 5002)
			if err := w.B.Do(func() error {
				l, err := netlink.LinkByName("late0")
				if err != nil {
					return err
				}
				return netlink.LinkDel(l)
			}); err != nil {
				t.Fatal(err)
			}
			if p := w.one().Attachments[1]; p.Attached {
				t.Errorf("the interface is deleted, but the state is %+v", p)
			}
			w.want("the other one", "5002/4 5002/6", 5001, 5002)
			f.Rules[0] = drops(5002)
			w.apply(f)
			w.want("changed since", "5001/4 5001/6", 5001, 5002)
		})
	}
}

// A renamed interface is not the filter's any more: the state says so, and weir serve or weir apply takes the filter off.
// A new interface with the name gets it soon.
func TestRenamedInterface(t *testing.T) {
	for _, h := range []Hook{HookTCX, HookClsact, HookXDPGeneric} {
		t.Run(string(h), func(t *testing.T) {
			needHook(t, h)
			w := newWorld(t)
			f := w.filter(h, drops(5001))
			f.Interfaces = []string{nstest.WireDevice, "late0"}
			nstest.Cable(t, w.A, "late0", w.B, "late0")
			w.apply(f)
			rename := func(from, to string) {
				t.Helper()
				if err := w.B.Do(func() error {
					l, err := netlink.LinkByName(from)
					if err != nil {
						return err
					}
					return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, to), netlink.LinkSetUp(l))
				}); err != nil {
					t.Fatal(err)
				}
			}
			stray := func() string {
				for _, p := range w.one().Attachments {
					if p.Interface == "lan0" {
						return p.Problem
					}
				}
				return ""
			}
			rename("late0", "lan0")
			if p := stray(); !strings.HasPrefix(p, "still attached") {
				t.Errorf("the state says %q of lan0: %+v", p, w.one().Attachments)
			}
			if steps := w.apply(f); len(steps) != 1 || !strings.HasPrefix(steps[0], "detach filter test") || stray() != "" {
				t.Errorf("apply did %q, the state says %q", steps, stray())
			}
			rename("lan0", "late0")
			w.apply(f)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.DiscardHandler)) }()
			defer func() { cancel(); <-done }()
			rename("late0", "lan0")
			nstest.Until(t, "the filter is taken off", func() bool { return len(w.one().Attachments) == 2 })
			nstest.Cable(t, w.A, "late1", w.B, "late0")
			begin := time.Now()
			nstest.Until(t, "the new interface has the filter", func() bool { return w.one().Attachments[1].Attached })
			t.Logf("after %s", time.Since(begin).Round(time.Millisecond))
		})
	}
}

// patience bounds the wait for expected events. It exceeds the stalls of a busy machine, and a
// passing test does not use it up.
const patience = 30 * time.Second

// A change is refused if an attached filter would move to unusable interfaces only. One of several
// interfaces may be missing.
func TestRefusesAbsentInterface(t *testing.T) {
	needHook(t, HookNetfilter)
	needHook(t, HookXDP)
	w := newWorld(t)
	refused := func(was, want Filter, from, reason string) {
		t.Helper()
		w.apply(was)
		p, err := Feature{}.Plan(t.Context(), w.state(), Config{Filters: []Filter{want}})
		if err != nil {
			t.Fatal(err)
		}
		text := "filter.test: interfaces: it works at " + from + " now, and would not at " + strings.Join(want.Interfaces, ", ") + ": " + reason + ": correct the name"
		if from == "" && len(p.Outages) > 0 || from != "" && (len(p.Outages) != 1 || !strings.Contains(p.Outages[0], text)) {
			t.Errorf("%s → %s: outages %q, want %q", was.location(), want.location(), p.Outages, text)
		}
	}
	at := func(h Hook, interfaces ...string) Filter {
		f := w.filter(h, drops(5001))
		f.Interfaces = interfaces
		return f
	}
	const there, absent, other = nstest.WireDevice, "absent0", "absent1"
	const reason = "there is no interface " + absent
	refused(at(HookClsact, there), at(HookClsact, absent), there, reason)
	refused(at(HookClsact, there), at(HookXDPGeneric, absent), there, reason)
	refused(at(HookXDPGeneric, there), at(HookXDP, absent), there, reason)
	refused(at(HookClsact, there), at(HookClsact, there, absent), "", "")
	refused(at(HookClsact, there, other), at(HookClsact, other), "", "")
	refused(at(HookClsact, other), at(HookClsact, absent), "", "")
	refused(w.filter(HookNetfilter, drops(5001)), at(HookClsact, absent), "netfilter input, priority 0", reason)
	refused(w.filter(HookNetfilter, drops(5001)), at(HookClsact, there), "", "")
	refused(at(HookClsact, there), w.filter(HookNetfilter, drops(5001)), "", "")
}

// The last of several filters removes a shared qdisc. An earlier qdisc of another owner stays.
func TestSharedQdisc(t *testing.T) {
	needHook(t, HookClsact)
	w := newWorld(t)
	a, b := w.filter(HookClsact, drops(5001)), w.filter(HookClsact, drops(5002))
	b.Name = "other"
	w.apply(a, b)
	w.want("two of them", "5003/4 5003/6", 5001, 5002, 5003)
	w.apply(b)
	w.want("one of them", "5001/4 5001/6 5003/4 5003/6", 5001, 5002, 5003)
	w.apply()
	if left := w.attachedTo(); len(left) > 0 {
		t.Errorf("the filter is removed, but %q still exists", left)
	}
	if err := w.B.Do(func() error { return exec.Command("tc", "qdisc", "add", "dev", nstest.WireDevice, "clsact").Run() }); err != nil {
		t.Fatal(err)
	}
	w.apply(a, b)
	w.apply()
	if left := w.attachedTo(); !slices.Equal(left, []string{"clsact"}) {
		t.Errorf("got %q, want only the qdisc from before the filter", left)
	}
}

// Apply restores an attachment removed by another program. The plan lists the step.
func TestTakenAway(t *testing.T) {
	w := newWorld(t)
	needHook(t, HookNFT)
	f := w.filter(HookNFT, drops(5001))
	w.apply(f)
	if out, err := nft(w.B, "flush", "ruleset"); err != nil {
		t.Fatal(err, out)
	}
	w.want("flushed", "5001/4 5001/6", 5001)
	if p := w.one().Attachments[0]; p.Attached || !strings.Contains(p.Problem, "weir apply") {
		t.Errorf("place %+v", p)
	}
	if steps := w.apply(f); len(steps) != 1 || !strings.HasPrefix(steps[0], "attach filter test: nftables table inet weir_test") {
		t.Errorf("steps %q", steps)
	}
	w.want("applied again", "5002/4 5002/6", 5001, 5002)
}

// A filter ends with its namespace, at netfilter hooks too: their links keep the namespace alive
// until weir removes them.
func TestNamespaceGoes(t *testing.T) {
	for _, h := range []Hook{HookTCX, HookNetfilter, HookNFT, HookClsact} {
		t.Run(string(h), func(t *testing.T) {
			needHook(t, h)
			w := newWorld(t)
			w.apply(w.filter(h, drops(5001)))
			w.B.Close()
			if err := netns.Delete(w.NameB); err != nil {
				t.Fatal(err)
			}
			if s := w.one(); !strings.Contains(s.Problem, "namespace is gone") || !strings.HasSuffix(s.Problem, "create it again or remove it from the file, then run weir apply") {
				t.Errorf("state %+v", s)
			}
			if steps := w.apply(); len(steps) != 0 {
				t.Errorf("steps %q", steps)
			}
			if n := len(w.state().Filters); n != 0 {
				t.Errorf("%d filters remain", n)
			}
			// Nothing references the namespace any more, so its end of the wire is removed.
			nstest.Until(t, "the namespace is gone", func() bool {
				return w.A.Do(func() error { _, err := netlink.LinkByName(nstest.WireDevice); return err }) != nil
			})
		})
	}
}

// If one of several locations is occupied, nothing of a new filter remains.
func TestOccupied(t *testing.T) {
	needHook(t, HookXDP)
	w := newWorld(t)
	nstest.Cable(t, w.A, "second", w.B, "second")
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "balancer", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var ln kernel.Link
	if err := w.B.Do(func() (err error) {
		ln, err = kernel.XDP{Ifindex: nstest.Ifindex(t, w.B, "second"), Device: "second"}.Attach(p)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f := w.filter(HookXDP, drops(5001))
	f.Interfaces = []string{nstest.WireDevice, "second"}
	plan, err := Feature{}.Plan(t.Context(), w.state(), Config{Filters: []Filter{f}})
	if err != nil || len(plan.Warnings) != 1 || !strings.Contains(plan.Warnings[0], `XDP of second is occupied by program`) || !strings.Contains(plan.Warnings[0], `"balancer"`) {
		t.Errorf("warnings of the plan: %q, %v", plan.Warnings, err)
	}
	_, err = applyTo(t.Context(), w.root, f)
	if !errors.Is(err, kernel.ErrOccupied) || !strings.Contains(err.Error(), `"balancer"`) || !strings.Contains(err.Error(), "tcx") {
		t.Errorf("%v", err)
	}
	if n := len(w.state().Filters); n != 0 {
		t.Errorf("%d filters", n)
	}
	w.want("refused", "5001/4 5001/6", 5001)
	ln.Close()
	if _, err := applyTo(t.Context(), w.root, f); err != nil {
		t.Fatal(err)
	}
	if plan, err = (Feature{}).Plan(t.Context(), w.state(), Config{Filters: []Filter{f}}); err != nil || len(plan.Warnings) > 0 {
		t.Errorf("the plan warns about weir's own program: %q, %v", plan.Warnings, err)
	}
}

// nft runs the nft tool in a namespace.
func nft(ns *netns.Handle, args ...string) (out string, err error) {
	err = ns.Do(func() error {
		b, err := exec.Command("nft", args...).Output()
		out = string(b)
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			out += string(exit.Stderr)
		}
		return err
	})
	return out, err
}

// needNFT skips tests of nft's view of the ruleset without the tool.
func needNFT(t testing.TB) {
	t.Helper()
	needHook(t, HookNFT)
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("need: tool nft (Debian package nftables)")
	}
}

// ruleset returns the output of nft as JSON, without weir's tables if foreign is set.
func ruleset(t testing.TB, ns *netns.Handle, foreign bool) string {
	t.Helper()
	needNFT(t)
	out, err := nft(ns, "-j", "list", "ruleset")
	if err != nil {
		t.Fatal(err, out)
	}
	if !foreign {
		return out
	}
	return withoutWeir(t, out)
}

// A user's ruleset stays identical, with its handles, before, between and after changes. It remains
// in effect: packets dropped by either ruleset do not arrive.
func TestRulesetOfUser(t *testing.T) {
	needNFT(t)
	w := newWorld(t)
	file := t.TempDir() + "/user.nft"
	if err := os.WriteFile(file, []byte(userRuleset), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := nft(w.B, "-f", file); err != nil {
		t.Fatal(err, out)
	}
	before := ruleset(t, w.B, true)
	if !strings.Contains(before, "blocked") || !strings.Contains(before, "5003") {
		t.Fatalf("the user's ruleset is missing: %s", before)
	}
	w.want("the user's alone", "5001/4 5001/6 5002/4 5002/6", 5001, 5002, 5003)
	same := func(when string) {
		t.Helper()
		if now := ruleset(t, w.B, true); now != before {
			t.Errorf("%s: the user's ruleset was\n%s\nand is now\n%s", when, before, now)
		}
	}
	f := w.filter(HookNFT, drops(5001))
	w.apply(f)
	same("applied")
	if all := ruleset(t, w.B, false); !strings.Contains(all, "weir_test") {
		t.Errorf("nft does not list weir's table: %s", all)
	}
	w.want("both", "5002/4 5002/6", 5001, 5002, 5003)
	f.Rules[0] = drops(5002)
	w.apply(f)
	same("changed")
	w.want("changed", "5001/4 5001/6", 5001, 5002, 5003)
	f.Priority, f.At = -200, "prerouting"
	w.apply(f)
	same("moved")
	w.want("moved", "5001/4 5001/6", 5001, 5002, 5003)
	// nft cannot list the match of weir and omits it: after save and reload, the ruleset drops
	// nothing.
	saved, err := nft(w.B, "list", "table", "inet", "weir_test")
	if err != nil {
		t.Fatal(err, saved)
	}
	if err := os.WriteFile(file, []byte("delete table inet weir_test\n"+saved), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := nft(w.B, "-f", file); err != nil {
		t.Fatal(err, out)
	}
	w.want("loaded again", "5001/4 5001/6 5002/4 5002/6", 5001, 5002, 5003)
	if p := w.one().Attachments[0]; p.Attached {
		t.Errorf("the table is loaded again without its match, but the state is %+v", p)
	}
	w.apply(f)
	w.want("put back", "5001/4 5001/6", 5001, 5002, 5003)
	w.apply()
	same("removed")
	w.want("removed", "5001/4 5001/6 5002/4 5002/6", 5001, 5002, 5003)
}

const userRuleset = `
table inet mine {
	set blocked { type ipv4_addr; flags interval; elements = { 192.0.2.0/24 } }
	counter seen { }
	chain in {
		type filter hook input priority filter; policy accept;
		ip saddr @blocked drop
		udp dport 5003 drop comment "mine"
	}
}
table ip nat {
	chain post { type nat hook postrouting priority srcnat; policy accept; oifname "none" masquerade; }
}
`
