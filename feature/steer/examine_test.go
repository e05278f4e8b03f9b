// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// found returns doctor's findings about the world.
func (w *world) found() string {
	w.t.Helper()
	findings, err := examine(w.t.Context(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	var texts []string
	for _, f := range findings {
		texts = append(texts, f.Text)
		if f.Remedy == "" {
			w.t.Errorf("%q has no remedy", f.Text)
		}
	}
	return strings.Join(texts, "\n")
}

func TestExamineOneSource(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.member(0, startSink(t, "udp4=0.0.0.0:9991"))
	w.apply()
	src := sources(2)
	for range oneSourceAfter + 1 {
		ask(t, "udp", src[0], loopback4)
	}
	if got := w.found(); !strings.Contains(got, "all its traffic comes from "+src[0].String()) {
		t.Errorf("one source alone: %q", got)
	}
	ask(t, "udp", src[1], loopback4)
	if got := w.found(); got != "" {
		t.Errorf("two sources: %q", got)
	}
}

// TestExamineProxyAndNAT examines a service in another namespace, found through its member's process, behind a proxy
// and NAT.
func TestExamineProxyAndNAT(t *testing.T) {
	nstest.NeedRoot(t)
	ns, err := netns.Create("behind")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete("behind")
	defer ns.Close()
	var s *sink
	if err := ns.Do(func() error { s = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"); return nil }); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	w.member(0, s)
	w.apply()
	if st := w.state(); st.Inode != ns.Inode() || !st.Slots[0].Admitted() {
		t.Fatalf("steered in namespace %d, the member is in %d: %+v", st.Inode, ns.Inode(), st.Slots)
	}
	var got string
	ns.Do(func() error { got = ask(t, "tcp", netip.MustParseAddr("127.1.2.3"), loopback4); return nil })
	if want := names(s)(state.Assignment{}); got != want {
		t.Errorf("in the namespace %s answers, want %s", got, want)
	}
	if got := w.found(); got != "" {
		t.Errorf("nothing in front: %q", got)
	}
	proxy := startSink(t, "tcp4=0.0.0.0:9991")
	if got := w.found(); !strings.Contains(got, "listens on port 9991 in front") || !strings.Contains(got, names(proxy)(state.Assignment{})) {
		t.Errorf("a proxy in front: %q", got)
	}
	proxy.kill()
	if err := ns.Do(masqueradeInput); err != nil {
		t.Fatal(err)
	}
	if got := w.found(); !strings.Contains(got, "may be rewritten on input: nft table weirtest") {
		t.Errorf("source NAT on the way in: %q", got)
	}
}

// masqueradeInput adds a rule that rewrites the source of incoming packets.
func masqueradeInput() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Name: "weirtest", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{Name: "in", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityNATSource})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Immediate{Register: 1, Data: []byte{10, 0, 0, 1}},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: 2, RegAddrMin: 1}}})
	return c.Flush()
}

// TestStaleNamespace: the next command removes the pins of a removed namespace, even if its number is reused.
func TestStaleNamespace(t *testing.T) {
	nstest.NeedRoot(t)
	ns, err := netns.Create("gone")
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.cfg.Services[0].Netns = "gone"
	w.apply()
	old := w.state().Scope()
	ns.Close()
	if err := netns.Delete("gone"); err != nil {
		t.Fatal(err)
	}
	w.cfg.Services[0].Netns = ""
	deadline(t, func() bool { // the kernel removes namespaces asynchronously
		w.locked(engine.CleanStale)
		all, err := w.root.Instances(spec.Name)
		return err == nil && len(all) == 0
	})
	w.apply()
	if now := w.state().Scope(); now == old {
		t.Errorf("still in namespace %s", now)
	}
}

// TestExamineDevicesAndListens examines an invalid devices file, and listens without a local address.
func TestExamineDevicesAndListens(t *testing.T) {
	nstest.NeedRoot(t)
	ns, err := netns.Create("far")
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Delete("far")
	defer ns.Close()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	up := func() error { return netlink.LinkSetUp(lo) }
	if err := ns.Do(up); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, spec.Options{Slots: 1, By: spec.ByDevice, Engine: spec.EngineSkLookup}, "udp 192.0.2.77:9991", "udp 198.51.100.0/24:9991", "udp [2001:db8::7]:9991", "udp 127.0.0.0/8:9992", "tcp :9993")
	w.cfg.Services[0].Netns = "far"
	w.devicesFile("one 192.0.2.1\n")
	w.apply()
	found := w.found()
	for _, want := range []string{"listen 192.0.2.77 is not an address", "listen 198.51.100.0/24 contains no address", "listen 2001:db8::7 is not an address"} {
		if strings.Count(found, want) != 1 {
			t.Errorf("found %q, want %q", found, want)
		}
	}
	if strings.Contains(found, "127.0.0.0") || strings.Contains(found, "devices") {
		t.Errorf("found %q", found)
	}
	if err := ns.Do(func() error {
		for _, text := range []string{"192.0.2.77/32", "198.51.100.9/32", "2001:db8::7/128"} {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if err := netlink.AddrAdd(lo, a); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if found := w.found(); found != "" {
		t.Errorf("with the addresses: %q", found)
	}
	w.devicesFile("one 192.0.2.1\ntwo 192.0.2.1\n")
	if found := w.found(); !strings.Contains(found, "its devices file is rejected") || !strings.Contains(found, "devices:2") {
		t.Errorf("a file with an error: %q", found)
	}
}
