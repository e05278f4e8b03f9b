// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

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

// The owner of the records can name any path there. weir serve of root creates no directory for one: without a user
// other than root, such a directory would vanish again, so the test follows the creations.
func TestSweepCreatesNothing(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	tool := filepath.Join(nstest.BPFFS, "tool")
	if err := os.Mkdir(tool, 0o700); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tool)
	seen, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(seen)
	if _, err := unix.InotifyAddWatch(seen, tool, unix.IN_CREATE); err != nil {
		t.Fatal(err)
	}
	device := func() uint64 {
		st, err := os.Stat(tool)
		if err != nil {
			t.Fatal(err)
		}
		return st.Sys().(*syscall.Stat_t).Dev
	}()
	// Names of a root below a present directory and of one below missing ones, without and with records of this boot.
	for _, path := range []string{"/evil", "/new/deep/evil", "/recorded", "/new/recorded"} {
		dir := filepath.Join(kernel.RecordDir, url.PathEscape(tool+path))
		defer os.RemoveAll(dir)
		if filepath.Base(path) == "recorded" {
			dir = filepath.Join(dir, fmt.Sprintf("%d-%.8s", device, kernel.BootID()))
		}
		if err := errors.Join(os.MkdirAll(dir, 0o750), os.WriteFile(filepath.Join(dir, "+root"), []byte("{}"), 0o640)); err != nil {
			t.Fatal(err)
		}
	}
	w.sweepRecords(t.Context())
	if n, err := unix.Read(seen, make([]byte, 4096)); n > 0 || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("a directory was created below %s (%d bytes of events, %v)", tool, n, err)
	}
	for _, path := range []string{"/recorded", "/new/recorded"} {
		if _, err := os.Stat(filepath.Join(kernel.RecordDir, url.PathEscape(tool+path))); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the empty records of %s are left: %v", tool+path, err)
		}
	}
}
