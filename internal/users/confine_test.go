// SPDX-License-Identifier: Apache-2.0

package users

import (
	"errors"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	confineMark = "WEIR_TEST_CONFINE"
	serviceUser = 64101
)

// A program of another user inherits no capability of a unit with User= and AmbientCapabilities=.
func TestConfineInheritsNothing(t *testing.T) {
	if os.Getenv(confineMark) != "" {
		confineChild(t)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	if err := os.Chmod(os.Args[0], 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.Open(os.Args[0]) // its directory is root's
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	c := exec.Command("/proc/self/fd/3", "-test.run=^TestConfineInheritsNothing$", "-test.v")
	c.ExtraFiles = []*os.File{self}
	c.Dir = "/"
	c.Env = append(os.Environ(), confineMark+"=1")
	c.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: serviceUser, Gid: serviceUser},
		AmbientCaps: []uintptr{unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN, unix.CAP_SETPCAP},
	}
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if !regexp.MustCompile(set + `:\s+0+\n`).Match(out) {
			t.Errorf("%s is not empty:\n%s", set, out)
		}
	}
}

// confineChild starts a program of user 65534, and prints its capabilities.
func confineChild(t *testing.T) {
	runtime.LockOSThread()
	id, err := Find("65534")
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile("/proc/thread-self/status")
	if err != nil || !regexp.MustCompile(`CapAmb:\s+0*[1-9a-f]`).Match(own) {
		t.Fatalf("no ambient capability at first: %v\n%s", err, own)
	}
	if err := id.Confine(); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/bin/grep", "-E", "^(Uid|Cap(Inh|Prm|Eff|Amb))", "/proc/self/status")
	c.SysProcAttr = id.SysProcAttr()
	c.Dir = "/"
	out, err := c.CombinedOutput()
	if err != nil || !regexp.MustCompile(`Uid:\s+65534`).Match(out) {
		t.Fatal(errors.Join(err, errors.New(string(out))))
	}
	_, _ = os.Stdout.Write(out)
}
