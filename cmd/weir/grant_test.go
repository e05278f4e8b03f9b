// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel/probe"
)

// A program of another user gets neither the caller's terminal, where it could type commands for the caller's shell, nor
// the caller's open descriptors.
func TestGrantHandsOnNothingElse(t *testing.T) {
	nstest.NeedRoot(t)
	if err := probe.CompareAndSwap.Check(); err != nil {
		t.Skip("need: kernel:", err)
	}
	weir := filepath.Join(buildWeir(t), "weir")
	tty := nstest.NewPTY(t, 80)
	script := `exec 8</etc/hostname 9</etc/hostname
"$0" guard grant --limit 1kpps --user 65534 -- sh -c '
	(: </dev/tty) 2>/dev/null && echo it has the terminal
	for fd in /proc/self/fd/*; do echo "$(basename "$fd") $(readlink "$fd")"; done'
: the shell stays, so weir is no session leader`
	var out strings.Builder
	c := exec.Command("sh", "-c", script, weir)
	c.Dir = "/"
	c.Stdin, c.Stdout, c.Stderr = tty.File, &out, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := c.Run(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	if strings.Contains(out.String(), "terminal") {
		t.Error("the program has the terminal of the caller's shell")
	}
	grants := 0
	for line := range strings.Lines(out.String()) {
		fd, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case strings.HasPrefix(what, "anon_inode:bpf"):
			grants++
		case strings.Contains(what, "hostname"):
			t.Errorf("descriptor %s is open: %s", fd, what)
		}
	}
	if grants != 2 {
		t.Errorf("%d descriptors of the grant in\n%s", grants, out.String())
	}
}
