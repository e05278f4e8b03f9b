// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"log/slog"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// playRemove applies a file without a backend, and dies at a step.
func playRemove(args []string) error {
	kerneltest.DieAtKind(args[1])
	return planned(kernel.OpenRoot(args[0]), Config{})
}

// planned applies c as the backend of the caller's network namespace.
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

// TestKilledRemoval kills the removal of a backend at any step. The next apply completes it.
func TestKilledRemoval(t *testing.T) {
	nstest.NeedRoot(t)
	client, server := nstest.NewNetns(t), nstest.NewNetns(t)
	nstest.Cable(t, client, "w0", server, "w0")
	root := kernel.OpenRoot(nstest.BPFFS + "/" + t.Name())
	in := func(f func() error) {
		t.Helper()
		if err := server.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	between := false
	for step := 0; ; step++ {
		q, err := quarantine.Open(t.Context(), root, server, []string{"w0"}, slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err != nil {
			t.Fatal(err)
		}
		q.Close()
		l, err := root.Lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		in(func() error { return applied.Publish(l, Config{Name: "test"}) })
		l.Unlock()
		died := ""
		in(func() error {
			died = kerneltest.Killed(t, nstest.Child("remove", root.Path(), step))
			return planned(root, Config{})
		})
		between = between || died == "backend:removed"
		if all, err := root.Instances(""); err != nil || len(all) > 0 {
			t.Fatalf("killed at step %d, %s: left are %v, %v", step, died, all, err)
		}
		if died == "" {
			break
		}
	}
	if !between {
		t.Error("it was never killed between the quarantine and the spec")
	}
}
