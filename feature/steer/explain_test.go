// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

var update = flag.Bool("update", false, "write the golden files anew")

// explanations collects texts for a golden file, without numbers that vary between runs.
type explanations struct {
	w    *world
	text string
}

var volatile = []struct{ re, as string }{
	{`net:\[\d+\]`, "net:[N]"}, {`cookie \d+`, "cookie C"}, {`program \d+`, "program P"}, {`process \d+ \([^)]*\)`, "process P (NAME)"},
	{`process \d+`, "process P"}, {`found as pid \d+`, "found as pid P"}, {`/tmp/\S+/devices`, "FILE"},
}

func (e *explanations) add(title, proto, from, to string) {
	e.w.t.Helper()
	p, err := feature.ParsePacket(proto, from, to)
	if err != nil {
		e.w.t.Fatal(err)
	}
	x, err := explain.Explain(e.w.t.Context(), e.w.root, p)
	if err != nil {
		e.w.t.Fatal(err)
	}
	e.text += fmt.Sprintf("# %s\n%s %s → %s, in %s\n", title, x.Proto, x.From, x.To, x.Netns)
	for _, s := range x.Steps {
		mark := " "
		if s.Warning {
			mark = "!"
		}
		e.text += fmt.Sprintf("%s %s: %s\n", mark, s.Step, s.Text)
	}
	e.text += fmt.Sprintf("→ %s\n\n", x.Result)
}

func (e *explanations) compare(file string) {
	t := e.w.t
	t.Helper()
	got := e.text
	for _, v := range volatile {
		got = regexp.MustCompile(v.re).ReplaceAllString(got, v.as)
	}
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

func TestExplain(t *testing.T) { eachEngine(t, testExplain) }

func testExplain(t *testing.T) {
	needExitHook(t) // without it, the dead member has another reason
	seed := uint32(7)
	w, sinks := collectors(t, spec.Options{Slots: 3, Seed: &seed})
	e := &explanations{w: w}
	to := "127.0.0.1:9991"
	at := func(slot int) (from string) { // a source of a slot
		for _, p := range w.where(sources(64)...) {
			if p.Slot == slot && !p.Moved {
				return netip.AddrPortFrom(p.Address, 2055).String()
			}
		}
		t.Fatalf("no source for slot %d", slot)
		return ""
	}
	w.apply()
	e.add("steered, UDP", "udp", at(1), to)
	e.add("steered, TCP", "tcp", at(2), to)
	r := connect(t, sources(1))[0]
	e.add("an established session", "tcp", r.conn.LocalAddr().String(), to)
	e.text = strings.ReplaceAll(e.text, r.conn.LocalAddr().String(), "127.1.0.1:EPHEMERAL")
	e.add("nobody's port", "udp", at(0), "127.0.0.1:53")
	moved := sources(1)[0]
	w.moveOne(moved, 1)
	e.add("moved", "udp", netip.AddrPortFrom(moved, 2055).String(), to)
	w.locked(func(l lock) error {
		return engine.Move(l, w.state().Scope(), "svc", record.Moving{Bucket: spec.Bucket(seed, sources(3)[2]), To: 0}, nil)
	})
	e.add("a bucket moved", "udp", netip.AddrPortFrom(sources(3)[2], 2055).String(), to)
	sinks[1].kill()
	e.add("an empty slot", "tcp", at(1), to)
	w.cfg.Services[0].OnEmpty = spec.Next
	w.apply()
	e.add("an empty slot, next", "udp", at(1), to)
	w.cfg.Services[0].OnEmpty = spec.Pass
	w.apply()
	e.add("an empty slot, pass", "udp", at(1), to)
	w.locked(func(l lock) error { _, err := engine.Bypass(l, w.state().Scope(), "svc", true); return err })
	e.add("bypassed", "udp", at(0), to)
	w.locked(func(l lock) error { _, err := engine.Bypass(l, w.state().Scope(), "svc", false); return err })
	more := startSink(t, "udp4=127.0.0.1:9991")
	defer more.kill()
	e.add("a more specific socket", "udp", at(0), to)
	e.compare("testdata/explain-" + string(w.state().Engine) + ".golden")
}

func TestExplainPolicies(t *testing.T) {
	nstest.NeedRoot(t)
	seed := uint32(7)
	e := &explanations{}
	for _, by := range []spec.Policy{spec.ByDevice, spec.ByFlow, spec.ByPacket, spec.ByCPU} {
		t.Run(string(by), func(t *testing.T) {
			w, _ := collectors(t, spec.Options{Slots: 2, By: by, Seed: &seed})
			if by == spec.ByDevice {
				w.devicesFile("edge1 192.0.2.1 198.51.100.0/24\n")
			}
			w.apply()
			e.w = w
			e.add("by "+string(by), "udp", "198.51.100.9:2055", "127.0.0.1:9991")
			if by == spec.ByDevice {
				e.add("of no device", "udp", "203.0.113.1:2055", "127.0.0.1:9991")
			}
		})
	}
	e.w.t = t
	e.compare("testdata/explain-policies.golden")
}

// TestExplainForeign explains packets beside a foreign program at the same hook and a socket connected to the flow.
func TestExplainForeign(t *testing.T) {
	seed := uint32(7)
	w, _ := collectors(t, spec.Options{Slots: 1, Engine: spec.EngineSkLookup, Seed: &seed})
	w.apply()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "somebody", Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	ln, err := kernel.NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}.Attach(prog)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9993}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 9), Port: 2055})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	e := &explanations{w: w}
	e.add("a foreign program", "udp", "127.0.0.5:2055", "127.0.0.1:9991")
	e.add("a connected socket", "udp", "127.0.0.9:2055", "127.0.0.1:9993")
	e.compare("testdata/explain-foreign.golden")
}

func TestParsePacket(t *testing.T) {
	for args, want := range map[[3]string]string{
		{"sctp", "192.0.2.7:1", "10.0.0.1:2"}:   "want udp or tcp",
		{"udp", "192.0.2.7", "10.0.0.1:2"}:      "want an address and a port",
		{"udp", "192.0.2.7:1", "[fe80::1]:2"}:   "of different families",
		{"udp", "router:1", "10.0.0.1:2"}:       "want an address and a port",
		{"udp", "192.0.2.7:1", "10.0.0.1:2"}:    "",
		{"tcp", "[fe80::1%e]:1", "[fe80::1]:1"}: "",
	} {
		_, err := feature.ParsePacket(args[0], args[1], args[2])
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}
