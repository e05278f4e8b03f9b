// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/keeper"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

const nobody = 65534

// impostor listens at a keeper's name as user nobody and never answers.
func impostor(t *testing.T, name string) {
	t.Helper()
	var l *net.UnixListener
	nstest.AsUser(t, nobody, func() (err error) {
		l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
		return err
	})
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
}

// TestImpostor checks that clients in all languages send nothing to another user's process at the
// keeper's name, unless $WEIR_HANDOFF_UID names that user.
func TestImpostor(t *testing.T) {
	dir, err := os.MkdirTemp("/tmp", "weir-impostor-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	const want = "user 65534 answers there, neither root nor this user"
	for _, name := range []string{fmt.Sprintf("@weir-impostor-%d", os.Getpid()), filepath.Join(dir, "k.sock")} {
		impostor(t, name)
		if _, err := handoff.Direct(t.Context(), name); err == nil || !strings.Contains(err.Error(), "user 65534, neither root nor this user: set $WEIR_HANDOFF_UID") {
			t.Errorf("Go, %s: %v", name, err)
		}
		if _, err := keeper.Listen(name); err == nil || !strings.Contains(err.Error(), "65534") {
			t.Errorf("a keeper beside %s: %v", name, err)
		}
		for language, command := range languages(t) {
			out, err := exec.Command(command[0], append(command[1:], name, "0", "0")...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), want) {
				t.Errorf("%s, %s: %v, %s", language, name, err, out)
			}
		}
		t.Setenv(wire.UIDEnv, "65534")
		d, err := handoff.Direct(t.Context(), name)
		if err != nil {
			t.Errorf("Go, configured, %s: %v", name, err)
		} else {
			d.Close()
		}
		t.Setenv(wire.UIDEnv, "")
	}
}

// TestKeeperOfDirectoryOwner checks that the owner of the socket's directory may run the keeper.
func TestKeeperOfDirectoryOwner(t *testing.T) {
	nstest.NeedRoot(t)
	dir, err := os.MkdirTemp("/tmp", "weir-owner-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, -1); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "k.sock")
	impostor(t, name)
	d, err := handoff.Direct(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
}
