// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// iniOf returns the units of a page in order: ini blocks that begin with "# NAME".
func iniOf(page string) (names, texts []string) {
	for block := range strings.SplitSeq(page, "```ini\n# ") {
		name, text, ok := strings.Cut(block, "\n")
		text, _, closed := strings.Cut(text, "```")
		if ok && closed && strings.Contains(name, ".") && !strings.Contains(name, " ") {
			names, texts = append(names, name), append(texts, text)
		}
	}
	return names, texts
}

// The units of docs/BINDINGS.md work as described under a systemd.
func TestDocsUnits(t *testing.T) {
	nstest.NeedRoot(t)
	tool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("need: tool go")
	}
	dir := t.TempDir()
	if out, err := exec.Command(tool, "build", "-o", dir, ".", "../../examples/echo").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	page, err := os.ReadFile("../../docs/BINDINGS.md")
	if err != nil {
		t.Fatal(err)
	}
	bindings := filepath.Join(dir, "bindings.json")
	if err := os.WriteFile(bindings, []byte(`{"bindings": [{"label": "www", "prefix": "127.1.0.0/16", "port": 80, "protocol": "tcp"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("/usr/bin/weir", filepath.Join(dir, "weir"), "/usr/bin/www", filepath.Join(dir, "echo"), "/etc/weir/bindings.json", bindings)
	names, texts := iniOf(string(page))
	if got := strings.Join(names, " "); got != "www.service weir-bindings.service www.socket www-register.service www.service" {
		t.Fatalf("the page has other units: %s", got)
	}
	unit := func(i int) string { return here.Replace(texts[i]) }
	t.Run("own sockets", func(t *testing.T) {
		nstest.Enter(t)
		systemctl := nstest.Systemd(t, map[string]string{names[0]: unit(0), names[1]: unit(1)})
		must := mustRun(t, systemctl)
		must("start", "weir-bindings.service")
		if echoes(bound) {
			t.Error("something answers before the service runs")
		}
		must("start", "www.service")
		if !echoes(bound) {
			t.Error("no answer after start")
		}
		must("restart", "www.service")
		if !echoes(bound) {
			t.Error("no answer after restart")
		}
		must("stop", "www.service")
		if echoes(bound) {
			t.Error("an answer after stop")
		}
	})
	t.Run("socket activation", func(t *testing.T) {
		nstest.Enter(t)
		systemctl := nstest.Systemd(t, map[string]string{names[1]: unit(1), names[2]: unit(2), names[3]: unit(3), names[4]: unit(4)})
		must := mustRun(t, systemctl)
		must("start", "weir-bindings.service")
		must("start", "www.socket") // it starts the registering unit and does not wait for it
		soonEchoes(t, "the first connection is to start the service")
		must("restart", "www.service")
		if !echoes(bound) {
			t.Error("no answer after restart")
		}
		must("stop", "www.service")
		if !echoes(bound) {
			t.Error("no answer after stop, which was to start the service again")
		}
		must("stop", "www.service", "www.socket")
		if echoes(bound) {
			t.Error("an answer without a socket")
		}
		must("start", "www.socket")
		soonEchoes(t, "the new socket is to be registered")
	})
}

const bound = "127.1.2.3:80" // address in TestDocsUnits

// soonEchoes repeats a connection attempt until it is answered.
func soonEchoes(t *testing.T, what string) {
	t.Helper()
	nstest.Eventually(t, func() error {
		if !echoes(bound) {
			return errors.New("no answer: " + what)
		}
		return nil
	})
}

func mustRun(t *testing.T, systemctl func(...string) (string, error)) func(args ...string) {
	return func(args ...string) {
		t.Helper()
		if _, err := systemctl(args...); err != nil {
			log, _ := systemctl("status", args[len(args)-1])
			t.Fatalf("%v\n%s", err, log)
		}
	}
}

// echoes connects by TCP from the test's thread, in its namespace.
func echoes(to string) bool {
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	answer := make([]byte, 5)
	_, err = c.Write([]byte("hello"))
	n, _ := c.Read(answer)
	return err == nil && string(answer[:n]) == "hello"
}
