// SPDX-License-Identifier: Apache-2.0

package feature

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// An unreadable instance is reported, and the others are still recovered.
func TestFollowsTheOthers(t *testing.T) {
	nstest.NeedRoot(t)
	path := nstest.BPFFS + "/" + t.Name()
	for _, name := range []string{"a", "broken", "c"} {
		if err := os.MkdirAll(filepath.Join(path, "4026531840", "test", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var mu sync.Mutex
	adopted := map[string]bool{}
	f := Follower{Feature: "test",
		Lacks: func(_ *kernel.Root, i kernel.Instance, _ func(string, netns.ID)) (bool, error) {
			if i.Name == "broken" {
				return false, errors.New("its pins cannot be read")
			}
			return true, nil
		},
		Adopt: func(_ *kernel.WriteLock, i kernel.Instance) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			if adopted[i.Name] = true; len(adopted) == 2 {
				cancel()
			}
			return "attached", nil
		}}
	if err := f.Run(ctx, kernel.OpenRoot(path), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if !adopted["a"] || !adopted["c"] {
		t.Errorf("adopted %v", adopted)
	}
}

// warnings collects logged warnings.
type warnings [][]any

func (w *warnings) Info(string, ...any) {}

func (w *warnings) Warn(msg string, args ...any) { *w = append(*w, append([]any{msg}, args...)) }

// An unreadable instance is reported once by name, until it becomes readable or the reason changes.
func TestFollowsTellsOnce(t *testing.T) {
	nstest.NeedRoot(t)
	path := nstest.BPFFS + "/" + t.Name()
	for _, name := range []string{"a", "broken"} {
		if err := os.MkdirAll(filepath.Join(path, "4026531840", "test", name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var why error
	var log warnings
	w := &following{root: kernel.OpenRoot(path), log: &log, Follower: Follower{Feature: "test",
		Lacks: func(_ *kernel.Root, i kernel.Instance, _ func(string, netns.ID)) (bool, error) {
			if i.Name == "broken" {
				return false, why
			}
			return false, nil
		}}}
	other, another := errors.New("another ABI"), errors.New("no memory")
	for n, c := range []struct {
		why  error
		told int // total
	}{{nil, 0}, {other, 1}, {other, 1}, {another, 2}, {another, 2}, {nil, 2}, {another, 3}} {
		why = c.why
		if err := w.follow(t.Context()); err != nil {
			t.Fatal(err)
		}
		if len(log) != c.told {
			t.Fatalf("look %d: told %v, want %d", n, log, c.told)
		}
		if c.told > 0 && log[0][0] != "test not followed" || c.told > 0 && log[0][2] != "broken" {
			t.Errorf("look %d: told %v: it does not say whom it is about", n, log[0])
		}
	}
}
