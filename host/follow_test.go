// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
	"github.com/weir-project/weir/kernel/probe"
)

const filterElsewhere = `
filter:
  - name: elsewhere
    hook: nft
    netns: reborn
    rules: [{match: 'udp.dstport == %d', action: drop}]
`

// guardOfMember is in the network namespace of the process of a pidfile.
const guardOfMember = `
services:
  telemetry: {listen: [udp 0.0.0.0:4739], steer: {slots: 1}, guard: {limit: 20kpps}, members: [{slot: 0, pidfile: %s}]}
`

// reborn is a running weir serve. Its file has a filter in the network namespace "reborn".
type reborn struct {
	*serving
	w      world
	path   string
	reload chan struct{}
}

// needs skips a test on a kernel without a facility.
func needs(t *testing.T, all ...kernel.Need) {
	t.Helper()
	for _, n := range all {
		if err := n.Check(); err != nil {
			t.Skip("need: kernel:", err)
		}
	}
}

// newReborn starts it and waits for the filter.
func newReborn(t *testing.T) reborn {
	nstest.NeedRoot(t)
	needs(t, hook.NFTMatch, kernel.NetnsCookie)
	r := reborn{w: newWorld(t), path: filepath.Join(t.TempDir(), "weir.yaml"), reload: make(chan struct{})}
	r.create()
	t.Cleanup(func() { _ = netns.Delete("reborn") }) // the test may have deleted it
	r.write(9)
	r.serving = r.w.serveWith(socketDir(t), ServeOptions{File: r.path, Reload: r.reload})
	nstest.Eventually(t, r.healthy)
	nstest.Eventually(t, func() error { return r.unlike(9) })
	return r
}

// create makes the namespace.
func (r reborn) create() {
	r.w.t.Helper()
	ns, err := netns.Create("reborn")
	if err != nil {
		r.w.t.Fatal(err)
	}
	ns.Close()
}

// remove deletes the namespace.
func (r reborn) remove() {
	r.w.t.Helper()
	if err := netns.Delete("reborn"); err != nil {
		r.w.t.Fatal(err)
	}
}

// write makes the file drop datagrams to a port.
func (r reborn) write(port int) {
	r.w.t.Helper()
	if err := os.WriteFile(r.path, fmt.Appendf(nil, filterElsewhere, port), 0o600); err != nil {
		r.w.t.Fatal(err)
	}
}

// unlike returns the difference between the host and the file with a port.
func (r reborn) unlike(port int) error {
	if steps := r.w.plan(r.w.config(filterElsewhere, port)); len(steps) > 0 {
		return fmt.Errorf("apply would %q", steps)
	}
	return nil
}

// healthy returns an error unless /healthz reports ok.
func (r reborn) healthy() error {
	if status, body := r.get("/healthz"); status != http.StatusOK {
		return fmt.Errorf("/healthz: %d %s", status, body)
	}
	return nil
}

// waits returns an error unless /healthz reports a reload waiting for the namespace.
func (r reborn) waits() error {
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "reborn") || strings.Contains(err.Error(), "lost with") {
		return fmt.Errorf("the namespace is away, and /healthz says %v", err)
	}
	return nil
}

// A reload with a missing network namespace is retried, as at the start. /healthz shows the reason until then.
func TestReloadIsTriedAgain(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.create()
	nstest.Eventually(t, r.healthy)
	if err := r.unlike(10); err != nil {
		t.Error(err)
	}
}

// A file applied by weir apply meanwhile overrides the file retried by weir serve.
func TestReloadIsNotTriedAgainAfterAnotherApply(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.w.apply(r.w.config("filter: []"))
	r.create()
	nstest.Until(t, "weir serve gives its file up", func() bool { return r.log.Has("another file was applied") })
	if err := r.healthy(); err != nil {
		t.Error(err)
	}
	if steps := r.w.plan(r.w.config("filter: []")); len(steps) > 0 {
		t.Errorf("after another apply: %q", steps)
	}
}

// A wrong file at a reload ends the retries of earlier contents that never took effect. The contents in force stay, and
// return with their namespace. /healthz and the metrics report the wrong file.
func TestWrongFileEndsTheAttempts(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.write(10)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.wrong()
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), `unknown key "filters"`) {
		t.Errorf("the file is wrong, and /healthz says %v", err)
	}
	_, page := r.get("/metrics")
	checkMetrics(t, page, `weir_config_last_apply_success 0`)
	r.create()
	nstest.Eventually(t, func() error { return r.unlike(9) })
	nstest.Steadily(t, retryEvery+time.Second, func() error { return r.unlike(9) })
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), `unknown key "filters"`) || strings.Contains(err.Error(), "reborn") {
		t.Errorf("the file is wrong, and /healthz says %v", err)
	}
	r.write(11)
	r.reload <- struct{}{}
	nstest.Eventually(t, r.healthy)
	if err := r.unlike(11); err != nil {
		t.Error(err)
	}
	_, page = r.get("/metrics")
	checkMetrics(t, page, `weir_config_last_apply_success 1`)
}

// wrong writes a file with an error, and makes weir serve read it.
func (r reborn) wrong() {
	r.w.t.Helper()
	if err := os.WriteFile(r.path, []byte("filters: []\n"), 0o600); err != nil {
		r.w.t.Fatal(err)
	}
	r.reload <- struct{}{}
	nstest.Until(r.w.t, "weir serve refuses the file", func() bool { return r.log.Has("nothing changed") })
}

// A wrong file at a reload does not end the retries of the initial file: no other is in force.
func TestWrongFileKeepsTheStart(t *testing.T) {
	nstest.NeedRoot(t)
	needs(t, hook.NFTMatch, kernel.NetnsCookie)
	r := reborn{w: newWorld(t), path: filepath.Join(t.TempDir(), "weir.yaml"), reload: make(chan struct{})}
	t.Cleanup(func() { _ = netns.Delete("reborn") })
	r.write(9)
	r.serving = r.w.serveWith(socketDir(t), ServeOptions{File: r.path, Reload: r.reload})
	nstest.Eventually(t, r.waits)
	r.wrong()
	if err := r.waits(); err != nil {
		t.Error(err)
	}
	r.create()
	nstest.Eventually(t, func() error { return r.unlike(9) })
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), `unknown key "filters"`) {
		t.Errorf("the file is wrong, and /healthz says %v", err)
	}
}

// movedService is a service whose member needs weir: its socket is bound to another port.
const movedService = `
services:
  telemetry: {listen: [udp 0.0.0.0:2055], netns: %s, steer: {slots: 1}, members: [{slot: 0, pid: %d, bound: [udp 0.0.0.0:4739]}]}
`

// A reload that waited for a namespace, and is then rejected for an outage, is not applied after its member has ended.
func TestRefusedAttemptIsNotTriedAgain(t *testing.T) {
	nstest.NeedRoot(t)
	needs(t, kernel.NetnsCookie)
	r := reborn{w: newWorld(t), path: filepath.Join(t.TempDir(), "weir.yaml"), reload: make(chan struct{})}
	t.Cleanup(func() { _ = netns.Delete("reborn") })
	scope, err := currentScope()
	if err != nil {
		t.Fatal(err)
	}
	here := fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	pid, end := daemon(t, "0.0.0.0:4739")
	write := func(ns string) {
		t.Helper()
		if err := os.WriteFile(r.path, fmt.Appendf(nil, movedService, ns, pid), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(here)
	r.serving = r.w.serveWith(socketDir(t), ServeOptions{File: r.path, Reload: r.reload})
	nstest.Until(t, "weir serve applies its file", func() bool { return r.log.Has("file applied") })
	write("reborn")
	r.reload <- struct{}{}
	nstest.Eventually(t, r.waits)
	r.create()
	nstest.Until(t, "weir serve refuses the outage", func() bool { return r.log.Has("take served traffic") })
	end()
	nstest.Steadily(t, retryEvery+2*time.Second, func() error {
		for _, v := range r.w.state().Services {
			if v.Name == "telemetry" && v.PinScope != scope {
				return errors.New("the service left its network namespace")
			}
		}
		return nil
	})
	if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "take served traffic") {
		t.Errorf("the change was refused, and /healthz says %v", err)
	}
}

// Instances lost with their network namespace return with it. Until then /healthz and the metrics report them.
func TestInstancesComeBackWithTheirNetns(t *testing.T) {
	r := newReborn(t)
	_, page := r.get("/metrics")
	checkMetrics(t, page, `weir_config_info{hash="[0-9a-f]*"} 1`, `weir_config_last_apply_success 1`)
	r.remove()
	nstest.Eventually(t, func() error {
		if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "filter elsewhere: lost with the network namespace: ") {
			return fmt.Errorf("the namespace is away, and %w", err)
		}
		return nil
	})
	_, page = r.get("/metrics")
	checkMetrics(t, page, `weir_config_last_apply_success 0`)
	if strings.Contains(page, "weir_config_info{") {
		t.Error("the metrics say that the file is in force")
	}
	r.create()
	nstest.Eventually(t, r.healthy)
	if err := r.unlike(9); err != nil {
		t.Error(err)
	}
	_, page = r.get("/metrics")
	checkMetrics(t, page, `weir_config_info{hash="[0-9a-f]*"} 1`, `weir_config_last_apply_success 1`)
}

// Paths lost with their network namespace return with it. Until then /healthz reports them.
func TestPathsComeBackWithTheirNetns(t *testing.T) {
	nstest.NeedRoot(t)
	needs(t, kernel.NetnsCookie)
	r := reborn{w: newWorld(t), path: filepath.Join(t.TempDir(), "weir.yaml"), reload: make(chan struct{})}
	const file = "reroute: [{name: one, netns: reborn, interface: r0, prefix: 192.0.2.0/24, repairs: [{interface: r1, via: 10.0.1.2}]}]\n"
	if err := os.WriteFile(r.path, []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	create := func() {
		t.Helper()
		ns, err := netns.Create("reborn")
		if err != nil {
			t.Fatal(err)
		}
		defer ns.Close()
		if err := ns.Do(func() error { return addVeths("10.0.0.1/24", "10.0.1.1/24") }); err != nil {
			t.Fatal(err)
		}
	}
	create()
	t.Cleanup(func() { _ = netns.Delete("reborn") })
	r.serving = r.w.serveWith(socketDir(t), ServeOptions{File: r.path, Reload: r.reload})
	nstest.Eventually(t, r.healthy)
	same := func() error {
		if steps := r.w.plan(r.w.config("%s", file)); len(steps) > 0 {
			return fmt.Errorf("apply would %q", steps)
		}
		return nil
	}
	nstest.Eventually(t, same)
	r.remove()
	nstest.Eventually(t, func() error {
		if err := r.healthy(); err == nil || !strings.Contains(err.Error(), "reroute @protect of net:[") {
			return fmt.Errorf("the namespace is away, and %w", err)
		}
		return nil
	})
	create()
	nstest.Eventually(t, r.healthy)
	if err := same(); err != nil {
		t.Error(err)
	}
}

// addVeths adds devices r0, r1 and so on with these addresses to the calling thread's network namespace.
func addVeths(addrs ...string) error {
	for n, text := range addrs {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: fmt.Sprintf("r%d", n)}, PeerName: fmt.Sprintf("p%d", n)}
		if err := netlink.LinkAdd(veth); err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName(veth.Name)
		if err != nil {
			return err
		}
		peer, err := netlink.LinkByName(veth.PeerName)
		if err == nil {
			err = errors.Join(netlink.AddrAdd(l, addr), netlink.LinkSetUp(l), netlink.LinkSetUp(peer))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// A namespace deleted and made again at once, as for a restarted container, gets its filter back without a report
// in /healthz.
func TestInstancesComeBackAtOnce(t *testing.T) {
	r := newReborn(t)
	r.remove()
	r.create()
	nstest.Eventually(t, func() error { return r.unlike(9) })
}

// weir serve uses its file as last applied by weir apply.
func TestInstancesComeBackAsAppliedLast(t *testing.T) {
	r := newReborn(t)
	r.write(10)
	c, err := LoadConfig(r.path)
	if err != nil {
		t.Fatal(err)
	}
	r.w.apply(c)
	r.remove()
	r.create()
	nstest.Eventually(t, func() error { return r.unlike(10) })
}

// An instance removed, or replaced by another file, does not return with its namespace.
func TestInstancesRemovedDoNotComeBack(t *testing.T) {
	for how, change := range map[string]func(r reborn) error{
		"removed":      func(r reborn) error { return r.w.Remove(r.w.t.Context(), "filter", true) },
		"another file": func(r reborn) error { r.w.apply(r.w.config(filterElsewhere, 11)); return nil },
	} {
		t.Run(how, func(t *testing.T) {
			r := newReborn(t)
			if err := change(r); err != nil {
				t.Fatal(err)
			}
			r.remove()
			r.create()
			nstest.Eventually(t, func() error {
				if all, err := r.w.Root.Instances("filter"); err != nil || len(all) > 0 {
					return fmt.Errorf("the filter of the namespace that went is still there: %v, %v", all, err)
				}
				return nil
			})
			nstest.Steadily(t, 3*checkEvery, func() error {
				if err := r.unlike(9); err == nil {
					return errors.New("the filter of the former file is back")
				}
				return r.healthy()
			})
		})
	}
}

// A guard of a service follows the namespace of its members, and waits for them.
func TestGuardComesBackWithItsMember(t *testing.T) {
	nstest.NeedRoot(t)
	needs(t, probe.CgroupIngress, probe.CompareAndSwap, kernel.NetnsCookie)
	w := newWorld(t)
	dir := socketDir(t)
	pidfile, path := filepath.Join(dir, "pid"), filepath.Join(dir, "weir.yaml")
	text := fmt.Sprintf(guardOfMember, pidfile)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	start := func() (end func() error) {
		var p *nstest.Process
		if err := netns.InNew(func() error {
			err := netns.LoopbackUp()
			p = nstest.StartReady(t, child("daemon", "0.0.0.0:4739"))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(pidfile, fmt.Append(nil, p.PID()), 0o600); err != nil {
			t.Fatal(err)
		}
		return p.End
	}
	end := start()
	s := w.serveWith(dir, ServeOptions{File: path})
	guarded := func() error {
		if status, body := s.get("/healthz"); status != http.StatusOK {
			return fmt.Errorf("/healthz: %d %s", status, body)
		}
		if steps := w.plan(w.config("%s", text)); len(steps) > 0 {
			return fmt.Errorf("apply would %q", steps)
		}
		return nil
	}
	nstest.Eventually(t, guarded)
	if err := end(); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		if status, body := s.get("/healthz"); status == http.StatusOK || !strings.Contains(body, "services.telemetry: no member runs") {
			return fmt.Errorf("the member has ended, and /healthz says %d %s", status, body)
		}
		return nil
	})
	here, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	all, err := w.Root.Instances("")
	if err != nil || slices.ContainsFunc(all, func(i kernel.Instance) bool { return i.Scope == kernel.ScopeOf(here) && i.Name == "telemetry" }) {
		t.Errorf("no member runs, and the service is in the namespace of weir serve: %v, %v", all, err)
	}
	start()
	nstest.Eventually(t, guarded)
}
