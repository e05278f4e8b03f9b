// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

func create(t *testing.T, name string) *netns.Handle {
	t.Helper()
	h, err := netns.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		if err := netns.Delete(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return h
}

func open(t *testing.T, ref string) *netns.Handle {
	t.Helper()
	h, err := netns.Open(ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

func TestCurrent(t *testing.T) {
	h, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	link, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if h.String() != link || link != fmt.Sprintf("net:[%d]", h.Inode()) {
		t.Errorf("String() = %q, Inode() = %d, want those of %q", h, h.Inode(), link)
	}
	for _, ref := range []string{"", fmt.Sprintf("pid:%d", os.Getpid()), "/proc/self/ns/net"} {
		if o := open(t, ref); !h.Same(o) {
			t.Errorf("Open(%q) is %s, want %s", ref, o, h)
		}
	}
}

func TestNamed(t *testing.T) {
	nstest.NeedRoot(t)
	h := create(t, "nt-named")
	if got, want := h.String(), fmt.Sprintf("net:[%d] nt-named", h.Inode()); got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
	for _, ref := range []string{"nt-named", "/run/netns/nt-named"} {
		if o := open(t, ref); !h.Same(o) {
			t.Errorf("Open(%q) is %s, want %s", ref, o, h)
		}
	}
	if h.Same(open(t, "")) {
		t.Error("the new namespace is the current one")
	}
	names, err := netns.Names()
	if err != nil || !slices.Contains(names, "nt-named") {
		t.Errorf("Names() = %q, %v; want nt-named among them", names, err)
	}
	if _, err := netns.Create("nt-named"); !errors.Is(err, os.ErrExist) {
		t.Errorf("second Create: %v, want ErrExist", err)
	}
	if err := netns.Delete("nt-named"); err != nil {
		t.Fatal(err)
	}
	if _, err := netns.Open("nt-named"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open after Delete: %v, want ErrNotExist", err)
	}
	if err := netns.Delete("nt-named"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("second Delete: %v, want ErrNotExist", err)
	}
	// The handle still works without the name.
	if err := h.Do(func() error { return nil }); err != nil {
		t.Error(err)
	}
}

// TestIPRoute2 checks that iproute2 sees namespaces made by Create, and Open the namespaces of iproute2.
func TestIPRoute2(t *testing.T) {
	nstest.NeedRoot(t)
	ip, err := exec.LookPath("ip")
	if err != nil {
		t.Skip("need: tool ip (iproute2)")
	}
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(ip, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("ip %q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	h := create(t, "nt-ours")
	if out := run("netns", "exec", "nt-ours", "readlink", "/proc/self/ns/net"); !strings.HasPrefix(h.String(), strings.TrimSpace(out)) {
		t.Errorf("ip netns exec is in %q, want %s", out, h)
	}
	run("netns", "delete", "nt-ours")
	run("netns", "add", "nt-theirs")
	o := open(t, "nt-theirs")
	if out := run("netns", "exec", "nt-theirs", "readlink", "/proc/self/ns/net"); !strings.HasPrefix(o.String(), strings.TrimSpace(out)) {
		t.Errorf("ip netns exec is in %q, want %s", out, o)
	}
	if err := netns.Delete("nt-theirs"); err != nil {
		t.Error(err)
	}
}

func TestOpenErrors(t *testing.T) {
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ref  string
		want error
		text string
	}{
		{"nt-absent", os.ErrNotExist, "ip netns list"},
		{"/nt/absent", os.ErrNotExist, "/nt/absent"},
		{plain, netns.ErrNotNetns, plain},
		{"/proc/self/ns/mnt", netns.ErrNotNetns, "not a network namespace"},
		{"pid:4194305", os.ErrNotExist, "no such process"}, // above the largest pid
		{"pid:x", nil, "pid:4711"},
		{"pid:-1", nil, "pid:4711"},
		{"a/b", nil, "without slashes"},
		{"..", nil, "not a valid name"},
	} {
		h, err := netns.Open(c.ref)
		if err == nil {
			h.Close()
			t.Errorf("Open(%q) succeeded", c.ref)
			continue
		}
		if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("Open(%q): %v; want %v with %q", c.ref, err, c.want, c.text)
		}
	}
	for _, name := range []string{"", ".", "..", "a/b", "a\x00b", strings.Repeat("x", 256)} {
		if _, err := netns.Create(name); err == nil {
			t.Errorf("Create(%q) succeeded", name)
		}
		if err := netns.Delete(name); err == nil {
			t.Errorf("Delete(%q) succeeded", name)
		}
	}
}

// TestStaleName checks that a file without a mount, as left by a reboot, is reported and can be
// deleted.
func TestStaleName(t *testing.T) {
	nstest.NeedRoot(t)
	if err := os.WriteFile("/run/netns/nt-stale", nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if _, err := netns.Open("nt-stale"); !errors.Is(err, netns.ErrNotNetns) {
		t.Errorf("Open: %v, want ErrNotNetns", err)
	}
	if err := netns.Delete("nt-stale"); err != nil {
		t.Error(err)
	}
}

func TestDo(t *testing.T) {
	nstest.NeedRoot(t)
	h := create(t, "nt-do")
	before := open(t, "")
	var tid int
	var l net.Listener
	err := h.Do(func() (err error) {
		tid = unix.Gettid()
		inside, err := netns.Current()
		if err != nil {
			return err
		}
		defer inside.Close()
		if !inside.Same(h) {
			t.Errorf("inside Do: %s, want %s", inside, h)
		}
		// lo is up: otherwise this bind would work but the dial below would fail.
		l, err = net.Listen("tcp4", "127.0.0.1:0")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if !open(t, "").Same(before) {
		t.Error("Do left the caller in another namespace")
	}
	if tid == os.Getpid() {
		t.Error("Do used the main thread")
	}
	if c, err := net.Dial("tcp4", l.Addr().String()); err == nil {
		c.Close()
		t.Error("the listener in the namespace answers outside")
	}
	err = h.Do(func() error {
		c, err := net.Dial("tcp4", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	})
	if err != nil {
		t.Errorf("dial inside: %v", err)
	}
}

// TestDoSparesMainThread checks that Do never uses the main thread, because other programs read our
// namespace from it.
func TestDoSparesMainThread(t *testing.T) {
	nstest.NeedRoot(t)
	h := create(t, "nt-main")
	main, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	defer main.Close()
	for range 200 {
		if err := h.Do(func() error {
			if unix.Gettid() == os.Getpid() {
				return errors.New("on the main thread")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if now := open(t, "/proc/self/ns/net"); !now.Same(main) {
		t.Errorf("the main thread is in %s, was in %s", now, main)
	}
}

func TestDoEnds(t *testing.T) {
	nstest.NeedRoot(t)
	h := create(t, "nt-ends")
	want := errors.New("an error of f")
	if err := h.Do(func() error { return want }); err != want {
		t.Errorf("Do returned %v, want f's error", err)
	}
	if err := h.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("Do returned nil though f never returned")
	}
	func() {
		defer func() {
			if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "a bug in f") {
				t.Errorf("recovered %v, want the panic of f", r)
			}
		}()
		_ = h.Do(func() error { panic("a bug in f") })
	}()
	// Threads end asynchronously.
	nstest.Eventually(t, func() error {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil || len(threads) > 60 {
			return fmt.Errorf("%d threads, %v: Do does not end them", len(threads), err)
		}
		return nil
	})
}

// TestDoKeepsMounts checks that a test with private mounts has them inside Do.
func TestDoKeepsMounts(t *testing.T) {
	nstest.NeedRoot(t)
	h := create(t, "nt-mounts")
	t.Run("private", func(t *testing.T) {
		nstest.Enter(t) // unshares the mounts of this thread
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }) // or TempDir cannot be removed
		if err := os.WriteFile(dir+"/mark", nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := h.Do(func() error { _, err := os.Stat(dir + "/mark"); return err }); err != nil {
			t.Errorf("inside Do: %v", err)
		}
	})
}

func TestCookie(t *testing.T) {
	nstest.NeedRoot(t)
	a, b := create(t, "nt-cookie-a"), create(t, "nt-cookie-b")
	ca, err := a.Cookie()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("need: kernel 5.14 (SO_NETNS_COOKIE)")
	}
	if err != nil {
		t.Fatal(err)
	}
	cb, err := b.Cookie()
	if err != nil {
		t.Fatal(err)
	}
	again, err := open(t, "nt-cookie-a").Cookie()
	if err != nil {
		t.Fatal(err)
	}
	if ca == 0 || ca == cb || ca != again {
		t.Errorf("cookies: a %d, b %d, a again %d; want the first and last equal, none zero", ca, cb, again)
	}
}

func BenchmarkDo(b *testing.B) {
	nstest.NeedRoot(b)
	h, err := netns.Current()
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	for b.Loop() {
		if err := h.Do(func() error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}
