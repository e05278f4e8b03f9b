// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// weir and tshark match the same packets of each capture, both with the kernel's run of the program
// and with the interpreter. Differences need a reason of the pair.
func TestGenerated(t *testing.T) {
	needTshark(t)
	t.Parallel()
	var all []*capture
	for _, link := range []layers.LinkType{layers.LinkTypeEthernet, layers.LinkTypeRaw, layers.LinkTypeLinuxSLL} {
		all = append(all, generatedCapture(t, link))
	}
	idle := comparison{captures: all, pairs: pairs, telling: true, undecided: 0.02}.run(t)
	for _, r := range idle {
		if r.labels != nil {
			t.Errorf("no packet needs this reason: %s", r)
		}
	}
}

// For packets truncated by a snaplen, decided answers of weir equal tshark's.
func TestSnaplen(t *testing.T) {
	needTshark(t)
	t.Parallel()
	lengths := map[int]float64{14: 0.8, 34: 0.3, 40: 0.22, 54: 0.15, 60: 0.12, 96: 0.06} // snaplen → maximum share of undecided answers
	asked := make([][]pair, len(pairs))
	for i, some := range pairs { // tshark's len() counts captured bytes only, and its SIP dissector needs more than the method
		asked[i] = slices.DeleteFunc(slices.Clone(some), func(p pair) bool { return strings.Contains(p.shark, "len(") || strings.Contains(p.shark, "sip.") })
	}
	for n, most := range lengths {
		some := generated()
		for i, p := range some {
			if len(p.data) > n {
				some[i] = p.cut(n)
			}
		}
		c := writeCapture(t, fmt.Sprint("generated, cut to ", n), layers.LinkTypeEthernet, some)
		const given = "not ip.hdr_len > 20 or frame.cap_len > 60" // tshark shows no destination if IPv4 options are cut off
		comparison{captures: []*capture{c}, pairs: asked, only: given, undecided: most}.run(t)
	}
}

// The same for captures of real routers.
func TestShared(t *testing.T) {
	needTshark(t)
	t.Parallel()
	comparison{captures: sharedCaptures(t), pairs: pairs}.run(t)
}

// One pass with a tap for each filter gives the same results as tshark -Y with each.
func TestTaps(t *testing.T) {
	needTshark(t)
	t.Parallel()
	c := generatedCapture(t, layers.LinkTypeEthernet)
	filters, _ := displayFilters(pairs)
	taps := sharks(t, c.path, filters)
	step := 20
	if testing.Short() {
		step = 80
	}
	for i := 0; i < len(filters); i += step {
		if alone := shark(t, c.path, filters[i]); !maps.Equal(alone, taps[i]) {
			t.Errorf("%s: tshark -Y matches %d packets, but a tap %d", filters[i], len(alone), len(taps[i]))
		}
	}
}

// comparison tries pairs on captures.
type comparison struct {
	captures  []*capture
	pairs     [][]pair
	only      string  // display filter of the compared packets, empty: all
	least     int     // minimum number of compared packets
	telling   bool    // each pair must match some packets of some capture, but not all
	undecided float64 // maximum share of undecided answers
}

// run compares and returns the unneeded reasons.
func (c comparison) run(t *testing.T) (idle []excuse) {
	t.Helper()
	filters, where := displayFilters(c.pairs)
	asked := append(filters[:len(filters):len(filters)], where...)
	asked = append(asked, cmp.Or(strings.Join(strings.Fields(c.only), " "), "frame"))
	said := make([][]frames, len(c.captures))
	compared := 0
	for i, capture := range c.captures {
		said[i] = sharks(t, capture.path, asked)
		compared += len(said[i][len(asked)-1])
	}
	if t.Failed() {
		t.FailNow()
	}
	if compared < c.least {
		t.Fatalf("%d packets can be compared, want at least %d", compared, c.least)
	}
	needed, told := map[string]bool{}, map[string]bool{}
	unsure, answers := 0, 0
	for _, interpret := range []bool{false, true} {
		first := 0
		for _, some := range c.pairs {
			got := weirs(t, c.captures, some, interpret)
			for i, capture := range c.captures {
				j := judge{capture: capture, where: where, holds: said[i][len(filters):], needed: needed}
				for n, p := range some {
					j.pair = p
					j.differences(t, got[i][n], said[i][first+n])
					most := max(len(got[i][n].match), len(said[i][first+n]))
					unsure, answers = unsure+len(got[i][n].unsure), answers+len(capture.packets)
					told[p.weir+p.shark] = told[p.weir+p.shark] || most > 0 && most < len(capture.packets)
				}
			}
			first += len(some)
		}
	}
	if n := float64(unsure) / float64(answers); n > c.undecided || n == 0 && c.undecided > 0 {
		t.Errorf("%.3f of the answers are undecided, want at most %.3f", n, c.undecided)
	} else {
		t.Logf("%.3f of the answers are undecided", n)
	}
	for _, p := range slices.Concat(c.pairs...) {
		if c.telling && !told[p.weir+p.shark] {
			t.Errorf("tshark's %s matches all packets or none in every capture: the pair tests nothing", p.shark)
		}
		for _, r := range p.but {
			if e := (excuse{p, r}); !needed[e.String()] {
				idle = append(idle, e)
			}
		}
	}
	return idle
}

// displayFilters returns the filters of all pairs and of all reasons.
func displayFilters(of [][]pair) (filters, where []string) {
	for _, p := range slices.Concat(of...) {
		filters = append(filters, p.shark)
		for _, r := range p.but {
			if r.where != "" && !slices.Contains(where, r.where) {
				where = append(where, r.where)
			}
		}
	}
	return filters, where
}

// excuse is a reason of a pair.
type excuse struct {
	pair
	reason
}

func (e excuse) String() string { return fmt.Sprintf("%s and %s: %s", e.weir, e.shark, e.why) }

// judge evaluates the matches of one pair in one capture.
type judge struct {
	*capture
	pair
	where  []string
	holds  []frames // packets for each filter of where, and last the compared packets
	needed map[string]bool
}

func (j judge) differences(t *testing.T, weir answer, shark frames) {
	t.Helper()
	wrong := map[side][]string{}
	for i := range j.packets {
		n := i + 1
		if weir.match[n] == shark[n] || weir.unsure[n] || !j.holds[len(j.where)][n] {
			continue
		}
		only := weirOnly
		if shark[n] {
			only = sharkOnly
		}
		if !j.excused(n, only) {
			wrong[only] = append(wrong[only], j.label(n))
		}
	}
	for only, labels := range wrong {
		t.Errorf("weir's %s and tshark's %s differ in %s: matched by %s only: %.20q", j.weir, j.shark, j.name, only, labels)
	}
}

// excused reports whether the pair gives a reason for a packet.
func (j judge) excused(frame int, only side) bool {
	for _, r := range j.but {
		named := j.labels != nil && slices.Contains(r.labels, j.label(frame)) || r.where != "" && j.holds[slices.Index(j.where, r.where)][frame]
		if named && r.only == only {
			j.needed[excuse{j.pair, r}.String()] = true
			return true
		}
	}
	return false
}
