// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"golang.org/x/sys/unix"
)

// everyFeatureInBox has instances of every feature in one namespace, except a netfilter link, because the kernel keeps
// its namespace.
const everyFeatureInBox = `
services:
  telemetry: {netns: box, listen: [udp 0.0.0.0:4739], steer: {slots: 2, share_port: true, generations: {}}, guard: {limit: 20kpps}}
  shared: {netns: box, listen: [udp 0.0.0.0:4740], steer: {slots: 1, engine: sk_reuseport}, guard: {limit: 20kpps, interfaces: [d0]}}
filter:
  - {name: tcx, netns: box, hook: tcx, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
  - {name: xdp, netns: box, hook: xdp-generic, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
reroute:
  - {name: core, netns: box, interface: d0, bfd: {peer: "fd00:12::2", interval: 50ms, multiplier: 3}, repairs: [{segments: ["fc00:3::e"], interface: d1, via: "fd00:13::3"}]}
  - {name: probed, netns: box, interface: d1, segments: ["fc00:3::1"], probe: {mode: echo, id: 7, peer: "fc00:3::1", source: "fd00:13::1", via: "fd00:13::3", key_file: %q}}
`

// furnishBox gives a namespace the interfaces used by the features.
func furnishBox() error {
	for i, name := range []string{"d0", "d1"} {
		d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "p" + name}
		if err := errors.Join(netlink.LinkAdd(d), netlink.LinkSetUp(d)); err != nil {
			return err
		}
		a, _ := netlink.ParseAddr(fmt.Sprintf("fd00:1%d::1/64", i+2))
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(d, a); err != nil {
			return err
		}
		os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/forwarding", []byte("1"), 0)
	}
	return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
}

// attachedHere lists the attachments, devices, routes and rules of the calling thread's namespace.
func attachedHere() (out []string, err error) {
	all, err := dump.LinkList()
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		a := l.Attrs()
		out = append(out, "device "+a.Name)
		if a.Xdp != nil && a.Xdp.Attached {
			out = append(out, "XDP at "+a.Name)
		}
		for name, hook := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
			q, err := link.QueryPrograms(link.QueryOptions{Target: a.Index, Attach: hook})
			if err == nil && len(q.Programs) > 0 {
				out = append(out, fmt.Sprintf("%d programs at tcx %s of %s", len(q.Programs), name, a.Name))
			}
		}
		qdiscs, err := dump.QdiscList(l)
		if err != nil {
			return nil, err
		}
		for _, q := range qdiscs {
			out = append(out, fmt.Sprintf("qdisc %s of %s", q.Type(), a.Name))
		}
	}
	routes, err := dump.RouteListFiltered(unix.AF_INET6, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	for _, r := range routes {
		if r.Type != unix.RTN_LOCAL && r.Type != unix.RTN_ANYCAST && r.Type != unix.RTN_MULTICAST {
			out = append(out, "route "+r.String())
		}
	}
	rules, rerr := dump.RuleList(netlink.FAMILY_ALL)
	out = append(out, fmt.Sprint(len(rules), " rules"))
	nft, _ := exec.Command("nft", "list", "ruleset").CombinedOutput()
	return append(out, "nft "+string(nft)), errors.Join(err, rerr)
}

// attachedIn is attachedHere of another namespace, with its links of sk_lookup and netfilter.
func attachedIn(t *testing.T, ns *netns.Handle) (text string) {
	t.Helper()
	err := ns.Do(func() error {
		out, err := attachedHere()
		if q, qerr := link.QueryPrograms(link.QueryOptions{Target: ns.FD(), Attach: ebpf.AttachSkLookup}); qerr == nil && len(q.Programs) > 0 {
			out = append(out, "a program at sk_lookup")
		}
		text = strings.Join(out, "\n")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// holders keep sockets, and with them a namespace, alive.
var holders []*exec.Cmd

func endHolders(t *testing.T) {
	for _, h := range holders {
		p, err := pidfd.Open(h.Process.Pid)
		if err != nil {
			continue // it has ended
		}
		h.Process.Kill()
		nstest.Until(t, "the holder is dead", func() bool { return !p.Alive() })
		p.Close()
	}
	holders = nil
}

// inBox makes the namespace box with every feature in it, and deletes it. It returns the inode number.
func (w world) inBox(c *Config) uint64 {
	t := w.t
	t.Helper()
	box, err := netns.Create("box")
	if err != nil {
		t.Fatal(err)
	}
	defer box.Close()
	if err := box.Do(furnishBox); err != nil {
		t.Fatal(err)
	}
	w.apply(c)
	g, err := quarantine.Open(t.Context(), w.Root, box, []string{"d0"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var f *lb.DataPath
	err = box.Do(func() (err error) {
		f, err = lb.Open(t.Context(), w.Root, "lb", lb.Options{Devices: []string{"d1"}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	g.Close()
	f.Close()
	endHolders(t)
	if err := netns.Delete("box"); err != nil {
		t.Fatal(err)
	}
	return box.Inode()
}

// A namespace with the inode number of a gone one gets nothing of its pins, even with the same name.
func TestHeirOfANamespaceGetsNothing(t *testing.T) {
	nstest.NeedRoot(t)
	for _, n := range []kernel.Need{kernel.TCXLink, kernel.NetfilterLink, probe.CgroupIngress, probe.CompareAndSwap, kernel.NetnsCookie} {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd {
		holder := nstest.Child("hold", root, scope, kind)
		holders = append(holders, holder)
		return holder
	}
	t.Cleanup(func() { engine.SocketHolderCommand = nil })
	for _, how := range []string{"serve", "apply"} {
		t.Run(how, func(t *testing.T) { testHeirGetsNothing(t, how) })
	}
}

func testHeirGetsNothing(t *testing.T, how string) {
	w := newWorld(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := w.config(everyFeatureInBox, key)
	var heir *netns.Handle
	for range 10 { // other processes on this host take numbers too
		inode := w.inBox(c)
		if heir = nstest.Successor(t, "box", inode); heir != nil {
			break
		}
		if err := w.Remove(t.Context(), "", true); err != nil {
			t.Fatal(err)
		}
	}
	if heir == nil {
		t.Fatal("the kernel gave the number of a deleted namespace to no other")
	}
	if err := heir.Do(furnishBox); err != nil {
		t.Fatal(err)
	}
	was := attachedIn(t, heir)
	if pins := w.pinsOf("meta"); len(pins) < 10 {
		t.Fatalf("the former namespace has pins %q", pins)
	}
	if damage, _ := w.faults(); len(damage) > 0 {
		t.Errorf("faults: %q", damage)
	}
	st, err := w.Reader("").Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if text := fmt.Sprintf("%+v", st); strings.Contains(text, "telemetry") || strings.Contains(text, "probed") {
		t.Errorf("status shows what was of the former namespace: %s", text)
	}
	if how == "serve" {
		s := w.serve()
		nstest.Until(t, "nothing of the former namespace is pinned", func() bool { return len(w.pinsOf("meta")) == 0 })
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	} else {
		w.apply(w.config("{}"))
		if pins := w.pinsOf("meta"); len(pins) > 0 {
			t.Errorf("the former namespace still has pins %q", pins)
		}
	}
	if now := attachedIn(t, heir); now != was {
		t.Errorf("in the new namespace:\n%s", diff(was, now))
	}
	steps := strings.Join(w.apply(c), "\n")
	for _, want := range []string{"create service telemetry", "create service shared", "create filter tcx", "create filter xdp", "create reroute of path core", "guard"} {
		if !strings.Contains(steps, want) {
			t.Errorf("applied again: there is no %q in:\n%s", want, steps)
		}
	}
	if now := attachedIn(t, heir); now == was {
		t.Error("applied again, and nothing is attached")
	}
}
