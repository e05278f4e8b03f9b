// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"change": playChange})
	flag.Parse()
	// Parallel tests wait for the kernel and do not need a CPU each.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	nstest.Main(m)
}

// newRoot returns a pin root exclusive to the test.
func newRoot(t testing.TB) *kernel.Root {
	t.Helper()
	nstest.NeedRoot(t)
	name := strings.NewReplacer("/", "_", " ", "_", ".", "_", ",", "_").Replace(t.Name())
	r := kernel.OpenRoot(filepath.Join(nstest.BPFFS, fmt.Sprintf("%.40s_%d", name, time.Now().UnixNano()%1e9)))
	t.Cleanup(func() {
		l, err := r.Lock(context.Background())
		if err == nil {
			err = Feature{}.Remove(context.Background(), l)
			l.Unlock()
		}
		if err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(r.Path()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the filter is removed, but its root still exists: %v", err)
		}
	})
	return r
}

// world is a pair of connected namespaces, A and B, with filters in B.
type world struct {
	*nstest.Wire
	root *kernel.Root
	t    testing.TB
	// The sockets stay open until the test ends. A process started by another test briefly inherits
	// each socket, so a closed port may not be free to reopen at once.
	pairs map[netip.AddrPort]pair
}

// pair is a sending socket and the intended receiver.
type pair struct{ from, to *net.UDPConn }

func newWorld(t testing.TB) *world {
	t.Helper()
	return &world{Wire: nstest.NewWire(t), root: newRoot(t), t: t, pairs: map[netip.AddrPort]pair{}}
}

// filter returns a filter at a hook of B.
func (w *world) filter(hook Hook, rules ...Rule) Filter {
	f := Filter{Name: "test", Hook: hook, Netns: w.NameB, Rules: rules}
	if hook.ofDevices() {
		f.Interfaces = []string{nstest.WireDevice}
	}
	return f
}

func drops(port int) Rule {
	return Rule{Name: fmt.Sprintf("p%d", port), Match: Expression{Text: fmt.Sprintf("udp.dstport == %d", port)}, Action: Drop}
}

// apply makes the host have exactly these filters and returns the plan.
func (w *world) apply(filters ...Filter) []string {
	w.t.Helper()
	steps, err := applyTo(w.t.Context(), w.root, filters...)
	if err != nil {
		w.t.Fatal(err)
	}
	return steps
}

func applyTo(ctx context.Context, r *kernel.Root, filters ...Filter) ([]string, error) {
	return featuretest.Apply(ctx, r, Feature{}, Config{Filters: filters})
}

func (w *world) state() State {
	w.t.Helper()
	st, err := ReadState(w.t.Context(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	return st
}

// one returns the only filter.
func (w *world) one() FilterState {
	w.t.Helper()
	st := w.state()
	if len(st.Filters) != 1 {
		w.t.Fatalf("%d filters: %+v", len(st.Filters), st)
	}
	return st.Filters[0]
}

// flows returns the ports of B reachable from A, by family.
func (w *world) flows(ports ...uint16) string { return w.flowsOf("", ports...) }

// flowsOf is flows with the expected result: it waits longer for expected packets.
func (w *world) flowsOf(wanted string, ports ...uint16) string {
	w.t.Helper()
	return flowsOf(w.t, w.pairs, w.A, w.B, w.B4, w.B6, strings.Fields(wanted), ports...)
}

// mustFlow is want between two namespaces, with its own sockets.
func mustFlow(t testing.TB, when, want string, a, b *netns.Handle, b4, b6 netip.Addr, ports ...uint16) {
	t.Helper()
	if got := flowsOf(t, map[netip.AddrPort]pair{}, a, b, b4, b6, strings.Fields(want), ports...); got != want {
		t.Errorf("%s: %q arrived, want %q", when, got, want)
	}
}

func flowsOf(t testing.TB, pairs map[netip.AddrPort]pair, a, b *netns.Handle, b4, b6 netip.Addr, wanted []string, ports ...uint16) string {
	t.Helper()
	var should []bool
	var from, to []*net.UDPConn
	var names, out []string
	for _, port := range ports {
		for name, addr := range map[string]netip.Addr{"4": b4, "6": b6} {
			if !addr.IsValid() {
				continue
			}
			any := netip.IPv4Unspecified()
			if name == "6" {
				any = netip.IPv6Unspecified()
			}
			at := netip.AddrPortFrom(addr, port)
			if _, open := pairs[at]; !open {
				pairs[at] = pair{nstest.ListenUDP(t, a, netip.AddrPortFrom(any, 0)), nstest.ListenUDP(t, b, at)}
			}
			to, from = append(to, pairs[at].to), append(from, pairs[at].from)
			names = append(names, fmt.Sprintf("%d/%s", port, name))
			should = append(should, slices.Contains(wanted, names[len(names)-1]))
		}
	}
	for i, is := range nstest.ArriveAt(t, from, to, should) {
		if is {
			out = append(out, names[i])
		}
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func (w *world) want(when, flows string, ports ...uint16) {
	w.t.Helper()
	if got := w.flowsOf(flows, ports...); got != flows {
		w.t.Errorf("%s: %q arrived, want %q", when, got, flows)
	}
}

func needHook(t testing.TB, h Hook) {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(Feature{}.Needs(Config{Filters: []Filter{{Hook: h}}})); err != nil {
		t.Skip("need: kernel", err)
	}
}

func eachHook(t *testing.T, f func(t *testing.T, h Hook)) {
	for _, h := range hooks {
		t.Run(string(h), func(t *testing.T) {
			needHook(t, h)
			f(t, h)
		})
	}
}

// At each hook, a filter drops by its rules, counts, changes, and is removed.
func TestHooks(t *testing.T) {
	eachHook(t, func(t *testing.T, h Hook) {
		w := newWorld(t)
		w.want("before", "5001/4 5001/6 5002/4 5002/6", 5001, 5002)
		counted := Rule{Name: "all", Match: Expression{Text: "udp"}, Action: Count}
		steps := w.apply(w.filter(h, counted, drops(5001)))
		if len(steps) != 1 || !strings.HasPrefix(steps[0], "create filter test: 2 rules at "+string(h)) {
			t.Errorf("steps %q", steps)
		}
		w.want("created", "5002/4 5002/6", 5001, 5002)
		s := w.one()
		for _, p := range s.Attachments {
			if !p.Attached || p.Problem != "" {
				t.Errorf("place %+v", p)
			}
		}
		if len(s.Attachments) == 0 || s.Problem != "" || s.Name != "test" || s.Netns != w.NameB {
			t.Errorf("state %+v", s)
		}
		w.wantCounts(map[string]uint64{"all": 4, "p5001": 2})
		if again := w.apply(w.filter(h, counted, drops(5001))); len(again) != 0 {
			t.Errorf("applied again: %q", again)
		}
		steps = w.apply(w.filter(h, drops(5002), counted))
		if want := []string{"change filter test: added p5002; removed p5001"}; !slices.Equal(steps, want) {
			t.Errorf("steps %q, want %q", steps, want)
		}
		w.want("changed", "5001/4 5001/6", 5001, 5002)
		w.wantCounts(map[string]uint64{"p5002": 2, "all": 4 + 2})
		w.apply(w.filter(h, counted))
		w.want("changed again", "5001/4 5001/6", 5001)
		w.wantCounts(map[string]uint64{"all": 8})
		if steps := w.apply(); len(steps) != 1 || !strings.HasPrefix(steps[0], "remove filter test") {
			t.Errorf("steps %q", steps)
		}
		w.want("removed", "5001/4 5001/6 5002/4 5002/6", 5001, 5002)
	})
}

// wantCounts waits until the only filter's rules have these packet counts. On another CPU, a
// dropped packet may be counted later than the arrival of the following ones.
func (w *world) wantCounts(want map[string]uint64) {
	w.t.Helper()
	var s FilterState
	var got map[string]uint64
	nstest.Eventually(w.t, func() error {
		s, got = w.one(), map[string]uint64{}
		for _, r := range s.Rules {
			got[r.Key()] = r.Packets
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("counts %v, want %v", got, want)
		}
		return nil
	})
	for _, r := range s.Rules {
		if r.Bytes < 40*r.Packets || r.Bytes > 100*r.Packets {
			w.t.Errorf("rule %s: %d bytes in %d packets", r.Key(), r.Bytes, r.Packets)
		}
		if age := time.Since(r.Last); (r.Packets > 0) != !r.Last.IsZero() || r.Packets > 0 && (age < -time.Second || age > 2*patience) {
			w.t.Errorf("rule %s: %d packets, the last at %v", r.Key(), r.Packets, r.Last)
		}
	}
}

// A filter dropping ARP by default is an outage. If the previous form drops ARP already, the plan
// only warns.
func TestRefusesToDropARP(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	f := w.filter(HookTCX, drops(5001))
	f.Default = Drop
	plan := func(have State, rules ...Rule) feature.Plan {
		t.Helper()
		f.Rules = append(rules, Rule{Match: Expression{Text: "icmpv6"}, Action: Pass}) // TestRefusesToDropDiscovery covers IPv6
		p, err := Feature{}.Plan(t.Context(), have, Config{Filters: []Filter{f}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	passes := Rule{Match: Expression{Text: "eth.type == 0x0806"}, Action: Pass}
	if p := plan(State{}, drops(5001)); len(p.Warnings) != 0 || len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "ARP") {
		t.Errorf("created: warnings %q, outages %q", p.Warnings, p.Outages)
	}
	if p := plan(State{}, passes, drops(5001)); len(p.Warnings)+len(p.Outages) != 0 {
		t.Errorf("with a rule for ARP: warnings %q, outages %q", p.Warnings, p.Outages)
	}
	f.Rules = []Rule{passes, drops(5001)}
	w.apply(f)
	have, err := ReadState(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	if p := plan(have, drops(5001)); len(p.Outages) != 1 {
		t.Errorf("without the rule for ARP: outages %q", p.Outages)
	}
	have.Filters[0].pub.Filter.Rules = []Rule{drops(5002)}
	if p := plan(have, drops(5001)); len(p.Outages) != 0 || len(p.Warnings) != 1 {
		t.Errorf("a filter dropping ARP before the change: warnings %q, outages %q", p.Warnings, p.Outages)
	}
}

func TestDefaultAndActions(t *testing.T) {
	eachHook(t, func(t *testing.T, h Hook) {
		if h.ofDevices() {
			return // the default would also drop ARP and neighbour discovery
		}
		w := newWorld(t)
		pass := drops(5001)
		pass.Action = Pass
		f := w.filter(h, pass)
		f.Default = Drop
		w.apply(f)
		w.want("default drop", "5001/4 5001/6", 5001, 5002)
		if d := w.one().Default; d.Packets < 2 || d.Action != Drop {
			t.Errorf("default %+v", d)
		}
	})
}

// Egress hooks, and the netfilter hooks of outgoing packets.
func TestDirections(t *testing.T) {
	for name, change := range map[string]func(f *Filter){
		"tcx egress":     func(f *Filter) { f.Hook, f.Direction = HookTCX, Egress },
		"clsact egress":  func(f *Filter) { f.Hook, f.Direction = HookClsact, Egress },
		"nft output":     func(f *Filter) { f.Hook, f.At = HookNFT, "output" },
		"nft post":       func(f *Filter) { f.Hook, f.At, f.Priority = HookNFT, "postrouting", 100 },
		"netfilter out":  func(f *Filter) { f.Hook, f.At = HookNetfilter, "output" },
		"netfilter post": func(f *Filter) { f.Hook, f.At, f.Priority = HookNetfilter, "postrouting", -7 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			f := w.filter(HookTCX, drops(5001))
			change(&f)
			needHook(t, f.Hook)
			if !f.Hook.ofDevices() {
				f.Interfaces = nil
			}
			w.apply(f)
			w.want("towards B", "5001/4 5001/6", 5001)
			mustFlow(t, "from B", "5002/4 5002/6", w.B, w.A, w.A4, w.A6, 5001, 5002)
		})
	}
}

// Filters of several namespaces are independent.
func TestNamespaces(t *testing.T) {
	w, v := newWorld(t), newWorld(t)
	a, b := w.filter(HookTCX, drops(5001)), v.filter(HookTCX, drops(5002))
	c := v.filter(HookNFT, drops(5003))
	c.Name = "other"
	w.apply(a, b, c)
	w.want("first", "5002/4 5002/6 5003/4 5003/6", 5001, 5002, 5003)
	v.want("second", "5001/4 5001/6", 5001, 5002, 5003)
	if n := len(w.state().Filters); n != 3 {
		t.Errorf("%d filters", n)
	}
	steps := w.apply(a, c)
	if len(steps) != 1 || !strings.HasPrefix(steps[0], "remove filter test: in "+v.NameB) {
		t.Errorf("steps %q", steps)
	}
	v.want("one of two gone", "5001/4 5001/6 5002/4 5002/6", 5001, 5002, 5003)
}
