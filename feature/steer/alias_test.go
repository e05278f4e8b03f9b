// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/nstest"
)

func TestParseDevices(t *testing.T) {
	l, err := spec.ParseDevices("f", []byte(`
# routers
edge1  192.0.2.1 198.51.100.0/30   2001:db8::1 # loopback, links
core   198.51.100.2
rest   0.0.0.0/0
lab    2001:db8::/32
`))
	if err != nil {
		t.Fatal(err)
	}
	for a, want := range map[string]string{
		"192.0.2.1": "edge1", "::ffff:192.0.2.1": "edge1", "198.51.100.1": "edge1", "198.51.100.2": "core", "198.51.100.3": "edge1",
		"10.1.2.3": "rest", "2001:db8::1": "edge1", "2001:db8::2": "lab", "fe80::1": "",
	} {
		name, stands := "", netip.MustParseAddr(a).Unmap()
		if d := l.Find(netip.MustParseAddr(a)); d != nil {
			name, stands = d.Name, d.Stands()
		}
		if name != want || l.Stands(netip.MustParseAddr(a)) != stands {
			t.Errorf("%s is %q and stands as %s, want %q, %s", a, name, l.Stands(netip.MustParseAddr(a)), want, stands)
		}
	}
	if d := l.Named("edge1"); d == nil || d.Stands() != netip.MustParseAddr("192.0.2.1") || l.Named("edge2") != nil {
		t.Errorf("edge1 is %+v", d)
	}
}

func TestDeviceErrors(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.1 edge1":          "f:1: 192.0.2.1 is an address: the device's name comes first",
		"\nedge1":                  "f:2: edge1 has no address",
		"edge1 192.0.2.1/24":       `did you mean 192.0.2.0/24?`,
		"edge1 router.example":     `"router.example": not an IP address or prefix`,
		"a 1.1.1.1\nb 1.1.1.1":     "f:2: 1.1.1.1 already belongs to a, in line 1",
		"a 1.1.1.1 ::ffff:1.1.1.1": "twice",
		"a 1.0.0.0/8\nb 1.0.0.0":   "f:2: the first address of b, 1.0.0.0, already represents the device of line 1",
		"a 1.1.1.1\na 1.1.1.2":     "f:2: a is repeated, first in line 1",
		"a fe80::1%eth0":           "zones are not supported",
		"a ::/0":                   "contains IPv4",
		"a ::ffff:1.1.1.0/120":     "write IPv4 as IPv4",
		strings.Repeat("x", 65):    "has 65 bytes",
	} {
		if _, err := spec.ParseDevices("f", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want it to say %q", text, err, want)
		}
	}
}

// FuzzDevices parses arbitrary text. Either each error names a line, or every address of a device leads to it.
func FuzzDevices(f *testing.F) {
	f.Add([]byte("edge1 192.0.2.1 198.51.100.0/30 2001:db8::1 # x\n"))
	f.Add([]byte("a 1.0.0.0/8\nb 1.0.0.0/24 1.1.1.1"))
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := spec.ParseDevices("f", text)
		if err != nil {
			if !strings.Contains(err.Error(), "f:") {
				t.Errorf("no place in %v", err)
			}
			return
		}
		seen := map[netip.Addr]bool{}
		for _, d := range l.Devices {
			if seen[d.Stands()] {
				t.Errorf("%s stands for two", d.Stands())
			}
			seen[d.Stands()] = true
			for _, p := range d.Prefixes {
				got := l.Find(p.Addr())
				if got == nil || !slices.ContainsFunc(got.Prefixes, func(q netip.Prefix) bool { return q.Contains(p.Addr()) && q.Bits() >= p.Bits() }) {
					t.Errorf("%s of %s leads to %+v", p, d.Name, got)
				}
			}
		}
		again, err := spec.ParseDevices("f", append(bytes.Clone(text), 0, 0))
		if err != nil || *again.File() != *l.File() {
			t.Errorf("padded as pins are: %v, %+v, %+v", err, again.File(), l.File())
		}
	})
}

func (w *world) devicesFile(text string) {
	w.t.Helper()
	if w.cfg.Services[0].Devices == "" {
		w.cfg.Services[0].Devices = filepath.Join(w.t.TempDir(), "devices")
	}
	if err := os.WriteFile(w.cfg.Services[0].Devices, []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

// TestDevicePolicy checks the slot and the name of a device's addresses: one slot for all addresses and both protocols.
func TestDevicePolicy(t *testing.T) { eachEngine(t, testDevicePolicy) }

func testDevicePolicy(t *testing.T) {
	w, sinks := collectors(t, spec.Options{Slots: 3, By: spec.ByDevice})
	src := sources(24)
	text := "# name addresses\n"
	for i := 0; i < 24; i += 3 {
		text += fmt.Sprintf("router%d %s %s/32\n", i/3, src[i], src[i+1]) // the third address is a separate device
	}
	w.devicesFile(text)
	w.apply()
	w.check(src, loopback4, names(sinks...))
	for i := 0; i < 24; i += 3 {
		p := w.where(src[i : i+3]...)
		if p[0].Slot != p[1].Slot || p[0].Device != fmt.Sprintf("router%d", i/3) || p[1].Device != p[0].Device || p[2].Device != "" {
			t.Errorf("%+v", p)
		}
	}
	devices, problem, err := w.state().Devices(w.root)
	if err != nil || problem != nil || len(devices) != 16 {
		t.Fatalf("%d devices, %v, %v", len(devices), problem, err)
	}
	for _, d := range devices {
		// Late segments of a handshake are looked up too, so a few more connections may be counted (checkCounts).
		if d.Name != "" && (d.UDP != 2 || d.Connects < 2 || d.Connects > 4) {
			t.Errorf("%+v: want two of each", d)
		}
	}
	// A move by name moves all addresses.
	to := (w.where(src[1])[0].Slot + 1) % 3
	w.locked(func(l lock) error {
		return engine.Move(l, w.state().Scope(), "svc", record.Moving{Device: "router0", To: to}, nil)
	})
	for _, p := range w.where(src[:2]...) {
		if p.Slot != to || !p.Moved {
			t.Errorf("router0 moved to %d: %+v", to, p)
		}
	}
	w.check(src, loopback4, names(sinks...))
	if st := w.state(); st.Moved["router0"] != to {
		t.Errorf("the state has moves %v", st.Moved)
	}
	if again := w.apply(); len(again) != 0 {
		t.Errorf("applied again, it would %v", again)
	}
}

// TestDevicesFileChanges changes the devices file. Both apply and a running weir serve reset the misplaced sessions.
func TestDevicesFileChanges(t *testing.T) {
	needDestroy(t)
	for _, served := range []bool{false, true} {
		t.Run(fmt.Sprintf("served %v", served), func(t *testing.T) {
			w, _ := collectors(t, spec.Options{Slots: 3, By: spec.ByDevice})
			w.devicesFile("")
			w.apply()
			src := sources(18)
			routers := connect(t, src)
			var text strings.Builder
			text.WriteString("one")
			for _, a := range src {
				fmt.Fprintf(&text, " %s", a)
			}
			reset := map[netip.Addr]string{}
			if served {
				r := fast
				w.cfg.Services[0].ResetRate = &r
				w.apply()
				w.serve()
				w.devicesFile(text.String())
				nstest.Until(w.t, "its file is read", func() bool { return w.where(src[3])[0].Device == "one" })
				nstest.Until(w.t, "the sessions are reset", func() bool { return !w.due() })
				for _, r := range routers {
					if fmt.Sprint(w.where(r.addr)[0].PID) != r.who {
						reset[r.addr] = ""
					}
				}
			} else {
				w.devicesFile(text.String())
				if steps := w.apply(); len(steps) != 1 || !strings.Contains(steps[0], "devices ") {
					t.Errorf("the plan is %v", steps)
				}
				reset = w.resetDue()
			}
			if len(reset) == 0 {
				t.Error("nobody moved")
			}
			w.settled(routers, reset)
		})
	}
}

// due reports whether any resets are due.
func (w *world) due() bool {
	w.t.Helper()
	all, err := w.root.Instances(spec.Name)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, i := range all {
		if _, ok := record.EngineKind(i); ok {
			if v, err := reset.Due(w.root, i); err != nil {
				w.t.Fatal(err)
			} else if v != 0 {
				return true
			}
		}
	}
	return false
}
