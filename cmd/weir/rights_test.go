// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"golang.org/x/sys/unix"
)

// No thread of weir serve has or can gain a capability unused by its features.
func TestServeDropsRights(t *testing.T) {
	nstest.NeedRoot(t)
	dir := root(t)
	e := begin(t, command("--root", dir, "serve", "--listen", "", "--socket", filepath.Join(t.TempDir(), "weir.sock")))
	e.said.await(t, "keeping sessions")
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", e.Process.Pid))
	if err != nil || len(tasks) < 2 {
		t.Fatalf("%d threads, %v", len(tasks), err)
	}
	for _, path := range tasks {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			kind, value, _ := strings.Cut(line, ":")
			if kind != "CapPrm" && kind != "CapEff" && kind != "CapBnd" && kind != "CapInh" && kind != "CapAmb" {
				continue
			}
			set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			for name, c := range map[string]uint{"SYS_MODULE": unix.CAP_SYS_MODULE, "SYS_RAWIO": unix.CAP_SYS_RAWIO, "SYS_BOOT": unix.CAP_SYS_BOOT, "SYS_TIME": unix.CAP_SYS_TIME,
				"MKNOD": unix.CAP_MKNOD, "SYSLOG": unix.CAP_SYSLOG, "SETFCAP": unix.CAP_SETFCAP, "MAC_ADMIN": unix.CAP_MAC_ADMIN, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE, "SYS_CHROOT": unix.CAP_SYS_CHROOT, "AUDIT_CONTROL": unix.CAP_AUDIT_CONTROL, "LINUX_IMMUTABLE": unix.CAP_LINUX_IMMUTABLE} {
				if set>>c&1 == 1 {
					t.Errorf("%s: %s has %s", path, kind, name)
				}
			}
			if need := uint64(1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_ADMIN); (kind == "CapEff" || kind == "CapBnd") && set&need != need {
				t.Errorf("%s: %s lacks what serve needs: %x", path, kind, set)
			}
		}
	}
	e.term()
}

// A weir serve that can never work exits, and its unit fails.
func TestServeThatCannotWorkEnds(t *testing.T) {
	nstest.NeedRoot(t)
	dir, err := os.MkdirTemp("", "weir-serve")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, "weir.yaml")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(file, []byte("services: {telemetry: {listen: [udp :4739], guard: {limit: 20kpps}}}\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	bpffs := root(t)
	for name, x := range map[string]struct {
		root, told string
		user       uint32
		status     int
	}{
		"without rights":        {bpffs, "run as root", 65534, exitCannot},
		"on no BPF file system": {filepath.Join(dir, "weir"), "not on a BPF file system", 0, exitFailed},
		"without a parent":      {filepath.Join(dir, "absent", "weir"), "not on a BPF file system", 0, exitFailed},
	} {
		t.Run(name, func(t *testing.T) {
			c := command("--root", x.root, "serve", "-f", file, "--only", "guard")
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: x.user, Gid: x.user}}
			e, done := begin(t, c), make(chan error, 1)
			go func() { done <- e.Wait() }()
			select {
			case <-done:
				if status := e.ProcessState.ExitCode(); status != x.status || !strings.Contains(e.said.String(), x.told) {
					t.Errorf("status %d, and it says %q; want %d and %q", status, e.said, x.status, x.told)
				}
			case <-time.After(nstest.Timeout()):
				t.Errorf("it runs on, and says %q", e.said)
			}
		})
	}
}
