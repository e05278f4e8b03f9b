// SPDX-License-Identifier: Apache-2.0

// Package nstest gives tests their own network namespaces and BPF file systems. So they bind any
// port, pin any path and leave nothing behind.
package nstest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/netns"
)

// BPFFS is the path of a test's private BPF file system.
const BPFFS = "/sys/fs/bpf"

// names is the directory of named network namespaces. Each test has its own.
const names = "/run/netns"

// run is weir's directory of sockets, records its directory of records of pins. Each package's tests have their own
// run, and each test after [Enter] its own records: goroutines of a test answer at sockets.
const (
	run     = "/run/weir"
	records = "/run/weir/records"
)

// childEnv marks the process inside Main's namespaces.
const childEnv = "WEIR_NSTEST_CHILD"

// The main goroutine keeps the main thread, so no test runs on it. Enter would move the thread to
// another namespace for good, and /proc/self shows the main thread.
func init() { runtime.LockOSThread() }

// Main runs a package's tests in one new network and mount namespace, with lo up, a private bpffs
// and no named namespaces. It executes the test binary once more. Unlike after [Enter], all
// goroutines and child processes of the tests are inside. Use it as
//
//	func TestMain(m *testing.M) { nstest.Main(m) }
//
// Without root the tests run in the current namespaces. Tests calling Enter or NeedRoot then skip.
func Main(m *testing.M) {
	Play(nil) // plays this package's roles; for others it fails instead of running the tests again
	if os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(childEnv) != "" {
		// A test that starts this binary again needs the same behaviour.
		os.Unsetenv(childEnv)
		if err := furnish(run); err != nil {
			fmt.Fprintln(os.Stderr, "nstest:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	os.Exit(reexec())
}

func reexec() int {
	c := exec.Command("/proc/self/exe", os.Args[1:]...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	c.Env = append(os.Environ(), childEnv+"=1")
	c.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:    unix.SIGKILL,
	}
	// The death signal depends on the starting thread, not on the process.
	runtime.LockOSThread()
	err := c.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() >= 0 {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "nstest:", err)
		return 1
	}
	return 0
}

// Enter moves the calling test to its own network and mount namespace, with lo up, an empty bpffs
// on [BPFFS] and no named namespaces. They belong to the test's thread and vanish with it at the
// end of the test. Goroutines started by the test are outside. Code that needs a goroutine (an HTTP
// client, a dial with several addresses) runs through do. It calls f on another thread inside the
// same namespaces. Do not call Enter in parallel subtests of one goroutine, or twice.
func Enter(t testing.TB) (do func(f func())) {
	t.Helper()
	NeedRoot(t)
	// Never unlocked: the runtime then ends the thread with the test.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		t.Fatalf("nstest: unshare: %v", err)
	}
	if err := furnish(records); err != nil {
		t.Fatalf("nstest: %v", err)
	}
	ns, err := netns.Current()
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	return func(f func()) {
		if err := ns.Do(func() error { f(); return nil }); err != nil {
			t.Errorf("nstest: %v", err)
		}
	}
}

// NeedRoot skips the test without root. CI runs as root and treats such a skip as a failure.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("need: root, for namespaces and BPF; run the tests with sudo")
	}
}

// furnished is the set of mount namespaces created by this package.
var furnished sync.Map // inode number of the namespace, uint64 → true

func mountNamespace() (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat("/proc/thread-self/ns/mnt", &st)
	return st.Ino, err
}

// furnish prepares the new namespaces of the calling thread. own is the directory of weir with new contents.
func furnish(own string) error {
	// Later mounts must not reach the rest of the machine.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make / private: %w", err)
	}
	if err := unix.Mount("bpf", BPFFS, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w", BPFFS, err)
	}
	// Named namespaces are files under /run/netns. A killed test must not leave its names on the
	// machine.
	if err := os.MkdirAll(names, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", names, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", names, err)
	}
	if err := os.MkdirAll(own, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", own, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", own, err)
	}
	ns, err := mountNamespace()
	if err != nil {
		return err
	}
	furnished.Store(ns, true)
	return netns.LoopbackUp()
}
