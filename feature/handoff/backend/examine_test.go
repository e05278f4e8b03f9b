// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestExamineGone checks that doctor reports a backend of a gone network namespace.
func TestExamineGone(t *testing.T) {
	nstest.NeedRoot(t)
	w, root := nstest.NewWire(t), kernel.OpenRoot(nstest.BPFFS+"/backend-gone")
	l, err := root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = w.B.Do(func() error { return applied.Publish(l, Config{Name: "s1"}) })
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("its network namespace net:[%d] is gone", w.B.Inode())
	w.B.Close()
	if err := netns.Delete(w.NameB); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		all, err := Feature{}.Examine(t.Context(), root)
		if err != nil || len(all) != 1 || all[0].Object != "backend s1" || all[0].Text != text || all[0].Remedy == "" || !all[0].Fails {
			return fmt.Errorf("findings %+v, %w, want %q", all, err, text)
		}
		return nil
	})
	if l, err = root.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer l.Unlock()
	if err := (Feature{}).Remove(t.Context(), l); err != nil {
		t.Error(err)
	}
}

// TestExamineAgent checks that doctor reports missing connections of an agent, and nothing about a fully connected
// one.
func TestExamineAgent(t *testing.T) {
	for _, c := range []struct {
		s    Status
		says []string
	}{
		{Status{LB: true, Keeper: true}, nil},
		{Status{LB: true, Keeper: true, LBRejects: "number 1 is backend h1's"}, []string{"rejects it, and sends it no new flows: number 1 is backend h1's"}},
		{Status{Keeper: true}, []string{"not connected to a load balancer"}},
		{Status{}, []string{"not connected to a load balancer", "the keeper does not answer"}},
	} {
		got := examineAgent("backend b", c.s)
		if len(got) != len(c.says) {
			t.Errorf("%+v: %+v, want %q", c.s, got, c.says)
			continue
		}
		for i, f := range got {
			if !strings.Contains(f.Text, c.says[i]) || f.Remedy == "" || f.Object != "backend b" {
				t.Errorf("%+v: %+v, want %q", c.s, f, c.says[i])
			}
		}
	}
}
