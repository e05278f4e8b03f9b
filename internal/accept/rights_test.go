// SPDX-License-Identifier: Apache-2.0

package accept_test

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/nstest"
)

func TestPermit(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	socket, secret := filepath.Join(dir, "socket"), filepath.Join(dir, "shadow")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := accept.Permit(socket, 1234, 0o660); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(socket)
	if err != nil {
		t.Fatal(err)
	}
	if gid := st.Sys().(*syscall.Stat_t).Gid; st.Mode().Perm() != 0o660 || gid != 1234 {
		t.Errorf("%v, group %d", st.Mode(), gid)
	}
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, replace := range map[string]func() error{
		"a link": func() error { return os.Symlink(secret, socket) },
		"a file": func() error { return os.Link(secret, socket) },
	} {
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		if err := replace(); err != nil {
			t.Fatal(err)
		}
		if err := accept.Permit(socket, 1234, 0o666); err == nil || !strings.Contains(err.Error(), "it was replaced") {
			t.Errorf("%s: %v", name, err)
		}
		if st, err := os.Stat(secret); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: the file behind it is %v now, %v", name, st.Mode(), err)
		}
	}
}
