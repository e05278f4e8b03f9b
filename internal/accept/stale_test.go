// SPDX-License-Identifier: Apache-2.0

package accept_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/accept"
)

func TestRemoveStale(t *testing.T) {
	dir := t.TempDir()
	socket, file, link := filepath.Join(dir, "socket"), filepath.Join(dir, "weir.yaml"), filepath.Join(dir, "link")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if err := os.WriteFile(file, []byte("services: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := accept.RemoveStale(socket); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket of a dead process is still there: %v", err)
	}
	if err := accept.RemoveStale(socket); err != nil {
		t.Errorf("nothing is there: %v", err)
	}
	for _, path := range []string{file, link, dir} {
		if err := accept.RemoveStale(path); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "choose another path") {
			t.Errorf("%s: %v", path, err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("it was removed: %v", err)
		}
	}
}

// TestCheckPath checks that the kernel accepts exactly the paths accepted by CheckPath. Listeners
// reject the others and name the limit.
func TestCheckPath(t *testing.T) {
	dir, err := os.MkdirTemp("", "s")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	for _, beginning := range []string{dir + "/", fmt.Sprintf("@weir-test-%d-", os.Getpid())} {
		for n := 106; n <= 109; n++ {
			path := beginning + strings.Repeat("x", n-len(beginning))
			l, err := net.Listen("unix", path)
			if err == nil {
				l.Close()
			}
			if said := accept.CheckPath(path); (said == nil) != (err == nil) {
				t.Errorf("%d bytes of %s: %v, but the kernel returns %v", n, beginning, said, err)
			}
		}
	}
	if _, err := accept.Unix(dir + "/" + strings.Repeat("x", 200)); err == nil || !strings.Contains(err.Error(), "more than 107: choose a shorter one") {
		t.Error(err)
	}
}
