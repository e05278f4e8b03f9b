// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/internal/nstest"
)

// listOf writes a file of n prefixes that are nobody's here, and some more.
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

// Lists, short and long, decide at every hook; one that stays is not filled again
// when rules change, and its filter can be mended without the file.
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
			// The rules that ask for it change places: the table stays with its name.
			f.Rules[0], f.Rules[1] = f.Rules[1], f.Rules[0]
			w.apply(f)
			w.want("order changed", "5001/4", 5001)
			os.Remove(f.Lists["bad"])
			w.older()
			if p, err := (Feature{}).PlanUpgrade(t.Context(), w.root); err != nil || len(p.Steps) != 1 {
				t.Fatal(p, err)
			} else if l, err := w.root.Lock(t.Context()); err != nil {
				t.Fatal(err)
			} else {
				if err := (Feature{}).Apply(t.Context(), l, p); err != nil {
					t.Error(err)
				}
				l.Unlock()
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
		t.Errorf("a list that is not named: %v", err)
	}
	f.Lists = map[string]string{"bad": "/nonexistent"}
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), "filter.test.lists.bad: open /nonexistent") {
		t.Errorf("a file that is not there: %v", err)
	}
	f.Lists["bad"] = listOf(t, 1, "192.0.2.1/33")
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), `list:4: "192.0.2.1/33" is no address or prefix`) {
		t.Errorf("no prefix: %v", err)
	}
	f.Lists["bad"] = listOf(t, 1, "fe80::1%lo")
	if _, err := applyTo(t.Context(), w.root, f); err == nil || !strings.Contains(err.Error(), `list:4: "fe80::1%lo" is no address or prefix: zones are not supported: write fe80::1 without %lo`) {
		t.Errorf("an address with a zone: %v", err)
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

// More prefixes than the first guess at a table's size has room for.
func TestListGrows(t *testing.T) {
	nstest.NeedRoot(t)
	needHook(t, HookTCX)
	w := newWorld(t)
	l := &list{Segments: 1, Hash: "x"}
	for i := range 60000 { // scattered, each in a page of its own
		l.entries = append(l.entries, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 8), byte(i), byte(i * 7), byte(i * 13)}), 32))
	}
	l.entries = append(l.entries, netip.MustParsePrefix("10.77.0.1/32"))
	p := &published{Filter: w.filter(HookTCX, Rule{Match: Expression{Text: "ip.src in $bad"}, Action: Drop}).withDefaults(), Lists: map[string]*list{"bad": l}}
	c, _, err := p.compileAndLoad(noMaps)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if l.Segments != mostSegments {
		t.Errorf("%d segments", l.Segments)
	}
}
