// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// realDaemon starts a real daemon in this namespace, and ends it with the test. It runs as the leader of a process group:
// nfacctd leaves children behind.
func realDaemon(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("need: tool %s", name)
	}
	c := exec.Command(path, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var said nstest.Log
	c.Stdout, c.Stderr = &said, &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // it may have ended
		_ = c.Wait()
		if t.Failed() {
			t.Logf("%s said: %.2000s", name, said.String())
		}
	})
	return c
}

// pidFile names a process in a file below /run, as packaged daemons do.
func pidFile(t *testing.T, name string, pid int) string {
	t.Helper()
	dir := fmt.Sprintf("/run/weir-init-%d", os.Getpid())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	file := filepath.Join(dir, name+".pid")
	if err := os.WriteFile(file, []byte(fmt.Sprintln(pid)), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// workDir returns a directory open to daemons without root.
func workDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "weir-init-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	return dir
}

func writeFile(t *testing.T, dir, name, text string) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// suggestion matches a line of the file with a suggestion: its # has no space behind it.
var suggestion = regexp.MustCompile(`(?m)^( *)#([^ \n])`)

// On a host with two nfacctd, nginx, knot and FRR, weir init writes a file with each of them. weir apply --dry-run
// accepts it, and weir apply steers the collectors. With all suggestions it is a valid configuration.
func TestInit(t *testing.T) {
	pins := root(t)
	frrtest.Need(t, "bfdd")
	for _, tool := range []string{"nfacctd", "nginx", "knotd", "nft", "ip", "vtysh"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("need: tool %s", tool)
		}
	}
	own, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	dir := workDir(t)
	if out, err := exec.Command("sh", "-ec", `
ip link add eth1 type veth peer name far
ip link set far up
ip link set eth1 up
ip addr add 192.0.2.1/24 dev eth1
ip addr add 2001:db8:1::1/64 dev eth1 nodad
nft add table inet fw
nft add chain inet fw in '{ type filter hook input priority 0; }'
nft add rule inet fw in meta l4proto udp limit rate 1000/second accept`).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("sh", "-c", "ip link del eth1; nft delete table inet fw").Run() }) // of the namespace of all tests
	if err := errors.Join(os.MkdirAll("/etc/pmacct", 0o755), unix.Mount("tmpfs", "/etc/pmacct", "tmpfs", 0, "mode=0755")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount("/etc/pmacct", unix.MNT_DETACH) })
	for i := range 2 {
		conf := writeFile(t, []string{dir, "/etc/pmacct"}[i], fmt.Sprintf("nfacctd-%d.conf", i), fmt.Sprintf("daemonize: false\nnfacctd_ip: 0.0.0.0\nnfacctd_port: 4739\nplugins: print\nprint_output_file: %s/flows-%d\naggregate: src_host\n! the second one has its own pidfile\n", dir, i)+
			[]string{"", "pidfile: " + dir + "/own.pid\n"}[i])
		daemon := realDaemon(t, "nfacctd", "-f", conf)
		if i == 0 {
			pidFile(t, "nfacctd", daemon.Process.Pid)
		}
	}
	realDaemon(t, "nginx", "-p", dir, "-e", filepath.Join(dir, "error.log"), "-g", "daemon off; pid "+dir+"/nginx.pid;", "-c", writeFile(t, dir, "nginx.conf",
		"events {}\nhttp { access_log off; server { listen 80; listen [::]:80; } }\n"))
	realDaemon(t, "knotd", "-c", writeFile(t, dir, "knot.conf", fmt.Sprintf(
		"server:\n  rundir: %s\n  listen: 192.0.2.1@53\n  user: root\ndatabase:\n  storage: %s\nlog:\n  - target: stderr\n    any: warning\n", dir, dir)))
	frrtest.Start(t, own, "init", map[string]string{"bfdd": "bfd\n peer 2001:db8:1::2 local-address 2001:db8:1::1 interface eth1\n  no shutdown\n"})
	file := filepath.Join(t.TempDir(), "weir.yaml")
	run := func(want int, args ...string) string {
		t.Helper()
		out, errs, status := finish(t, commandOf("weir", append([]string{"--root", pins}, args...)...))
		if status != want {
			t.Fatalf("weir %s: status %d, want %d: %s", strings.Join(args, " "), status, want, out+errs)
		}
		return out + errs
	}
	nstest.Eventually(t, func() error {
		text := run(0, "init", "--stdout")
		for _, want := range []string{
			"\n  # nfacctd, telemetry collector: process ", "2 processes at one address (SO_REUSEPORT)", "\n  nfacctd:\n    listen:\n      - udp 0.0.0.0:4739\n", "- {slot: 0, pidfile: /run/weir-init-", "- {slot: 1, pidfile: " + dir + "/own.pid}",
			"\n  #nginx:\n", "tcp 0.0.0.0:80", "tcp6 [::]:80", "generations:",
			"\n  #knotd:\n", "udp 192.0.2.1:53", "    #guard: {limit: 20kpps, dry_run: true}",
			"# - routing: FRR: bfdd, zebra\n", "BFD neighbour 2001:db8:1::2 on eth1", "#- {name: eth1, interface: eth1, bfd: {peer: \"2001:db8:1::2\", frr: true}}",
			"# - nftables: 1 rule in inet fw; limits of UDP in inet fw in", "nftables limits UDP too", "\n#filter:\n",
		} {
			if !strings.Contains(text, want) {
				return fmt.Errorf("%q is missing from\n%s", want, text)
			}
		}
		return nil
	})
	out := run(0, "init", "-o", file)
	if !strings.HasSuffix(out, fmt.Sprintf("next:\n  weir apply --dry-run -f %s\n  weir apply -f %[1]s\n  systemctl enable --now weir\n", file)) {
		t.Errorf("weir init printed\n%s", out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if again := run(0, "init", "--stdout"); !strings.HasPrefix(again, string(text)) {
		t.Errorf("a second run wrote\n%s\nthe first one\n%s", again, text)
	}
	if plan := run(0, "apply", "--dry-run", "-f", file); !strings.Contains(plan, "would create service nfacctd") || strings.Contains(plan, "outage") || strings.Contains(plan, "(") {
		t.Errorf("weir apply --dry-run says\n%s", plan)
	}
	whole := suggestion.ReplaceAllString(string(text), "$1$2")
	if _, err := host.ParseConfig(file, []byte(whole)); err != nil {
		t.Errorf("with all suggestions: %v\n%s", err, whole)
	}
	if out := run(1, "init", "-o", file); !strings.Contains(out, "exists and stays as it is: name another file with -o FILE") {
		t.Errorf("over a file: %s", out)
	}
	run(0, "apply", "-f", file)
	if out := run(0, "steer", "status"); strings.Count(out, " admitted ") != 2 {
		t.Errorf("weir steer status says\n%s", out)
	}
	if out := run(0, "init", "-o", "-"); !strings.Contains(out, "\n  nfacctd:\n") || !strings.Contains(out, `BPF program at sk_lookup`) {
		t.Errorf("with its own file in force weir init writes\n%s", out)
	}
}

// A host without servers gets a minimal file.
func TestInitNothing(t *testing.T) {
	pins := root(t)
	file := filepath.Join(t.TempDir(), "weir.yaml")
	out, errs, status := finish(t, commandOf("weir", "--root", pins, "init", "-o", file))
	text, err := os.ReadFile(file)
	if status != 0 || err != nil || !strings.Contains(out, "found: nothing to configure") || !strings.Contains(string(text), "# Nothing found. weir init looks for") || !strings.Contains(string(text), "\n  #telemetry:\n") {
		t.Fatalf("status %d, %v: %s\n%s", status, err, out+errs, text)
	}
	if out, errs, status := finish(t, commandOf("weir", "--root", pins, "apply", "--dry-run", "-f", file)); status != 0 || out != "nothing to change\n" {
		t.Errorf("status %d: %s", status, out+errs)
	}
}
