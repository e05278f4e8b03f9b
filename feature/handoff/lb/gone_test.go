// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// TestNamespaceGoes checks that a load balancer of a deleted network namespace is reported, and
// removed with the socket of its killed agent.
func TestNamespaceGoes(t *testing.T) {
	nstest.NeedRoot(t)
	if err := kernel.Require(Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	w, root := nstest.NewWire(t), kernel.OpenRoot(nstest.BPFFS+"/lb-gone")
	do(t, w.B, func() error {
		f, err := Open(t.Context(), root, "edge", Options{Devices: []string{nstest.WireDevice}})
		if err == nil {
			f.Close()
		}
		return err
	})
	socket := control.Path(controlName(kernel.ScopeOf(w.B), "edge"))
	if err := os.MkdirAll("/run/weir", 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	text := fmt.Sprintf("its network namespace net:[%d] is gone", w.B.Inode())
	w.B.Close()
	if err := netns.Delete(w.NameB); err != nil {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		all, err := Statuses(t.Context(), root)
		if err != nil || len(all) != 1 || !all[0].Gone {
			return fmt.Errorf("%+v, %v", all, err)
		}
		return nil
	})
	findings, err := Feature{}.Examine(t.Context(), root)
	if err != nil || len(findings) != 1 || findings[0].Object != "load balancer edge" || !strings.HasPrefix(findings[0].Text, text) || findings[0].Remedy == "" || !findings[0].Fails {
		t.Errorf("findings %+v, %v, want %q", findings, err, text)
	}
	lock, err := root.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	if err := (Feature{}).Remove(t.Context(), lock); err != nil {
		t.Error(err)
	}
	if all, err := Instances(root); err != nil || len(all) > 0 {
		t.Errorf("removed, and there is still %v, %v", all, err)
	}
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("removed, and the socket is still there: %v", err)
	}
}
