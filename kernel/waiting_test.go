// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// A waiting process is told the holder of the lock.
func TestWaitIsTold(t *testing.T) {
	r := newRoot(t)
	p, end := holder(t, r)
	told := make(chan string, 1)
	OnWait(func(text string) { told <- text })
	defer OnWait(nil)
	got := make(chan error)
	go func() {
		l, err := r.Lock(t.Context())
		if err == nil {
			l.Unlock()
		}
		got <- err
	}()
	if text := <-told; !strings.Contains(text, "waiting for the lock on "+r.path+", held by process "+fmt.Sprint(p.PID())+" (") {
		t.Errorf("told %q", text)
	}
	end()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// A probe without descriptors or memory reports nothing about the kernel.
func TestScarcityIsNoOldKernel(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{{unix.EMFILE, "ulimit -n"}, {unix.ENFILE, "fs.file-max"}, {unix.ENOMEM, "memory"}} {
		n := Need{Name: "x", Since: "5.9", Remedy: "use a newer kernel", Probe: func() error { return fmt.Errorf("probing: %w", c.err) }}
		err := n.Check()
		if errors.Is(err, ErrUnsupported) || !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "newer kernel") {
			t.Errorf("%v: %v", c.err, err)
		}
		if err := explainLoad("load x", &ebpf.VerifierError{Cause: c.err}); strings.Contains(err.Error(), "by the kernel's verifier") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.err, err)
		}
		if s := n.RemedyFor(c.err); !strings.Contains(s, c.want) {
			t.Errorf("%v: remedy %q", c.err, s)
		}
	}
	if err := (Need{Name: "x", Since: "5.9", Probe: func() error { return unix.EINVAL }}).Check(); !errors.Is(err, ErrUnsupported) {
		t.Errorf("a need that is missing: %v", err)
	}
}

// playBare is root without capabilities.
func playBare([]string) error {
	runtime.LockOSThread()
	var none [2]unix.CapUserData
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
		return err
	}
	fmt.Println(XDPProgram.Check())
	_, err := Load(twoPrograms(), []string{"uses_a"}, nil)
	fmt.Println(err)
	return nil
}

// Root of a container is told the missing capability, not to become root.
func TestRootWithoutCapabilities(t *testing.T) {
	nstest.NeedRoot(t)
	out, err := nstest.Child("bare").Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("%v: %s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if !strings.Contains(line, "is root and lacks CAP_BPF") || strings.Contains(line, "run as root") {
			t.Errorf("line %d: %s", i, line)
		}
	}
}

// Two processes serving one root detect each other. An ended process does not count.
func TestClaimServing(t *testing.T) {
	r := newRoot(t)
	release, other := r.ClaimServing()
	if other != "" {
		t.Fatalf("nobody serves, and there is %s", other)
	}
	again, other := r.ClaimServing()
	if want := fmt.Sprintf("process %d (", unix.Getpid()); !strings.HasPrefix(other, want) {
		t.Errorf("%q serves, want %q", other, want)
	}
	again()
	release()
	release, other = r.ClaimServing()
	if other != "" {
		t.Errorf("released, and there is %s", other)
	}
	release()
	if _, err := os.Stat(r.recordsPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("ended, and the directory of records is there: %v", err)
	}
}

// A killed weir serve leaves its file. The file is removed with the last record.
func TestServingOfKilled(t *testing.T) {
	r := newRoot(t)
	l := lock(t, r)
	if err := publish(l, instance, 1); err != nil {
		t.Fatal(err)
	}
	release, _ := r.ClaimServing()
	path := filepath.Join(r.recordsPath(), servingName)
	if err := l.Remove(instance); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a weir serve runs, and its file is gone: %v", err)
	}
	release()
	l = lock(t, r)
	if err := errors.Join(publish(l, instance, 1), os.WriteFile(path, []byte("1\n"), 0o640), l.Remove(instance)); err != nil {
		t.Fatal(err)
	}
	l.Unlock()
	if _, err := os.Stat(r.recordsPath()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of records without any: %v", err)
	}
}
