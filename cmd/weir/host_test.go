// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/nstest"
)

// listen opens sockets on port 4739 in this process, which becomes the member.
func listen(t *testing.T) (closeTCP func()) {
	t.Helper()
	nstest.NeedRoot(t)
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	p, err := lc.ListenPacket(t.Context(), "udp4", "0.0.0.0:4739")
	if err != nil {
		t.Fatal(err)
	}
	l, err := lc.Listen(t.Context(), "tcp4", "0.0.0.0:4739")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close(); l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			c.Write([]byte("x"))
		}
	}()
	return func() { l.Close() }
}

// configFile writes a file with one service and the given options of its steer section. This process is the member of
// its first slot.
func configFile(t *testing.T, options string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "weir.yaml")
	text := fmt.Sprintf(`
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:4739]
    steer: {slots: 2%s}
    members: [{slot: 0, pid: %d}]
`, options, os.Getpid())
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// root returns a pin root for the test's commands.
func root(t *testing.T) string {
	t.Helper()
	nstest.NeedRoot(t)
	dir := filepath.Join(nstest.BPFFS, fmt.Sprintf("cmd_%d", time.Now().UnixNano()%1e9))
	t.Cleanup(func() {
		host.New(dir).Remove(context.Background(), "", true)
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", dir, err)
		}
	})
	return dir
}

// session runs commands on one root and checks their output.
type session struct {
	t    *testing.T
	root string
}

// run runs a command line. It checks the exit status and the two outputs, concatenated, against a regular expression.
func (s session) run(status int, want string, args ...string) string {
	s.t.Helper()
	out, errs, got := weir(s.t, append([]string{"--root", s.root}, args...)...)
	if got != status || !regexp.MustCompile("(?s)^"+want+"$").MatchString(out+errs) {
		s.t.Errorf("weir %s: status %d, want %d, and it says\n%s\nwant\n%s", strings.Join(args, " "), got, status, out+errs, want)
	}
	return out
}

func TestApplyStatusRemove(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	file := configFile(t, "")
	create := `create service telemetry: 2 slots by source on udp 0.0.0.0:4739, tcp 0.0.0.0:4739, in net:\[\d+\]\n`
	adopt := fmt.Sprintf(`adopt slot 0 of service telemetry: pid %d\n`, os.Getpid())
	s.run(0, `no services, guards, filters, paths or sessions yet: weir init writes a first weir.yaml, and weir apply -f weir.yaml applies it\n`, "status")
	s.run(1, `weir: no service is steered: weir apply -f weir.yaml\n`, "steer", "where", "192.0.2.1")
	outage := `slot 1 of service telemetry would stay empty \(on_empty: reject\) and get 50 % of the traffic of process \d+ \(.*\) at .*: no member is configured: name a member for it, or set its weight to 0\n`
	s.run(0, "would "+create+"would "+adopt+"outage: "+outage, "apply", "-f", file, "--dry-run")
	s.run(1, "weir: the change would take served traffic or working protection away; nothing was changed:\n  "+outage+"fix the reason, or give --allow-outage\n", "apply", "-f", file)
	s.run(0, `no services, .*`, "status")
	s.run(0, create+adopt, "apply", "-f", file, "--allow-outage")
	s.run(0, `nothing to change\n`, "apply", "-f", file)
	s.run(0, `nothing to change\n`, "apply", "-f", file, "--dry-run")
	s.run(1, `weir: read the configuration: open /nonexistent.yaml: no such file or directory\n`, "apply", "-f", "/nonexistent.yaml")
	s.run(0, `SERVICE +LISTEN +SLOTS +EMPTY +ON EMPTY +NETNS\ntelemetry +udp 0.0.0.0:4739, tcp 0.0.0.0:4739 +2 +slot 1 +reject +net:\[\d+\]\n`, "status")
	s.run(0, fmt.Sprintf(`telemetry: udp .* engine sk_lookup, on_empty reject, seed \d+, .*\n  0 +admitted +\d+s +%d +pid %[1]d .*\n  1 +empty .*\n  slot 1 is empty: no member is configured\n`, os.Getpid()), "steer", "status")
	s.run(1, `weir: service "dns" is not steered \(steered: telemetry\)\n`, "steer", "status", "dns")
	var st struct{ Steer state.State }
	if err := json.Unmarshal([]byte(s.run(0, `.*`, "status", "--json")), &st); err != nil || len(st.Steer.Services) != 1 || !st.Steer.Services[0].Slots[0].Admitted() {
		t.Errorf("status --json: %v, %+v", err, st)
	}
	s.run(0, "", "remove")
	s.run(0, `no services, .*`, "status")
	s.run(2, `weir: no feature "garde": want one of steer, guard, filter, keeper, reroute, lb, backend\n`, "remove", "garde")
}

// A root outside a BPF file system is an error. An empty or missing root on a BPF file system is an empty host.
func TestRootOnNoBPFFileSystem(t *testing.T) {
	nstest.NeedRoot(t)
	file := configFile(t, "")
	for _, dir := range []string{"/nonexistent", "relative", t.TempDir()} {
		for _, line := range []string{"status", "status --json", "steer status", "steer devices", "apply --dry-run -f " + file, "apply -f " + file} {
			out, errs, status := weir(t, append([]string{"--root", dir}, strings.Fields(line)...)...)
			if status != exitFailed || out != "" || !strings.HasPrefix(errs, "weir: pin root "+dir) || !strings.Contains(errs, "below /sys/fs/bpf") {
				t.Errorf("--root %s %s: status %d, %q, %q", dir, line, status, out, errs)
			}
		}
		if out, _, _ := weir(t, "--root", dir, "doctor"); !strings.Contains(out, "pin root "+dir) {
			t.Errorf("doctor does not tell of root %s:\n%s", dir, out)
		}
	}
	for _, dir := range []string{nstest.BPFFS + "/absent", nstest.BPFFS} {
		if out, errs, status := weir(t, "--root", dir, "status"); status != 0 || out != "no services, guards, filters, paths or sessions yet: weir init writes a first weir.yaml, and weir apply -f weir.yaml applies it\n" {
			t.Errorf("--root %s: status %d, %q, %q", dir, status, out, errs)
		}
	}
}

func TestWhereAndDevices(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ", seed: 7"), "--allow-outage")
	c, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.9:0")), net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:4739")))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	// The datagram may arrive after the send returns.
	nstest.Eventually(t, func() error {
		out, errs, _ := weir(t, "--root", s.root, "steer", "devices")
		if !strings.Contains(out, "127.0.0.9") {
			return errors.New(out + errs)
		}
		return nil
	})
	s.run(0, `ADDRESS +BUCKET +SLOT +MEMBER +PID\n192.0.2.7 +\d+ +[01].*\nfe80::1 +\d+ +[01].*\n`, "steer", "where", "192.0.2.7", "fe80::1%eth0")
	s.run(0, `.*\n192.0.2.7 +\d+ +0 \(empty\) +- +-\n`, "steer", "where", "--slots", "1", "--without", "0", "192.0.2.7")
	s.run(1, `weir: 1000 slots: want a number from 1 to 256\n`, "steer", "where", "--slots", "1000", "192.0.2.7")
	s.run(0, `ADDRESS +SLOT +LAST +UDP +UDP/S +TCP SESSIONS +TCP DATA +CONNECTS\n127.0.0.9 +[01] +\d+s +1 +\d\.\d +0 +0 B +0\n`, "steer", "devices")
	s.run(0, `ADDRESS[^\n]*\n`, "steer", "devices", "--silent", "5m")
	s.run(0, `ADDRESS[^\n]*\n`, "steer", "devices", "--missing", "udp")
	s.run(0, `ADDRESS[^\n]*\n127.0.0.9 .*`, "steer", "devices", "--missing", "tcp")
	var d steer.DeviceReport
	if err := json.Unmarshal([]byte(s.run(0, `.*`, "steer", "devices", "--json")), &d); err != nil || d.Service != "telemetry" || len(d.Devices) != 1 {
		t.Errorf("devices --json: %v, %+v", err, d)
	}
	if out := s.run(0, `.*`, "steer", "devices", "--json", "--slot", "9"); !strings.Contains(out, `"devices": []`) {
		t.Errorf("no devices are printed as %s", out)
	}
}

// A dry run reports a slot that would stay empty, in the words of the change.
func TestDryRunForeseesEmptySlot(t *testing.T) {
	s := session{t, root(t)}
	file := filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(file, []byte("services:\n  telemetry: {listen: [udp 0.0.0.0:4747], steer: {slots: 1}, members: [{slot: 0, pidfile: /nonexistent.pid}]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	adopt, reason := `adopt slot 0 of service telemetry: pidfile /nonexistent.pid `, `stay%s empty: not running: .*/nonexistent.pid[^\n]*`
	s.run(0, `would create service telemetry: [^\n]*\nwould `+adopt+`\(would `+fmt.Sprintf(reason, "")+`\)\n`, "apply", "-f", file, "--dry-run")
	s.run(0, `create service telemetry: [^\n]*\n`+adopt+`\(`+fmt.Sprintf(reason, "s")+`\)\n.*`, "apply", "-f", file)
}

func TestAdmit(t *testing.T) {
	closeTCP := listen(t)
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ""), "--allow-outage")
	pid := fmt.Sprint(os.Getpid())
	s.run(0, `slot 0 of telemetry has this member already\n`, "steer", "admit", "telemetry", "--slot", "0")
	s.run(0, ``, "steer", "withdraw", "telemetry", "--slot", "0")
	s.run(0, `.*slot 0 is empty: withdrawn by weir steer withdraw.*`, "steer", "status")
	s.run(0, ``, "steer", "admit", "telemetry", "--slot", "0")
	s.run(1, `weir: wrong process: process `+pid+` serves slot 0 of telemetry: run weir steer withdraw telemetry --slot 0 first, .*`, "steer", "admit", "telemetry", "--slot", "1", "--pid", pid)
	s.run(0, `SERVICE[^\n]*\ntelemetry .* 2 +slot 1 +reject .*`, "status")
	s.run(1, `weir: no such slot: telemetry has slots 0 to 1\n`, "steer", "admit", "telemetry", "--slot", "2", "--pid", pid)
	s.run(2, `weir: telemetry is a configured service with slots: use weir steer admit and withdraw\n`, "steer", "register", "telemetry")
	s.run(2, `weir: --bound goes with --pid, .*`, "steer", "admit", "telemetry", "--slot", "1", "--bound", "udp :1")
	s.run(2, `weir: invalid listen: "udp": .*`, "steer", "admit", "telemetry", "--slot", "1", "--pid", pid, "--bound", "udp")
	s.run(1, `weir: bound has 1 entry and the service 2 listens: .*`, "steer", "admit", "telemetry", "--slot", "1", "--pid", pid, "--bound", "udp :4739")
	closeTCP()
	s.run(1, `weir: slot 0 of telemetry stays empty after 30ms: process `+pid+`: socket missing: tcp4 :4739\n`,
		"steer", "admit", "telemetry", "--slot", "0", "--wait", "30ms")
	s.run(0, `.*slot 0 is empty: process `+pid+` closed tcp4 :4739\n.*`, "steer", "status")
}

// on_empty: drop needs a socket holder. apply starts it from its own executable.
func TestApplyStartsTheHolder(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ", on_empty: drop"), "--allow-outage")
	if out := s.run(0, `.*`, "status", "--json"); strings.Contains(out, "problem") {
		t.Errorf("its state has a problem: %s", out)
	}
	s.run(0, `nothing to change\n`, "apply", "-f", configFile(t, ", on_empty: drop"))
}

func TestConfigErrorsOnTheCommandLine(t *testing.T) {
	s := session{t, root(t)}
	file := filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(file, []byte("services:\n  telemetry:\n    listen: [udp :4739]\n    steer: {slotz: 4}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"apply", "-f", file}, {"apply", "-f", file, "--dry-run"}} {
		s.run(1, "weir: "+regexp.QuoteMeta(file)+`:4:13: services.telemetry.steer: unknown key "slotz"; did you mean "slots"\?\n`, args...)
	}
}

func TestWithoutRights(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	file := configFile(t, "")
	s.run(0, `create .*`, "apply", "-f", file, "--allow-outage")
	if err := os.Chmod(filepath.Dir(filepath.Dir(file)), 0o755); err != nil {
		t.Fatal(err)
	}
	readable := "/tmp/" + filepath.Base(s.root) + ".yaml"
	defer os.Remove(readable)
	if err := os.WriteFile(readable, []byte("services: {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"doctor":                            `(?s)weir: probe the kernel: permission denied: run weir doctor as root`,
		"doctor --json":                     `weir: probe the kernel: permission denied: run weir doctor as root`,
		"status":                            `weir: no permission to read weir's pins \S*: run as root, .*; and no weir serve answers on /nonexistent: dial unix /nonexistent: connect: no such file or directory\n`,
		"steer where 192.0.2.1":             `no permission to read weir's pins`,
		"steer devices":                     `no permission to read weir's pins`,
		"steer withdraw telemetry --slot 0": `no permission to read weir's pins`,
		"apply -f " + readable:              `^weir: [^\n]*run as root[^\n]*\n$`,
		"remove":                            `permission denied`,
	} {
		args := append([]string{"--root", s.root, "--socket", "/nonexistent"}, strings.Fields(line)...)
		out, errs, status := asNobody(t, args...)
		if strings.Contains(out, "unconfirmed change") {
			t.Errorf("weir %s as nobody reports a change: %s", line, out)
		}
		if status != exitCannot || !regexp.MustCompile(want).MatchString(errs) {
			t.Errorf("weir %s as nobody: status %d, %q; want 3, %q", line, status, errs, want)
		}
	}
	s.run(0, `nothing to change\n`, "apply", "-f", file) // nothing has changed since
}

func TestDoctorHere(t *testing.T) {
	s := session{t, root(t)}
	out := s.run(0, `Linux \S+, as root\nFEATURE +NEEDS +SINCE +STATE *\nsteer +sk_lookup programs +5.9 +ok\n.*`, "doctor")
	if strings.Contains(out, "missing") {
		t.Error(out)
	}
	var d host.Diagnosis
	if err := json.Unmarshal([]byte(s.run(0, `.*`, "doctor", "--json")), &d); err != nil || d.User != "root" {
		t.Errorf("doctor --json: %v, %+v", err, d)
	}
}

// weir serve exits with status 0 after SIGTERM, and traffic goes on.
func TestServeEnds(t *testing.T) {
	listen(t)
	s := session{t, root(t)}
	s.run(0, `create .*`, "apply", "-f", configFile(t, ""), "--allow-outage")
	socket := filepath.Join(t.TempDir(), "weir.sock")
	c := command("--root", s.root, "--socket", socket, "serve", "--listen", "127.0.0.1:0")
	log, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.Process.Kill()
	said := make(chan string, 1)
	go func() { b, _ := io.ReadAll(log); said <- string(b) }()
	nstest.Eventually(t, func() error {
		conn, err := net.Dial("unix", socket)
		if err == nil {
			conn.Close()
		}
		return err
	})
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	text := <-said
	if err := c.Wait(); err != nil {
		t.Errorf("weir serve ended with %v", err)
	}
	if !strings.Contains(text, "serving /metrics and /healthz") {
		t.Errorf("it said %s", text)
	}
	s.run(0, `SERVICE[^\n]*\ntelemetry .*`, "status")
}
