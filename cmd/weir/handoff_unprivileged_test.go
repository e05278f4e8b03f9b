// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
	fmt "github.com/weir-project/weir/internal/printable"
)

// A user without rights runs the session keeper from a file. The keeper admits the members allowed by the file, and
// after a reload the members of the new file. A connected member receives the new limits.
func TestUnprivilegedKeeper(t *testing.T) {
	nstest.NeedRoot(t)
	const user = 65534
	t.Setenv(wire.UIDEnv, fmt.Sprint(user))
	dir, err := os.MkdirTemp("", "weir-keeper")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, "weir.yaml")
	write := func(state, allow string) {
		t.Helper()
		text := "handoff:\n  keeper:\n    max_state: " + state + "\n    allow: [" + allow + "]\n"
		if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	socket := fmt.Sprint("@weir-unprivileged-", os.Getpid())
	address := freeAddress(t)
	write("1MiB", "telemetry:uid=4242")
	c := command("--root", filepath.Join(nstest.BPFFS, "unprivileged"), "serve", "-f", file, "--only", "keeper", "--handoff-socket", socket, "--listen", address)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	k := nstest.Start(t, c)
	hello := func(uid int) (err error) {
		nstest.AsUser(t, uid, func() error { err = greet(t, socket); return nil })
		return err
	}
	nstest.Eventually(t, func() error { return hello(4242) })
	if err := hello(4343); err == nil || !strings.Contains(err.Error(), "no member of service") || !strings.Contains(err.Error(), "handoff.keeper.allow") {
		t.Errorf("a stranger: %v", err)
	}
	var connected *wire.Conn
	nstest.AsUser(t, 4242, func() (err error) { connected, err = greeted(t, socket); return err })
	defer connected.Close()
	write("2MiB", "telemetry:uid=4343")
	k.Signal(syscall.SIGHUP)
	connected.SetReadDeadline(time.Now().Add(30 * time.Second))
	if m, _, err := connected.Receive(); err != nil || m.Type != wire.Limits || m.Read != 2<<20 {
		t.Errorf("a member that is connected hears %#x, %d bytes, %v; want limits of 2 MiB", uint8(m.Type), m.Read, err)
	}
	nstest.Eventually(t, func() error { return hello(4343) })
	if hello(4242) == nil {
		t.Error("who is allowed no more is a member")
	}
	write("2MiB", "telemetry")
	k.Signal(syscall.SIGHUP)
	nstest.Eventually(t, func() error {
		r, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if text, err := io.ReadAll(r.Body); err != nil || r.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), "SERVICE:KIND=VALUE") {
			return fmt.Errorf("healthz: %d, %q, %v", r.StatusCode, text, err)
		}
		return nil
	})
	if err := hello(4343); err != nil {
		t.Errorf("after a wrong file: %v", err)
	}
	if _, err := os.Stat(filepath.Join(nstest.BPFFS, "unprivileged")); err == nil {
		t.Error("it has pinned something")
	}
	k.Kill()
}

// freeAddress returns an address without a listener.
func freeAddress(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// greet sends hello to a keeper as a member of telemetry, and returns the rejection.
func greet(t *testing.T, socket string) error {
	c, err := greeted(t, socket)
	if err == nil {
		c.Close()
	}
	return err
}

// greeted connects to a keeper as a member of telemetry.
func greeted(t *testing.T, socket string) (*wire.Conn, error) {
	c, err := wire.Dial(t.Context(), socket)
	if err != nil {
		return nil, err
	}
	err = c.Send(&wire.Message{Type: wire.Hello, Seq: 1, Text: "telemetry", Name: "0"})
	if err == nil {
		var m wire.Message
		var fds []int
		m, fds, err = c.Receive()
		wire.CloseAll(fds)
		err = errors.Join(err, m.Err())
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}
