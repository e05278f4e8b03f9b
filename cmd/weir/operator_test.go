// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// SIGHUP does not end weir serve without a file: it logs that nothing changes.
func TestServeOutlivesHangup(t *testing.T) {
	nstest.NeedRoot(t)
	dir := root(t)
	c := nstest.Child("weir", "--root", dir, "serve", "--listen", "127.0.0.1:0", "--socket", "", "--register-socket", "", "--handoff-socket", "")
	log, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	lines := bufio.NewScanner(log)
	wait := func(text string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), text) {
				return
			}
		}
		t.Fatalf("it ended, and did not say %q", text)
	}
	wait("serving /metrics")
	for range 2 {
		if err := c.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		wait("SIGHUP ignored")
	}
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
	}
	if err := c.Wait(); err != nil {
		t.Errorf("ended by SIGTERM: %v", err)
	}
}

// weir bind replace reads the output of weir bind list --json, also from a pipe. Nothing changes.
func TestBindingsRoundTrip(t *testing.T) {
	s := session{t, root(t)}
	for i, name := range []string{"www", `a"b\c`, "ü <>&"} {
		s.run(0, ".*", "bind", "add", name, "udp", fmt.Sprintf("192.0.2.%d", i), "53")
		s.run(0, ".*", "bind", "add", name, "tcp", fmt.Sprintf("2001:db8:%d::/48", i), "0")
	}
	text := s.run(0, ".*", "bind", "list", "--json")
	for _, args := range [][]string{{"bind", "replace"}, {"bind", "replace", "-"}, {"bind", "load", "--dry-run"}} {
		c := nstest.Child("weir", append([]any{"--root", s.root}, anys(args)...)...)
		c.Stdin = strings.NewReader(text)
		out, err := c.CombinedOutput()
		if err != nil || string(out) != "0 added, 0 removed, 0 moved, 6 unchanged\n" {
			t.Errorf("weir %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
}

func anys(all []string) (out []any) {
	for _, s := range all {
		out = append(out, s)
	}
	return out
}

// where accepts device names, and shells complete names.
func TestWhereAndComplete(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	devices := filepath.Join(t.TempDir(), "devices")
	if err := os.WriteFile(devices, []byte("edge1 192.0.2.1 198.51.100.0/24\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.run(0, ".*", "apply", "-f", configFile(t, ", by: device, devices: "+devices), "--allow-outage")
	s.run(0, `ADDRESS +BUCKET.*\n192\.0\.2\.1 \(edge1\)? .*|.*192\.0\.2\.1.*edge1.*|.*edge1.*`, "steer", "where", "edge1")
	s.run(1, `weir: "edge9" is not an IP address, and no device in .*devices has this name\n`, "steer", "where", "edge9")
	s.run(0, "telemetry\n:4\n.*", "__complete", "steer", "status", "")
	s.run(0, "telemetry\n:4\n.*", "__complete", "bypass", "")
	s.run(0, "udp\ntcp\n:4\n.*", "__complete", "explain", "")
	s.run(0, ":4\n.*", "__complete", "bypass", "telemetry", "")
	slots := `0\tpid \d+\n1\tno member\n:4\n.*`
	for line, want := range map[string]string{
		"steer drain telemetry --slot":             slots,
		"steer move telemetry --to":                slots,
		"steer devices --service telemetry --slot": slots,
		"steer register telemetry":                 "tcp\nudp\n:4\n.*",
		"bind add www":                             "tcp\nudp\n:4\n.*",
		"handoff send":                             ":4\n.*",
		"handoff forget":                           ":4\n.*",
		"lb override":                              ":4\n.*",
		"doctor":                                   ":4\n.*",
		"status":                                   ":4\n.*",
		"bind load":                                ":0\n.*",
		"bind add www udp":                         ":4\n.*",
		"steer run telemetry --slot 1 --":          ":0\n.*",
	} {
		s.run(0, want, append(append([]string{"__complete"}, strings.Fields(line)...), "")...)
	}
}
