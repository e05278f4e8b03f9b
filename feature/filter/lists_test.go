// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/nstest"
)

// listOf writes a file of n unused prefixes and the given ones.
func listOf(t testing.TB, n int, more ...string) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("# prefixes\n\n")
	for i := range n {
		fmt.Fprintf(&b, "11.%d.%d.%d/32\n", i>>16&255, i>>8&255, i&255)
	}
	for _, m := range more {
		b.WriteString(m + "  # one of ours\n")
	}
	file := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// Short and long lists work at every hook. A change of rules does not refill an unchanged list, and
// its filter can be recovered without the file.
func TestLists(t *testing.T) {
	eachHook(t, func(t *testing.T, h Hook) {
		for _, n := range []int{3, 2000} {
			w := newWorld(t)
			f := w.filter(h, Rule{Name: "listed", Match: Expression{Text: "udp and (ip.src in $bad or ip6.src in $bad)"}, Action: Drop},
				Rule{Name: "other", Match: Expression{Text: "udp.dstport == 5002 and ip.src in $other"}, Action: Drop})
			none := listOf(t, 40)
			f.Lists = map[string]string{"bad": listOf(t, n, "10.77.0.0/24"), "other": none}
			w.apply(f)
			w.want(fmt.Sprint(n, " of IPv4"), "5001/6", 5001)
			f.Lists["bad"] = listOf(t, n, "fd77::/64")
			if steps := w.apply(f); !slices.Equal(steps, []string{"change filter test: lists"}) {
				t.Errorf("steps %q", steps)
			}
			w.want(fmt.Sprint(n, " of IPv6"), "5001/4", 5001)
			// The rules using the list change their order. The table stays with its name.
			f.Rules[0], f.Rules[1] = f.Rules[1], f.Rules[0]
			w.apply(f)
			w.want("order changed", "5001/4", 5001)
			os.Remove(f.Lists["bad"])
			w.older()
			if steps, err := featuretest.Upgrade(t.Context(), w.root, Feature{}); err != nil || len(steps) != 1 {
				t.Fatal(steps, err)
			}
			w.want("compiled anew without the file", "5001/4", 5001)
		}
	})
}

func TestListErrors(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	f := w.filter(HookNFT, Rule{Match: Expression{Text: "ip.src in $bad"}, Action: Drop})
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), `there is no list "bad"`) {
		t.Errorf("an undefined list: %v", err)
	}
	f.Lists = map[string]string{"bad": "/nonexistent"}
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), "filter.test.lists.bad: open /nonexistent") {
		t.Errorf("a missing file: %v", err)
	}
	f.Lists["bad"] = listOf(t, 1, "192.0.2.1/33")
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), `list:4: "192.0.2.1/33" is not an address or prefix`) {
		t.Errorf("no prefix: %v", err)
	}
	f.Lists["bad"] = listOf(t, 1, "fe80::1%lo")
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), `list:4: "fe80::1%lo" is not an address or prefix: zones are not supported: write fe80::1 without %lo`) {
		t.Errorf("an address with a zone: %v", err)
	}
	for text, want := range map[string]string{"10.1.0.1/16": "10.1.0.0/16, or 10.1.0.1 for", "2001:db8::1/64": "2001:db8::/64, or 2001:db8::1 for"} {
		f.Lists["bad"] = listOf(t, 1, text)
		if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("list:4: %q has bits set beyond its length: write %s the one address", text, want)) {
			t.Errorf("an address with a length: %v", err)
		}
	}
}

// The plan warns of a newly empty list, because the configuration does not show it.
func TestWarnsOfEmptyList(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "bad.txt")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := w.filter(HookNFT, Rule{Match: Expression{Text: "ip.src in $bad"}, Action: Drop})
	f.Lists = map[string]string{"bad": path}
	write("192.0.2.1\n")
	w.apply(f)
	plan := func() feature.Plan {
		t.Helper()
		have, err := ReadState(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Feature{}.Plan(t.Context(), have, Config{Filters: []Filter{f}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if p := plan(); len(p.Warnings) != 0 {
		t.Errorf("with one prefix: %q", p.Warnings)
	}
	write("# none today\n")
	if p := plan(); len(p.Warnings) != 1 || len(p.Outages) != 0 || !strings.Contains(p.Warnings[0], "list bad is empty: no packet matches $bad: check its file, "+path) {
		t.Errorf("an emptied list: %q, outages %q", p.Warnings, p.Outages)
	}
	// For a pass rule, an empty list locks everybody out.
	f.Rules = []Rule{{Match: Expression{Text: "ip.src in $bad"}, Action: Pass}, drops(5001)}
	if p := plan(); len(p.Outages) != 1 || !strings.Contains(p.Outages[0], "list bad is empty") {
		t.Errorf("an emptied list of a pass rule: %q, outages %q", p.Warnings, p.Outages)
	}
	f.Rules = []Rule{{Match: Expression{Text: "ip.src in $bad"}, Action: Pass}}
	if p := plan(); len(p.Outages) != 0 {
		t.Errorf("no drop after the rule: outages %q", p.Outages)
	}
	f.Rules = []Rule{{Match: Expression{Text: "ip.src in $bad"}, Action: Drop}}
	w.apply(f)
	if p := plan(); len(p.Warnings) != 0 {
		t.Errorf("a list empty before and after: %q", p.Warnings)
	}
}

func TestTrialWithLists(t *testing.T) {
	f := Filter{Hook: HookTCX, Rules: []Rule{{Match: Expression{Text: "ip.src in $bad"}, Action: Count}}, Lists: map[string]string{"bad": listOf(t, 100, "192.0.2.0/24")}}
	for _, interpret := range []bool{false, true} {
		r := tried(t, f, interpret, captureOf(t, "pcap", layers.LinkTypeEthernet, 0, nil, frame(t, 53, 1)))
		if r.Rules[0].Packets != 1 {
			t.Errorf("interpret %v: %+v", interpret, r)
		}
	}
}

// The list exceeds the first estimate of its table's size.
func TestListGrows(t *testing.T) {
	nstest.NeedRoot(t)
	needHook(t, HookTCX)
	w := newWorld(t)
	l := &list{Segments: 1, Hash: "x"}
	for i := range 60000 { // scattered, each in its own page
		l.entries = append(l.entries, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 8), byte(i), byte(i * 7), byte(i * 13)}), 32))
	}
	l.entries = append(l.entries, netip.MustParsePrefix("10.77.0.1/32"))
	p := &published{Filter: w.filter(HookTCX, Rule{Match: Expression{Text: "ip.src in $bad"}, Action: Drop}).withDefaults(), Lists: map[string]*list{"bad": l}}
	c, _, err := p.compileAndLoad(noMaps)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if l.Segments != maxSegments {
		t.Errorf("%d segments", l.Segments)
	}
}

// A list too large for one table is spread over several. At every hook it matches like the list. It
// keeps its tables when rules change, and without the file.
func TestListSpreads(t *testing.T) {
	nstest.NeedRoot(t)
	was := maxSegments
	maxSegments = 1
	t.Cleanup(func() { maxSegments = was })
	var b strings.Builder
	r := rand.New(rand.NewPCG(7, 7))
	for range 20000 { // more than 1 MiB of tables
		fmt.Fprintf(&b, "2a%02x:%04x:%04x:%04x::/64\n11.%d.%d.%d\n", r.IntN(16), r.IntN(1<<16), r.IntN(1<<16), r.IntN(1<<16), r.IntN(256), r.IntN(256), r.IntN(256))
	}
	for _, ours := range []string{"10.77.0.0/24", "fd77::/64"} {
		file := filepath.Join(t.TempDir(), "list")
		if err := os.WriteFile(file, []byte(b.String()+ours), 0o600); err != nil {
			t.Fatal(err)
		}
		w := newWorld(t)
		f := w.filter(HookNFT, Rule{Name: "listed", Match: Expression{Text: "udp.dstport == 5001 and net.src in $bad"}, Action: Drop})
		f.Lists = map[string]string{"bad": file}
		family := "4"
		if strings.Contains(ours, ":") {
			family = "6"
		}
		w.apply(f)
		other := map[string]string{"4": "6", "6": "4"}[family]
		w.want("spread", "5001/"+other, 5001)
		f.Rules = append(f.Rules, drops(5009))
		w.apply(f)
		w.want("a rule more", "5001/"+other, 5001)
		st, err := ReadState(t.Context(), w.root)
		if err != nil || len(st.Filters) != 1 || len(st.Filters[0].Lists) != 1 {
			t.Fatal(err, st)
		}
		saved, err := Feature{}.Save(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("192.0.2.1\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		w.apply(f)
		w.want("another list", "5001/4 5001/6", 5001)
		w.restore(saved)
		w.want("restored", "5001/"+other, 5001)
		if again, err := (Feature{}).Save(t.Context(), w.root); err != nil || len(again) != len(saved) {
			t.Errorf("saved after a restore: got %d bytes, want %d: %v", len(again), len(saved), err)
		}
		if l := st.Filters[0].Lists[0]; l.Name != "bad" || l.Prefixes < 39_900 || l.MiB < 2 {
			t.Errorf("%+v", l)
		}
	}
}

// For all kinds of lists, prefixes are distributed evenly, and the table of an address has its
// matching prefixes.
func TestSpread(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	word := func() uint16 { return uint16(r.Uint32()) }
	for name, make := range map[string]func() string{
		"random /64":           func() string { return fmt.Sprintf("2%03x:%x:%x:%x::/64", r.IntN(4096), word(), word(), word()) },
		"/64 of one /32":       func() string { return fmt.Sprintf("2001:db8:%x:%x::/64", word(), word()) },
		"hosts of one /64":     func() string { return fmt.Sprintf("2001:db8::%x:%x:%x:%x/128", word(), word(), word(), word()) },
		"/48 with few /20":     func() string { return fmt.Sprintf("2%03x:%x:%x::/48", r.IntN(4096), word(), word()) },
		"hosts of one IPv4 /8": func() string { return fmt.Sprintf("10.%d.%d.%d/32", r.IntN(256), r.IntN(256), r.IntN(256)) },
		"/24 of IPv4":          func() string { return fmt.Sprintf("%d.%d.%d.0/24", r.IntN(224), r.IntN(256), r.IntN(256)) },
	} {
		l := &list{}
		for range 20000 {
			l.entries = append(l.entries, netip.MustParsePrefix(make()))
		}
		for i := range 20 {
			l.entries = append(l.entries, netip.PrefixFrom(netip.AddrFrom16([16]byte{0x30, byte(i) << 4}), 20))
		}
		s := l.spread(4)
		if most := max(l.fullest(s, netip.Addr.Is4), l.fullest(s, netip.Addr.Is6)); most > 5600 {
			t.Errorf("%s: %+v: %d prefixes in one of 4 tables", name, s, most)
		}
		for _, p := range l.entries {
			of := s.Find(p)
			b := p.Addr().AsSlice()
			for i := p.Bits(); i < 8*len(b); i++ {
				b[i/8] |= byte(r.IntN(2)) << (7 - i%8)
			}
			a, _ := netip.AddrFromSlice(b)
			if got := s.Find(netip.PrefixFrom(a, a.BitLen())); of >= 0 && got != of {
				t.Errorf("%s: %s is in table %d, but %s is searched in %d", name, p, of, a, got)
			}
		}
	}
}

// The error about an invalid list file is short, even if the file's lines are long.
func TestListErrorIsShort(t *testing.T) {
	for name, text := range map[string]string{"a letter": strings.Repeat("a", 1<<20), "a zone": strings.Repeat("f%", 1<<20)} {
		file := filepath.Join(t.TempDir(), "list.txt")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, 0o644); err != nil { // errors quote only world-readable files
			t.Fatal(err)
		}
		if _, err := readList(file); err == nil || len(err.Error()) > 1000 || !strings.Contains(err.Error(), "list.txt:1:") {
			t.Errorf("%s repeated: an error of %d bytes", name, len(fmt.Sprint(err)))
		}
	}
}
