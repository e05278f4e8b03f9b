// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// The keeper and the commands use the socket beside --socket.
func TestKeeperBesideSocket(t *testing.T) {
	t.Setenv(wire.SocketEnv, "")
	dir := t.TempDir()
	nstest.Start(t, command("--socket", filepath.Join(dir, "weir.sock"), "handoff", "keep"))
	nstest.Eventually(t, func() error {
		if out, errs, status := weir(t, "--socket", filepath.Join(dir, "weir.sock"), "handoff", "status"); status != 0 || !strings.Contains(out, "no members and no sessions") {
			return fmt.Errorf("status %d: %s%s", status, out, errs)
		}
		return nil
	})
	if _, err := os.Lstat(filepath.Join(dir, "handoff.sock")); err != nil {
		t.Error(err)
	}
}

// A user without rights sees only its own services. If there are none, the command mentions sudo.
func TestHandoffStatusOfOthers(t *testing.T) {
	nstest.NeedRoot(t)
	socket := fmt.Sprint("@weir-status-", os.Getpid())
	nstest.Start(t, command("handoff", "--keeper", socket, "keep"))
	nstest.Eventually(t, func() error {
		if _, errs, status := weir(t, "handoff", "--keeper", socket, "status"); status != 0 || errs != "" {
			return fmt.Errorf("root: status %d: %s", status, errs)
		}
		return nil
	})
	if _, errs, status := asNobody(t, "handoff", "--keeper", socket, "status"); status != 0 || !strings.Contains(errs, "only its own services: use sudo to see all") {
		t.Errorf("status %d: %s", status, errs)
	}
}

func TestHandoffCommands(t *testing.T) {
	nstest.NeedRoot(t)
	socket := filepath.Join(t.TempDir(), "keeper.sock")
	keep := command("handoff", "--keeper", socket, "keep", "--listen", "127.0.0.1:9744")
	k := nstest.Start(t, keep)
	nstest.Eventually(t, func() error {
		if out, _, status := weir(t, "handoff", "--keeper", socket, "status"); status == 0 {
			if !strings.Contains(out, "no members and no sessions") {
				t.Errorf("an empty keeper: %s", out)
			}
			return nil
		}
		return errors.New("the keeper does not answer")
	})
	if _, errs, status := weir(t, "handoff", "--keeper", socket, "keep"); status != exitFailed || !strings.Contains(errs, "another keeper answers") {
		t.Errorf("a second keeper: status %d, %s", status, errs)
	}
	listen := func(name string) *handoff.Listener {
		l, err := handoff.Listen(t.Context(), "tcp", "127.0.0.1:0", handoff.Options{Service: "telemetry", Name: name, Keeper: socket})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	a, b := listen("0"), listen("1")
	c, err := net.Dial("tcp", a.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := a.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Commit([]byte("state")); err != nil {
		t.Fatal(err)
	}
	out, errs, status := weir(t, "handoff", "--keeper", socket, "status", "--json")
	var r handoff.Report
	if err := json.Unmarshal([]byte(out), &r); status != 0 || err != nil || len(r.Services) != 1 || len(r.Services[0].Sessions) != 3 || r.State != 5 {
		t.Fatalf("status %d, %v: %s%s", status, err, out, errs)
	}
	out, _, _ = weir(t, "handoff", "--keeper", socket, "status", "telemetry")
	for _, want := range []string{"telemetry: 2 members, 1 session\n  MEMBER ", "moved so far: 0 by transfer", fmt.Sprint(s.ID()), c.LocalAddr().String(), "5 B"} {
		if !strings.Contains(out, want) {
			t.Errorf("status lacks %q:\n%s", want, out)
		}
	}
	// Shells complete members, sessions with their peers, and the other members of a session's service.
	for line, want := range map[string]string{
		"status":                        `telemetry\n:4\n`,
		"send":                          fmt.Sprintf(`telemetry/0\ntelemetry/1\n%d\tsession of telemetry/0 from %s\n:4\n`, s.ID(), c.LocalAddr()),
		"forget":                        `telemetry/0\ntelemetry/1\n.*`,
		"send " + fmt.Sprint(s.ID()):    `1\n:4\n`,
		"send telemetry/1":              `0\n:4\n`,
		"send telemetry/1 0":            `:4\n`,
		"--keeper " + socket + "x send": `:4\n`,
	} {
		args := append(append([]string{"__complete", "handoff", "--keeper", socket}, strings.Fields(line)...), "")
		if out, errs, status := weir(t, args...); status != 0 || !regexp.MustCompile("(?s)^"+want+"$").MatchString(out) {
			t.Errorf("%s: status %d, %s%s; want %s", line, status, out, errs, want)
		}
	}
	if out, errs, status := weir(t, "handoff", "--keeper", socket, "send", fmt.Sprint(s.ID()), "1"); status != 0 || out != "1 moved\n" {
		t.Errorf("send: status %d, %s%s", status, out, errs)
	}
	if s, err = b.AcceptSession(); err != nil || string(s.State()) != "state" {
		t.Fatalf("%v", err)
	}
	if out, errs, status := weir(t, "handoff", "--keeper", socket, "send", "telemetry/1"); status != 0 || out != "1 moved\n" {
		t.Errorf("send all: status %d, %s%s", status, out, errs)
	}
	for _, x := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"send", "telemetry"}, exitUsage, "want the number of a session, or SERVICE/MEMBER"},
		{[]string{"send", "telemetry/7"}, exitFailed, `service telemetry has no member "7"`},
		{[]string{"send", "1", "0"}, exitFailed, "weir handoff status shows them"},
		{[]string{"send", fmt.Sprint(s.ID()), "9"}, exitFailed, "no member 9 of telemetry is ready"},
		{[]string{"status", "dns"}, exitFailed, `no members or sessions of service "dns"`},
		{[]string{"keep", "--allow", "dns"}, exitUsage, "SERVICE:KIND=VALUE"},
		{[]string{"--keeper", socket + "x", "status"}, exitFailed, "start weir serve, or weir handoff keep"},
	} {
		if out, errs, status := weir(t, append([]string{"handoff", "--keeper", socket}, x.args...)...); status != x.status || !strings.Contains(errs, x.want) {
			t.Errorf("%v: status %d, want %d: %s%s", x.args, status, x.status, out, errs)
		}
	}
	resp, err := http.Get("http://127.0.0.1:9744/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), `weir_handoff_moves_total{by="transfer",service="telemetry"} 2`) {
		t.Errorf("metrics: %v\n%s", err, text)
	}
	// A member that accepts no sessions: the session returns.
	m, err := handoff.Join(t.Context(), handoff.Options{Service: "telemetry", Name: "2", Keeper: socket})
	if err == nil {
		t.Cleanup(func() { m.Close() })
		err = m.Ready()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range []string{fmt.Sprint(s.ID()), "telemetry/0"} {
		if out, errs, status := weir(t, "handoff", "--keeper", socket, "send", what, "2"); status != exitFailed || !strings.Contains(errs, "1 of 1 sessions were returned: this member does not accept sessions now") {
			t.Errorf("send %s to one that refuses: status %d, %s%s", what, status, out, errs)
		}
	}
	k.Kill()
}

// The flags of a keeper accept the same numbers as the configuration. A bad number prevents the start.
func TestKeepRefusesOddNumbers(t *testing.T) {
	for args, want := range map[string]string{
		"--hold -1s":                "--hold -1s: want a time from 1ms",
		"--hold 0s":                 "--hold 0s: want more than 0",
		"--grace 1m":                "--grace 1m0s is longer than hold, 30s",
		"--max-sessions -1":         "--max-sessions -1: want a number from 1 to",
		"--max-sessions 0":          "--max-sessions 0: want more than 0",
		"--max-state 1000000000000": "--max-state 976562500KiB: want at most 256MiB",
		"--max-total 1":             "--max-state 1MiB for one session is more than max_total, 1B",
		"--max-state -1 --hold 2h":  "--max-state -1B: want at most",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		c := newCommand()
		c.SetArgs(append([]string{"handoff", "keep", "--keeper", filepath.Join(t.TempDir(), "keeper.sock")}, strings.Fields(args)...))
		err := c.ExecuteContext(ctx)
		if err == nil || !strings.Contains(err.Error(), want) || ctx.Err() != nil {
			t.Errorf("%s: %v; want %q", args, err, want)
		} else if !errors.Is(err, cli.ErrUsage) {
			t.Errorf("%s: %v is no error of usage", args, err)
		}
		cancel()
	}
}
