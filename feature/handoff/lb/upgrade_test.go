// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/handoff/lb/attachment"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// playUpgrade upgrades and dies at a step.
func playUpgrade(args []string) error {
	kerneltest.DieAt(args[1])
	_, err := featuretest.Upgrade(context.Background(), kernel.OpenRoot(args[0]), Feature{})
	return err
}

// playRemove applies a file without a load balancer and dies at a step.
func playRemove(args []string) error {
	kerneltest.DieAtKind(args[1])
	return planned(kernel.OpenRoot(args[0]), Config{})
}

// planned applies a configuration to the caller's network namespace.
func planned(root *kernel.Root, c Config) error {
	_, err := featuretest.ApplyPlan(context.Background(), root, Feature{}.Recover, func() (feature.Plan, error) {
		have, err := Feature{}.State(context.Background(), root)
		if err != nil {
			return feature.Plan{}, err
		}
		return Feature{}.Plan(context.Background(), have, c)
	})
	return err
}

func (s *scene) lock(t *testing.T, root *kernel.Root) *kernel.WriteLock {
	t.Helper()
	l, err := root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// another records another version's object in the pins.
func (s *scene) another(t *testing.T, root *kernel.Root) {
	t.Helper()
	l := s.lock(t, root)
	defer l.Unlock()
	o, err := l.Open(instanceKey(s.middle, "test"))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	names, err := o.Links()
	if err != nil {
		t.Fatal(err)
	}
	o.Meta.Object[0]++
	if err := l.Upgrade(o.Instance, kernel.Upgrade{Meta: o.Meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: names, Swap: func() error { return nil }}); err != nil {
		t.Fatal(err)
	}
}

// programs returns the ids of the load balancer's attached programs.
func (s *scene) programs(t *testing.T, root *kernel.Root) (out []uint32) {
	t.Helper()
	o, err := root.Open(instanceKey(s.middle, "test"))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	names, err := o.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		ln, err := o.Link(name)
		if err != nil {
			t.Fatal(err)
		}
		id, err := kernel.LinkProgram(ln)
		ln.Close()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, id)
	}
	if len(names) > 0 {
		return out
	}
	do(t, s.middle, func() error {
		for _, f := range attachment.Filters(s.devices, s.f.buffer.Ifindex) {
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

// sharesRing requires that a program reports learned flows to the agent's ring buffer.
func (s *scene) sharesRing(t *testing.T, program uint32) {
	t.Helper()
	used, err := kernel.OpenProgramMaps(program)
	if err != nil {
		t.Fatal(err)
	}
	defer closeMaps(used)
	id := func(m *ebpf.Map) ebpf.MapID {
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		return id
	}
	if used[attachment.LearnedName] == nil || id(used[attachment.LearnedName]) != id(s.f.maps.LbLearned) {
		t.Errorf("program %d has another ring of learned flows than the agent", program)
	}
}

// TestUpgrade checks that another version's programs are replaced under traffic while the agent
// runs. After a kill at any step flows continue, and the next upgrade finishes.
func TestUpgrade(t *testing.T) {
	for name, tcx := range map[string]bool{"links": true, "filters": false} {
		t.Run(name, func(t *testing.T) {
			if !tcx {
				was := hasTCX
				hasTCX = func() bool { return false }
				defer func() { hasTCX = was }()
			} else if !hasTCX() {
				t.Skip("need: kernel: tcx (Linux 6.6)")
			}
			sc, root := published(t)
			c, k, owner, _ := session(t, sc)
			for step := 0; ; step++ {
				before := sc.programs(t, root)
				sc.another(t, root)
				died := kerneltest.Killed(t, nstest.Child("upgrade", root.Path(), step))
				if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
					t.Fatalf("killed at step %d, %s: %q, %v", step, died, got, err)
				}
				if died != "" {
					sc.upgrades(t, root, died)
				}
				for _, id := range sc.programs(t, root) {
					if slices.Contains(before, id) {
						t.Errorf("killed at step %d, %s: program %d runs still", step, died, id)
					}
					sc.sharesRing(t, id)
				}
				if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner {
					t.Fatalf("killed at step %d, %s: %+v, %v", step, died, fl, err)
				}
				if died == "" {
					if step < 5 {
						t.Errorf("%d steps", step)
					}
					return
				}
			}
		})
	}
}

// upgrades finishes an upgrade.
func (s *scene) upgrades(t *testing.T, root *kernel.Root, died string) {
	t.Helper()
	if _, err := featuretest.Upgrade(t.Context(), root, Feature{}); err != nil {
		t.Fatalf("after %s: %v", died, err)
	}
	if plan, err := (Feature{}).PlanUpgrade(t.Context(), root); err != nil || len(plan.Steps) > 0 {
		t.Fatalf("after %s: %v, %v; want nothing", died, plan.Steps, err)
	}
}

// TestKilledRemoval checks that the next apply finishes a removal killed at any step.
func TestKilledRemoval(t *testing.T) {
	sc, root := published(t)
	between := false
	for step := 0; ; step++ {
		l := sc.lock(t, root)
		do(t, sc.middle, func() error { return applied.Publish(l, Config{Name: "test"}) })
		l.Unlock()
		sc.f.Close()
		died := ""
		do(t, sc.middle, func() error {
			died = kerneltest.Killed(t, nstest.Child("remove", root.Path(), step))
			return planned(root, Config{})
		})
		between = between || died == "lb:removed"
		if all, err := root.Instances(""); err != nil || len(all) > 0 {
			t.Fatalf("killed at step %d, %s: left are %v, %v", step, died, all, err)
		}
		do(t, sc.middle, func() error {
			if _, err := net.InterfaceByName("weir-lb-buffer"); err == nil {
				return fmt.Errorf("killed at %s: the device of buffered packets is left", died)
			}
			return nil
		})
		sc.open(t, root)
		if died == "" {
			break
		}
	}
	if !between {
		t.Error("it was never killed between the data path and the spec")
	}
}

// TestRemoveForgetsDamaged checks that removal forgets a load balancer with lost pins.
func TestRemoveForgetsDamaged(t *testing.T) {
	sc, root := published(t)
	sc.f.Close()
	inst := instanceKey(sc.middle, "test")
	if err := os.RemoveAll(filepath.Join(root.Path(), inst.Scope, inst.Feature, inst.Name)); err != nil {
		t.Fatal(err)
	}
	faults := func() (out []kernel.Fault) {
		t.Helper()
		out, err := root.Check()
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	if len(faults()) == 0 {
		t.Fatal("the loss of the pins is not noticed")
	}
	l := sc.lock(t, root)
	err := Feature{}.Remove(t.Context(), l)
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	if left := faults(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	do(t, sc.middle, func() error { return removeDevices(Options{}.filled()) })
	sc.open(t, root)
}
