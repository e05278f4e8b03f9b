// SPDX-License-Identifier: Apache-2.0

package quarantine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// upgrader upgrades quarantines, like the backend feature.
type upgrader struct{}

// PlanUpgrade implements feature.Upgrader.
func (upgrader) PlanUpgrade(_ context.Context, r *kernel.Root) (feature.Plan, error) {
	return PlanUpgrade(r)
}

// playUpgrade upgrades, and dies at a step.
func playUpgrade(args []string) error {
	kerneltest.DieAt(args[1])
	_, err := featuretest.Upgrade(context.Background(), kernel.OpenRoot(args[0]), upgrader{})
	return err
}

func (r *raw) root() *kernel.Root {
	return kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(r.Name(), "/", "-"))
}

func (r *raw) lock() *kernel.WriteLock {
	r.Helper()
	l, err := r.root().Lock(r.Context())
	if err != nil {
		r.Fatal(err)
	}
	return l
}

// another marks the pins as made by another weir.
func (r *raw) another() {
	r.Helper()
	l := r.lock()
	defer l.Unlock()
	o, err := l.Open(Instance(r.server))
	if err != nil {
		r.Fatal(err)
	}
	defer o.Close()
	names, err := o.Links()
	if err != nil {
		r.Fatal(err)
	}
	o.Meta.Object[0]++
	if err := l.Upgrade(o.Instance, kernel.Upgrade{Meta: o.Meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: names, Swap: func() error { return nil }}); err != nil {
		r.Fatal(err)
	}
}

// programs returns the programs running at the quarantine's devices.
func (r *raw) programs() (out []uint32) {
	r.Helper()
	o, err := r.root().Open(Instance(r.server))
	if err != nil {
		r.Fatal(err)
	}
	defer o.Close()
	names, err := o.Links()
	if err != nil {
		r.Fatal(err)
	}
	for _, name := range names {
		ln, err := o.Link(name)
		if err != nil {
			r.Fatal(err)
		}
		id, err := kernel.LinkProgram(ln)
		ln.Close()
		if err != nil {
			r.Fatal(err)
		}
		out = append(out, id)
	}
	if len(names) > 0 {
		return out
	}
	r.in(r.server, func() error {
		for _, f := range tcFilters([]string{"w0"}, r.quarantine.buffer.Ifindex) {
			id, err := f.Program()
			if err != nil || id == 0 {
				return fmt.Errorf("%s: program %d, %w", f, id, err)
			}
			out = append(out, id)
		}
		return nil
	})
	return out
}

// sharesPairs checks that an ingress program uses the agent's address pairs.
func (r *raw) sharesPairs(program uint32) {
	r.Helper()
	used, err := kernel.OpenProgramMaps(program)
	if err != nil {
		r.Fatal(err)
	}
	id := func(m *ebpf.Map) ebpf.MapID {
		info, err := m.Info()
		if err != nil {
			r.Fatal(err)
		}
		id, _ := info.ID()
		return id
	}
	if m := used["quarantine_pair"]; m != nil && id(m) != id(r.quarantine.pairs) {
		r.Errorf("program %d has other ends of sessions than the agent", program)
	}
	for _, m := range used {
		m.Close()
	}
}

// shuts checks that the quarantine blocks the packets of one session only.
func (r *raw) shuts(when string, port uint16) {
	r.Helper()
	before := r.stopped()
	r.send(packet6(rawBackend, segment(rawClient, rawBackend, port, rawPort), unix.IPPROTO_TCP))
	if r.reset(port, 100*time.Millisecond) {
		r.Errorf("%s: the kernel says reset: the quarantine lets the session's packet pass", when)
	}
	if n := r.stopped() - before; n != 1 {
		r.Errorf("%s: %d packets are stopped, want 1", when, n)
	}
	if r.send(packet6(rawBackend, segment(rawClient, rawBackend, port, rawOther), unix.IPPROTO_TCP)); !r.reset(port, resetTime) {
		r.Errorf("%s: another flow does not pass", when)
	}
}

// TestUpgrade replaces another version's programs while the agent runs. After a kill at any step the quarantine
// holds, and the next upgrade completes.
func TestUpgrade(t *testing.T) {
	for name, tcx := range map[string]bool{"links": true, "filters": false} {
		t.Run(name, func(t *testing.T) {
			if tcx && !hasTCX() {
				t.Skip("need: kernel: tcx (Linux 6.6)")
			}
			r := newRaw(t, tcx)
			const port = 40000
			if err := r.quarantine.Shut(repair.Flow{Local: netip.AddrPortFrom(rawBackend, rawPort), Remote: netip.AddrPortFrom(rawClient, port)}, 1); err != nil {
				t.Fatal(err)
			}
			for step := 0; ; step++ {
				before := r.programs()
				r.another()
				died := kerneltest.Killed(t, nstest.Child("upgrade", r.root().Path(), step))
				r.shuts(fmt.Sprintf("killed at step %d, %q", step, died), port)
				if died != "" {
					r.upgrades(died)
				}
				for _, id := range r.programs() {
					if slices.Contains(before, id) {
						t.Errorf("killed at step %d, %s: program %d runs still", step, died, id)
					}
					r.sharesPairs(id)
				}
				if died == "" {
					if step < 4 {
						t.Errorf("%d steps", step)
					}
					return
				}
			}
		})
	}
}

// upgrades completes an upgrade.
func (r *raw) upgrades(died string) {
	r.Helper()
	if _, err := featuretest.Upgrade(r.Context(), r.root(), upgrader{}); err != nil {
		r.Fatalf("after %s: %v", died, err)
	}
	if plan, err := PlanUpgrade(r.root()); err != nil || len(plan.Steps) > 0 {
		r.Fatalf("after %s: %v, %v; want nothing", died, plan.Steps, err)
	}
}

// TestUpgradeWithoutAgent upgrades without a running agent: the buffer device is gone.
func TestUpgradeWithoutAgent(t *testing.T) {
	r := newRaw(t, hasTCX())
	const port = 40000
	if err := r.quarantine.Shut(repair.Flow{Local: netip.AddrPortFrom(rawBackend, rawPort), Remote: netip.AddrPortFrom(rawClient, port)}, 1); err != nil {
		t.Fatal(err)
	}
	r.quarantine.Close()
	r.another()
	r.upgrades("nothing")
	r.send(packet6(rawBackend, segment(rawClient, rawBackend, port, rawPort), unix.IPPROTO_TCP))
	if r.reset(port, 100*time.Millisecond) {
		t.Error("the kernel says reset: the quarantine lets the session's packet pass")
	}
}
