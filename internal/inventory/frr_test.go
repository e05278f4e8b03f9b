// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// Any user can run a program named bfdd. vtysh of root does not connect to it.
func TestForeignBFDD(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	c := exec.Command("/bin/cat")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); _ = c.Wait() }()
	if _, err := readFRR(t.Context(), c.Process.Pid); err == nil || !strings.Contains(err.Error(), "runs as user 65534") {
		t.Error(err)
	}
	if err := checkFRR(os.Getpid()); err != nil {
		t.Error(err)
	}
}

func TestAnswerLimit(t *testing.T) {
	var a answer
	c := exec.Command("/usr/bin/yes")
	c.Stdout = &a
	if err := c.Run(); err == nil || len(a.text) > maxAnswer {
		t.Errorf("%d bytes, %v", len(a.text), err)
	}
}
