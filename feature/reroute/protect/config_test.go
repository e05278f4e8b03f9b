// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestValidate(t *testing.T) {
	good := func() Path {
		return Path{Name: "a", Device: "eth1", Repairs: []Repair{{Segments: addrs("fc00:3::e", "fc00:2::d6")}}}
	}
	with := func(change func(*Path)) Path { p := good(); change(&p); return p }
	for want, paths := range map[string][]Path{
		"":                                     {good()},
		"two paths have this name":             {good(), with(func(p *Path) { p.Device = "eth2" })},
		"path a has repairs for all":           {good(), with(func(p *Path) { p.Name = "b" })},
		"a name of letters":                    {with(func(p *Path) { p.Name = "a/b" })},
		"name the protected link":              {with(func(p *Path) { p.Device = "" })},
		"0 repairs":                            {with(func(p *Path) { p.Repairs = nil })},
		"5 repairs":                            {with(func(p *Path) { p.Repairs = append(p.Repairs, p.Repairs[0], p.Repairs[0], p.Repairs[0], p.Repairs[0]) })},
		"hold 2h0m0s":                          {with(func(p *Path) { p.Hold = 2 * time.Hour })},
		"beyond its length: use 2001:db8::/32": {with(func(p *Path) { p.Prefixes = []netip.Prefix{netip.MustParsePrefix("2001:db8::1/32")} })},
		"mode \"loose\"":                       {with(func(p *Path) { p.Repairs[0].Mode = "loose" })},
		"without segments a repair needs":      {with(func(p *Path) { p.Repairs[0].Segments = nil })},
		"is the protected link":                {with(func(p *Path) { p.Repairs[0].Device = "eth1" })},
		"mtu 100":                              {with(func(p *Path) { p.Repairs[0].MTU = 100 })},
		"want a global IPv6 address":           {with(func(p *Path) { p.Repairs[0].Segments = addrs("10.0.0.1") })},
		"10 segments":                          {with(func(p *Path) { p.Repairs[0].Segments = addrs(strings.Fields(strings.Repeat("fc00:3::e ", 10))...) })},
		"want an IPv6 neighbour":               {with(func(p *Path) { p.Repairs[0].Via = addrs("10.0.0.1")[0] })},
	} {
		c := Config{Paths: paths}
		errs := c.Validate()
		switch said := fmt.Sprint(errs); {
		case len(paths) == 0:
		case want == "" && len(errs) > 0:
			t.Errorf("refused: %s", said)
		case want != "" && (len(errs) != 1 || !strings.Contains(said, want)):
			t.Errorf("errors %s, want one that says %q", said, want)
		}
	}
}

// A configuration with missing interfaces reports problems and applies the rest.
func TestProblems(t *testing.T) {
	w := newWorld(t)
	absent, through := w.path(around()), w.path(Repair{Segments: addrs(sidDT6)})
	absent.Name, absent.Device, through.Name = "absent", "eth9", "through"
	through.Prefixes = prefixes("fd00:d::/64")
	said := strings.Join(w.apply(w.path(around()), absent, through), "\n")
	for _, want := range []string{"there is no interface eth9", "segment fc00:2::d6 is reached over the protected link main: say interface and via"} {
		if !strings.Contains(said, want) {
			t.Errorf("plan says nothing of %q: %s", want, said)
		}
	}
	if st := w.state("absent"); len(st.Problems) != 1 || st.Attached || len(st.Repairs) != 0 {
		t.Errorf("%+v", st)
	}
	if st := w.state("core"); len(st.Problems) != 0 || !st.Attached || len(st.Repairs) != 1 {
		t.Errorf("%+v", st)
	}
}
