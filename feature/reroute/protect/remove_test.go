// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// tables returns r1's routes, rules and links as an operator sees them.
func (w *world) tables() string {
	w.Helper()
	return w.ip(w.r1, "-6 route show table all") + w.ip(w.r1, "route show table all") + w.ip(w.r1, "-6 rule") + w.ip(w.r1, "rule") + w.ip(w.r1, "-o link")
}

// pinned lists the files below the root.
func (w *world) pinned() (out []string) {
	_ = filepath.WalkDir(w.root.Path(), func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, path)
		}
		return nil
	})
	return out
}

// After Remove the routing tables are byte-identical and nothing is left, even after changes and a second
// configuration.
func TestRemove(t *testing.T) {
	for name, links := range map[string]bool{"tcx": true, "clsact": false} {
		t.Run(name, func(t *testing.T) {
			if !links {
				with := tcx
				tcx = func() bool { return false }
				defer func() { tcx = with }()
			}
			w := newWorld(t)
			before := w.tables()
			w.apply(w.path(around()))
			if !w.state("core").Attached {
				t.Error("not attached")
			}
			p := w.pair(true)
			w.drain(true)
			if !p.arrives(100, patience) || w.state("core").Counts.Packets != 1 {
				t.Errorf("not rerouted: %+v", w.state("core"))
			}
			// Another configuration, then none.
			if said := w.apply(w.path(Repair{Mode: Inline, Segments: addrs(sidEnd), Segments4: addrs(sidEnd, sidDX4)})); len(said) != 1 || !strings.HasPrefix(said[0], "change") {
				t.Errorf("plan %q", said)
			}
			if !p.arrives(100, patience) || w.state("core").Counts.Packets != 2 {
				t.Errorf("not rerouted another way, or counts were lost: %+v", w.state("core"))
			}
			if said := w.apply(w.path(Repair{Mode: Inline, Segments: addrs(sidEnd), Segments4: addrs(sidEnd, sidDX4)})); len(said) != 0 {
				t.Errorf("plan of what is there already: %q", said)
			}
			w.remove()
			if after := w.tables(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
			if left := w.pinned(); len(left) > 0 {
				t.Errorf("left pinned: %v", left)
			}
			if names, _ := os.ReadDir("/run/netns"); strings.Contains(listed(names), helperName+netnsScope(w.r1)) {
				t.Errorf("the helper namespace is left: %s", listed(names))
			}
			for _, side := range []string{"egress", "ingress"} {
				if out := w.tc("filter show dev main " + side); out != "" {
					t.Errorf("filters are left: %s", out)
				}
			}
			if !p.arrives(100, patience) {
				t.Error("nothing arrives after removal")
			}
		})
	}
}

// The next command removes the helper namespace of a deleted router, even after the loss of its pins. It removes no
// other name.
func TestOrphanedHelper(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	router := nstest.NewNetns(t) // another root's: alive, without a pair yet
	names := []string{helperName + "1", helperName + "x", helperName + netnsScope(router)}
	for _, name := range names {
		h, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		h.Close()
		t.Cleanup(func() { _ = netns.Delete(name) })
	}
	foreign := helperName + "2" // its router is not visible here
	h, err := netns.Create(foreign)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	defer func() { _ = netns.Delete(foreign) }()
	w.ip(h, "link add to1400 type veth peer name weir1400")
	locked(t, w.root, Recover)
	left, err := netns.Names()
	if err != nil {
		t.Fatal(err)
	}
	for _, stays := range append(names[1:], foreign, helperName+netnsScope(w.r1)) {
		if !slices.Contains(left, stays) {
			t.Errorf("%s was removed: %q", stays, left)
		}
	}
	if slices.Contains(left, names[0]) {
		t.Errorf("%s is left: %q", names[0], left)
	}
}

func listed(names []os.DirEntry) string {
	var b strings.Builder
	for _, n := range names {
		b.WriteString(n.Name() + " ")
	}
	return b.String()
}

func (w *world) tc(command string) (out string) {
	w.in(w.r1, func() error {
		b, err := exec.Command("tc", strings.Fields(command)...).CombinedOutput()
		out = strings.TrimSpace(string(b))
		return err
	})
	return out
}

// A command killed at any step leaves a working data path, and the next command finishes. Removal too.
func TestCrash(t *testing.T) {
	w := newWorld(t)
	before := w.tables()
	p := w.pair(true)
	one, other := w.path(around()), w.path(Repair{Segments: addrs(sidDT6), Device: "back", Via: addrs("fd00:13::3")[0], Segments4: addrs(sidDX4)})
	for name, c := range map[string]struct{ from, to []Path }{"create": {nil, []Path{one}}, "change": {[]Path{one}, []Path{other}}, "remove": {[]Path{one}, nil}} {
		t.Run(name, func(t *testing.T) {
			for steps := 0; ; steps++ {
				if testing.Short() && steps%3 != 0 {
					continue
				}
				w.apply(c.from...)
				if c.from != nil {
					w.drain(true)
				}
				if w.killedApply(steps, c.to...) {
					t.Logf("%d steps", steps)
					w.apply()
					break
				}
				// The link works in fact. After any kill, a packet arrives by one of the ways.
				if !p.arrives(100, patience) {
					t.Errorf("killed after %d steps: nothing arrives", steps)
				}
				if steps%2 == 0 { // the next command wants the same, or nothing
					w.apply()
				} else if w.apply(c.to...); c.to != nil {
					w.drain(true)
					n := w.state("core").Counts.Packets
					if !p.arrives(100, patience) || w.state("core").Counts.Packets == n {
						t.Errorf("killed after %d steps, applied again: not rerouted: %+v", steps, w.state("core"))
					}
				}
				w.apply()
				if after := w.tables(); after != before {
					t.Fatalf("killed after %d steps: before:\n%s\nafter:\n%s", steps, before, after)
				}
				if left := w.pinned(); len(left) > 0 {
					t.Fatalf("killed after %d steps: left pinned: %v", steps, left)
				}
			}
		})
	}
}

// killedApply applies in a process killed after the given number of steps. It reports whether the process ended
// first.
func (w *world) killedApply(steps int, paths ...Path) (ended bool) {
	w.Helper()
	data, err := json.Marshal(Config{Paths: paths})
	if err != nil {
		w.Fatal(err)
	}
	return kerneltest.Killed(w, nstest.Child("apply", w.root.Path(), steps, string(data))) == ""
}

// FRR's zebra and staticd keep and change their routes while weir protects the link, and keep them after its removal.
func TestFRR(t *testing.T) {
	const zebra, staticd = "/usr/lib/frr/zebra", "/usr/lib/frr/staticd"
	for _, program := range []string{zebra, staticd, "vtysh"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("need: tool", program, "(Debian package frr)")
		}
	}
	w := newWorld(t)
	w.ip(w.r1, "route del fd00:d::/64 via fd00:12::2")
	dir, err := os.MkdirTemp("", "weir-frr") // FRR's daemons drop root and cannot enter the test's own directory
	if err == nil {
		err = os.Chmod(dir, 0o777)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	start := func(program string, config string) {
		conf := filepath.Join(dir, filepath.Base(program)+".conf")
		if err := os.WriteFile(conf, []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(program, "-f", conf, "-i", filepath.Join(dir, filepath.Base(program)+".pid"), "-z", filepath.Join(dir, "zserv"), "--vty_socket", dir, "-P", "0")
		c.Stderr = os.Stderr
		w.in(w.r1, c.Start)
		t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	}
	start(zebra, "hostname r1\n")
	nstest.Until(t, "zebra listens", func() bool { // otherwise staticd retries only after 10 s
		_, err := os.Stat(filepath.Join(dir, "zserv"))
		return err == nil
	})
	start(staticd, "ipv6 route fd00:d::/64 fd00:12::2\n")
	vtysh := func(command string) {
		w.until("vtysh: "+command, func() bool {
			out, err := exec.Command("vtysh", "--vty_socket", dir, "-c", "configure terminal", "-c", command).CombinedOutput()
			if err != nil {
				t.Logf("%s", out)
			}
			return err == nil
		})
	}
	has := func(route string) func() bool {
		return func() bool { return strings.Contains(w.ip(w.r1, "-6 route"), route) }
	}
	untilHas := func(route string) {
		nstest.Eventually(t, func() error {
			if !has(route)() {
				return fmt.Errorf("no route %s: %s", route, w.ip(w.r1, "-6 route"))
			}
			return nil
		})
	}
	untilHas("fd00:d::/64 ")
	w.apply(w.path(around()))
	w.serve()
	p := w.pair(true)
	w.drain(true)
	if !p.arrives(100, patience) || w.state("core").Counts.Packets == 0 {
		t.Errorf("FRR's route is not protected: %+v", w.state("core"))
	}
	vtysh("ipv6 route fd00:e::/64 fd00:12::2")
	untilHas("fd00:e::/64 ")
	vtysh("no ipv6 route fd00:d::/64 fd00:12::2")
	vtysh("ipv6 route fd00:d::/64 fd00:13::3") // around the link, chosen by FRR
	w.until("FRR's change counts", func() bool {
		n := w.state("core").Counts.Packets
		return p.arrives(100, time.Second) && w.state("core").Counts.Packets == n
	})
	with := w.ip(w.r1, "-6 route")
	w.remove()
	var lines []string
	for line := range strings.Lines(with) {
		if !strings.Contains(line, "dev "+helperDevice) {
			lines = append(lines, line)
		}
	}
	if after := w.ip(w.r1, "-6 route"); after != strings.Join(lines, "") {
		t.Errorf("with:\n%s\nafter:\n%s", with, after)
	}
}
