// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// weir serve removes the records of roots that are gone with their namespaces. It keeps a root recoverable by weir
// apply.
func TestServeSweepsRecords(t *testing.T) {
	nstest.NeedRoot(t)
	base := filepath.Join(nstest.BPFFS, "sweep")
	recorded := func(root string) bool {
		_, err := os.Stat(filepath.Join(kernel.RecordDir, url.PathEscape(root)))
		return !errors.Is(err, fs.ErrNotExist)
	}
	namespace := func(name string) *netns.Handle {
		t.Helper()
		ns, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		return ns
	}
	// root makes a root with a service in a namespace, like the lab's roots below a directory of their own.
	root := func(name, ns string) string {
		t.Helper()
		h := New(filepath.Join(base, name))
		if err := os.MkdirAll(base, 0o700); err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("services:\n  telemetry: {listen: [udp 0.0.0.0:4739], netns: %s, steer: {slots: 1}}\n", ns)
		c, err := ParseConfig("weir.yaml", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		c.AllowOutage = true
		if err := h.Apply(t.Context(), c, func(Done) {}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(filepath.Join(kernel.RecordDir, url.PathEscape(h.Root.Path()))) })
		return h.Root.Path()
	}
	gone, lives := namespace("gone"), namespace("lives")
	defer func() { lives.Close(); _ = netns.Delete("lives") }()
	swept, killed, empty := root("swept", "gone"), root("killed", "gone"), filepath.Join(base, "empty")
	stays := root("stays", "lives")
	for _, path := range []string{killed, empty} { // each had a killed weir serve
		dir := filepath.Join(kernel.RecordDir, url.PathEscape(path))
		if err := errors.Join(os.MkdirAll(dir, 0o750), os.WriteFile(filepath.Join(dir, "+serve"), []byte("1\n"), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	gone.Close()
	if err := errors.Join(netns.Delete("gone"), os.RemoveAll(base)); err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	w.serve()
	nstest.Eventually(t, func() error {
		for _, path := range []string{swept, killed, empty} {
			if recorded(path) {
				return fmt.Errorf("%s is recorded", path)
			}
		}
		if _, err := os.Stat(base); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a directory for pins is left: %v", err)
		}
		return nil
	})
	if !recorded(stays) {
		t.Error("a root that can be recovered is forgotten")
	}
}
