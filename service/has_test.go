// SPDX-License-Identifier: Apache-2.0

package service

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func TestMemberHas(t *testing.T) {
	file := func(pid int) string {
		name := filepath.Join(t.TempDir(), "pid")
		if err := os.WriteFile(name, []byte(strconv.Itoa(pid)), 0o644); err != nil {
			t.Fatal(err)
		}
		return name
	}
	own, parent := os.Getpid(), os.Getppid()
	for _, c := range []struct {
		m          Member
		pid        int
		has, known bool
	}{
		{Member{PID: own}, own, true, true},
		{Member{PID: parent}, own, true, true}, // a worker of the named process
		{Member{PID: own}, parent, false, true},
		{Member{PIDFile: file(own)}, own, true, true},
		{Member{PIDFile: file(own)}, parent, false, true},
		{Member{PIDFile: "/nowhere/pid"}, own, false, false},
		{Member{User: strconv.Itoa(os.Geteuid())}, own, true, true},
		{Member{User: "65533"}, own, false, true},
		{Member{PID: 1 << 30}, own, false, false},
	} {
		if has, known := c.m.Has(c.pid); has != c.has || known != c.known {
			t.Errorf("%s has %d: %t, known %t; want %t, %t", c.m, c.pid, has, known, c.has, c.known)
		}
	}
	if got := (Member{PID: own}).Occupant(parent); got == "" || (Member{PID: own}).Occupant(own) != "" || (Member{PID: 1 << 30}).Occupant(own) != "" {
		t.Errorf("holder %s", fmt.Sprintf("%q", got))
	}
}
