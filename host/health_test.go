// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/feature/guard"
	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"golang.org/x/sys/unix"
)

const everyFeature = `
services:
  telemetry:
    listen: [udp 0.0.0.0:4739]
    steer: {slots: 2, share_port: true, generations: {}}
    members: [{slot: 0, pid: %d}]
    guard: {limit: 20kpps}
  shared:
    listen: [udp 0.0.0.0:4740]
    steer: {slots: 1, engine: sk_reuseport}
    members: [{slot: 0, pid: %d}]
filter:
  - {name: tcx, hook: tcx, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
  - {name: xdp, hook: xdp-generic, interfaces: [lo], rules: [{match: 'udp.dstport == 9', action: drop}]}
  - {name: nf, hook: netfilter, rules: [{match: 'udp.dstport == 9', action: drop}]}
reroute:
  - {name: core, interface: d0, bfd: {peer: "fd00:12::2", interval: 50ms, multiplier: 3}, repairs: [{segments: ["fc00:3::e"], interface: d1, via: "fd00:13::3"}]}
  - {name: probed, interface: d1, repairs: [{segments: ["fc00:3::1"], interface: d0, via: "fd00:12::3"}], probe: {mode: echo, id: 7, peer: "fc00:3::1", source: "fd00:13::1", via: "fd00:13::3", key_file: %q}}
`

// damagedWorld is a host with an instance of every feature.
func damagedWorld(t *testing.T) (w world, c *Config, pid int) {
	t.Helper()
	w, c, pid, _ = damagedWorldOf(t, everyFeature, kernel.TCXLink, kernel.NetfilterLink)
	return w, c, pid
}

func damagedWorldOf(t *testing.T, config string, needs ...kernel.Need) (w world, c *Config, pid int, agents *agents) {
	t.Helper()
	nstest.NeedRoot(t)
	for _, n := range append(needs, probe.CgroupIngress, probe.CompareAndSwap) {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd { return nstest.Child("hold", root, scope, kind) }
	t.Cleanup(func() { engine.SocketHolderCommand = nil })
	w = newWorld(t)
	makeDevices(t)
	os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	first, _ := daemon(t, "0.0.0.0:4739")
	second, _ := daemon(t, "0.0.0.0:4740")
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("0123456789abcdef"), 0o600); err != nil {
		t.Fatal(err)
	}
	c = w.config(config, first, second, key)
	w.apply(c)
	agents = w.startAgents()
	t.Cleanup(func() { agents.end() })
	return w, c, first, agents
}

// makeDevices makes the devices of everyFeature.
func makeDevices(t *testing.T) {
	t.Helper()
	for i, name := range []string{"d0", "d1"} {
		d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "p" + name}
		if err := errors.Join(netlink.LinkAdd(d), netlink.LinkSetUp(d), netlink.LinkSetUp(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.PeerName}})); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { netlink.LinkDel(d) })
		a, _ := netlink.ParseAddr(fmt.Sprintf("fd00:1%d::1/64", i+2))
		a.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(d, a); err != nil {
			t.Fatal(err)
		}
		os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/forwarding", []byte("1"), 0)
	}
}

// agents are the agents of a backend and of a load balancer.
type agents struct {
	*quarantine.Quarantine
	*lb.DataPath
}

// startAgents runs the agents' first steps.
func (w world) startAgents() *agents {
	t := w.t
	t.Helper()
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	g, err := quarantine.Open(t.Context(), w.Root, ns, []string{"d0"}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	f, err := lb.Open(t.Context(), w.Root, "lb", lb.Options{Devices: []string{"d1"}})
	if err != nil {
		t.Fatal(err)
	}
	return &agents{g, f}
}

func (a *agents) end() { a.Quarantine.Close(); a.DataPath.Close() }

// restart restarts the agents, as an operator does if apply cannot recover their attachments.
func (a *agents) restart(w world) {
	a.end()
	*a = *w.startAgents()
}

// allGone is the report about an instance without a directory.
const allGone = "all its pins are gone"

// detach detaches a pinned link, unless its kind has no detach.
func (w world) detach(pin string) bool {
	w.t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(w.Root.Path(), pin), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Close()
	err = l.Detach()
	if errors.Is(err, link.ErrNotSupported) || errors.Is(err, unix.EOPNOTSUPP) {
		return false // tracepoints
	} else if err != nil {
		w.t.Fatal(pin, err)
	}
	return true
}

// pinsOf returns the pins with this prefix, relative to the root.
func (w world) pinsOf(prefix string) (out []string) {
	all, _ := filepath.Glob(filepath.Join(w.Root.Path(), "*", "*", "*", prefix+"*"))
	for _, p := range all {
		rel, _ := filepath.Rel(w.Root.Path(), p)
		out = append(out, rel)
	}
	return out
}

// faults returns the texts of damage and of foreign programs.
func (w world) faults() (damage, ahead []string) {
	w.t.Helper()
	all, err := w.Faults(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range all {
		if f.Damage() {
			damage = append(damage, f.String())
		} else {
			ahead = append(ahead, f.String())
		}
	}
	return damage, ahead
}

// seeds returns the services' seeds.
func (w world) seeds() (out []string) {
	for _, s := range w.state().Services {
		out = append(out, fmt.Sprint(s.Name, s.Seed))
	}
	return out
}

// Every lost pin and every detached link is reported, and apply recovers it with the previous seeds: traffic reaches the
// same member.
func TestDamageIsToldAndRecovered(t *testing.T) {
	w, c, _ := damagedWorld(t)
	seeds := w.seeds()
	if d, _ := w.faults(); len(d) > 0 {
		t.Fatalf("nothing is damaged, and there are faults: %q", d)
	}
	check := func(what string, want ...string) {
		t.Helper()
		d, _ := w.faults()
		for _, s := range want {
			if !slices.ContainsFunc(d, func(f string) bool { return strings.Contains(f, s) }) {
				t.Errorf("%s: %s is not told: %q", what, s, d)
			}
		}
		st, err := w.Reader("").Status(t.Context())
		if err != nil || len(st.Faults) == 0 {
			t.Errorf("%s: status has faults %v, %v", what, st.Faults, err)
		}
		if _, err := w.Plan(t.Context(), c); err != nil {
			t.Errorf("%s: plan: %v", what, err)
		}
		w.apply(c)
		if d, _ := w.faults(); slices.ContainsFunc(d, func(f string) bool {
			return !strings.HasPrefix(f, "handoff") || !slices.Contains(want, allGone) && len(want) > 0
		}) {
			t.Errorf("%s: applied, and there is still %q", what, d)
		}
		if now := w.seeds(); !slices.Equal(now, seeds) {
			t.Errorf("%s: seeds %v, they were %v", what, now, seeds)
		}
		if w.handled(4739, "telemetry") != "telemetry" || w.handled(4740, "shared") != "shared" {
			t.Errorf("%s: a datagram is not steered", what)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	var detached []string
	for _, pin := range w.pinsOf("link_") {
		if w.detach(pin) {
			detached = append(detached, filepath.Base(pin)+" is detached")
		}
	}
	check("links detached", detached...)
	remove := func(what string, pins ...string) {
		t.Helper()
		var want []string
		for _, pin := range pins {
			if err := os.RemoveAll(filepath.Join(w.Root.Path(), pin)); err != nil {
				t.Fatal(err)
			}
			want = append(want, filepath.Base(pin))
		}
		check(what, want...)
	}
	// The agent of handoff attaches its own.
	remove("removed every link", slices.DeleteFunc(w.pinsOf("link_"), func(pin string) bool { return strings.Contains(pin, "/handoff/") })...)
	remove("removed every map", w.pinsOf("map_")...)
	remove("removed every meta", w.pinsOf("meta")...)
	for _, unmounted := range []bool{false, true} {
		gone := []string{allGone}
		if !unmounted {
			if err := os.RemoveAll(w.Root.Path()); err != nil {
				t.Fatal(err)
			}
		} else if err := errors.Join(unix.Unmount(nstest.BPFFS, unix.MNT_DETACH), unix.Mount("bpf", nstest.BPFFS, "bpf", 0, "mode=0700")); err != nil {
			t.Fatal(err)
		}
		if unmounted { // the kernel may reuse the file system's number
			gone = nil
		}
		check(fmt.Sprintf("all is gone, unmounted %t", unmounted), gone...)
	}
}

// Engine sk_reuseport may lose its pins, and then its socket holder with the maps. Its programs in the members' groups
// are still weir's, not foreign.
func TestReuseportRecoversWithoutItsHolder(t *testing.T) {
	nstest.NeedRoot(t)
	var holder *exec.Cmd
	engine.SocketHolderCommand = func(root, scope string, kind spec.Engine) *exec.Cmd {
		holder = nstest.Child("hold", root, scope, kind)
		return holder
	}
	t.Cleanup(func() { engine.SocketHolderCommand = nil })
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4740")
	c := w.config(`
services:
  shared: {listen: [udp 0.0.0.0:4740], steer: {slots: 1, engine: sk_reuseport}, members: [{slot: 0, pid: %d}]}
`, pid)
	w.apply(c)
	if err := os.RemoveAll(w.Root.Path()); err != nil {
		t.Fatal(err)
	}
	held, err := pidfd.Open(holder.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := holder.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	nstest.Until(t, "the holder is dead", func() bool { return !held.Alive() })
	w.apply(c)
	if w.handled(4740, "shared") != "shared" {
		s := w.state()
		s.ExplainEmpty(t.Context())
		t.Errorf("a datagram is not steered: %s", s.Services[0].Slots[0].Reason)
	}
}

// weir serve reports damage in /healthz, metrics and its log.
func TestServeTellsOfDamage(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	w.apply(w.config(damagedService, pid))
	s := w.serve()
	if code, body := s.get("/healthz"); code != 200 {
		t.Fatalf("/healthz: %d %s", code, body)
	}
	pins := w.pinsOf("link_lookup")
	l, err := link.LoadPinnedLink(filepath.Join(w.Root.Path(), pins[0]), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.Detach(); err != nil {
		t.Fatal(err)
	}
	if code, body := s.get("/healthz"); code != 503 || !strings.Contains(body, "link_lookup is detached") {
		t.Errorf("/healthz: %d %s", code, body)
	}
	_, body := s.get("/metrics")
	checkMetrics(t, body, `weir_healthy 0`, `weir_faults{feature="steer",kind="detached",object="@lookup in net:[^"]*"} 1`)
	nstest.Until(t, "the log tells", func() bool { return s.log.Find(regexp.MustCompile("link_lookup is detached")) != nil })
	// A file system mounted over it is reported, and nothing is created again.
	if err := unix.Mount("bpf", nstest.BPFFS, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	err = w.Apply(t.Context(), w.config(damagedService, pid), func(Done) {})
	_, dry := w.Plan(t.Context(), w.config(damagedService, pid))
	code, body := s.get("/healthz")
	if err := unix.Unmount(nstest.BPFFS, 0); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(dry, kernel.ErrCovered) {
		t.Errorf("mounted over: apply --dry-run: %v", dry)
	}
	if !errors.Is(err, kernel.ErrCovered) || code != 503 || !strings.Contains(body, kernel.ErrCovered.Error()) {
		t.Errorf("mounted over: apply: %v; /healthz: %d %s", err, code, body)
	}
	if err := unix.Mount("", nstest.BPFFS, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	err = w.Apply(t.Context(), w.config(damagedService, pid), func(Done) {})
	d, _ := w.faults()
	if err := unix.Mount("", nstest.BPFFS, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, kernel.ErrReadOnly) || !strings.Contains(strings.Join(d, " "), "mounted read-only") {
		t.Errorf("read-only: apply: %v; faults %q", err, d)
	}
	w.apply(w.config(damagedService, pid))
	nstest.Until(t, "the log tells of the end", func() bool { return s.log.Find(regexp.MustCompile("fault resolved")) != nil })
}

const damagedService = `
services:
  telemetry: {listen: [udp 0.0.0.0:4739], steer: {slots: 1}, members: [{slot: 0, pid: %d}]}
`

// A foreign program before weir's is reported by status, doctor and explain.
func TestToldWhoIsAhead(t *testing.T) {
	w, _, _ := damagedWorld(t)
	if _, ahead := w.faults(); len(ahead) > 0 {
		t.Fatalf("weir's own programs are told to be others': %q", ahead)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	root, err := units.CgroupRoot()
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		spec ebpf.ProgramSpec
		at   kernel.Attachment
		want string
	}{
		{ebpf.ProgramSpec{Name: "foreign_sk", Type: ebpf.SkLookup, AttachType: ebpf.AttachSkLookup}, kernel.NetnsLookup{FD: ns.FD(), Inode: ns.Inode()}, "runs at sk_lookup"},
		{ebpf.ProgramSpec{Name: "foreign_tcx", Type: ebpf.SchedCLS}, kernel.TCX{Ifindex: lo.Attrs().Index, Device: "lo", Order: hookorder.Order{Where: hookorder.First}}, "runs at tcx ingress of lo before weir's"},
		{ebpf.ProgramSpec{Name: "foreign_bind", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Bind}, kernel.Cgroup{Path: root, Hook: ebpf.AttachCGroupInet4Bind}, "foreign_bind"},
		{ebpf.ProgramSpec{Name: "foreign_cg", Type: ebpf.CGroupSKB, AttachType: ebpf.AttachCGroupInetIngress}, kernel.Cgroup{Path: root, Hook: ebpf.AttachCGroupInetIngress}, "ingress"},
	} {
		pass := int32(1)
		if x.spec.Type == ebpf.SchedCLS {
			pass = -1
		}
		x.spec.License, x.spec.Instructions = "Dual BSD/GPL", asm.Instructions{asm.Mov.Imm(asm.R0, pass), asm.Return()}
		p, err := ebpf.NewProgram(&x.spec)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		l, err := x.at.Attach(p)
		if err != nil {
			t.Fatal(err)
		}
		_, ahead := w.faults()
		told := strings.Join(ahead, "\n")
		if x.want != "" && (!strings.Contains(told, x.spec.Name) || !strings.Contains(told, x.want)) {
			t.Errorf("%s is told so: %q", x.spec.Name, told)
		}
		if damage(must(w.Faults(t.Context()))) != nil {
			t.Errorf("%s is told to be damage", x.spec.Name)
		}
		if at := w.beside(x.spec.Name); len(at) == 0 {
			t.Errorf("no position of weir's tells of %s", x.spec.Name)
		} else if p := at[0]; p.Number < 1 || p.Of != 1+len(p.Before)+len(p.After) || p.Of < 2 {
			t.Errorf("%s: position %+v", x.spec.Name, p)
		}
		l.Close()
	}
}

// beside returns the positions of weir's programs beside a named one, for steering, guards and filters.
func (w world) beside(name string) (out []hookorder.Position) {
	w.t.Helper()
	st := must(w.Reader("/nonexistent").Status(w.t.Context()))
	var all []hookorder.Position
	services, _ := Part[state.State](st, spec.Name)
	for _, s := range services.Services {
		all = append(all, s.Positions()...)
	}
	guards, _ := Part[guard.State](st, guard.Name)
	for _, g := range guards.Guards {
		all = append(all, g.Positions...)
	}
	filters, _ := Part[filter.State](st, filter.Name)
	for _, f := range filters.Filters {
		for _, p := range f.Attachments {
			if p.Position != nil {
				all = append(all, *p.Position)
			}
		}
	}
	named := func(p hookorder.Program) bool { return p.Name == name }
	return slices.DeleteFunc(all, func(p hookorder.Position) bool {
		return !slices.ContainsFunc(p.Before, named) && !slices.ContainsFunc(p.After, named)
	})
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A root that never existed reports why it cannot be created.
func TestReadOnlyFromTheBeginning(t *testing.T) {
	w := newWorld(t)
	if err := unix.Mount("", nstest.BPFFS, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	c := w.config("services: {dns: {listen: [udp 127.0.0.1:53], guard: {limit: 10pps}}}")
	err := w.Apply(t.Context(), c, func(Done) {})
	_, dry := w.Plan(t.Context(), c)
	if uerr := unix.Mount("", nstest.BPFFS, "", unix.MS_REMOUNT, ""); uerr != nil {
		t.Fatal(uerr)
	}
	for what, err := range map[string]error{"apply": err, "apply --dry-run": dry} {
		if !errors.Is(err, kernel.ErrReadOnly) || !strings.Contains(err.Error(), "mount -o remount,rw") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A fault of several lines becomes one line of the log. It has no remedy if none is known.
func TestTellFaultsOnOneLine(t *testing.T) {
	var log strings.Builder
	tellFaults(slog.New(slog.NewTextHandler(&log, nil)), []kernel.Fault{{Kind: kernel.FaultRoot, Text: "no permission\nno permission"}}, map[string]kernel.Fault{})
	if s := log.String(); !strings.Contains(s, `err="no permission"`) || strings.Contains(s, "remedy") {
		t.Error(s)
	}
}
