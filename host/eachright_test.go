// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/users"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// Users of the processes, unknown to the machine.
const (
	serveUser  = 64740 // of weir serve
	memberUser = 64741 // of a member
)

// operation needs a capability. Its arguments are the process of a member and a directory of root.
type operation struct {
	told string // in the error without the capability
	run  func(member int, dir string) error
}

// operations are one or more for each capability of weir serve.
var operations = map[uint]operation{
	unix.CAP_SYS_ADMIN: {"needs CAP_SYS_ADMIN", func(int, string) error {
		ns, err := netns.Current()
		if err != nil {
			return err
		}
		defer ns.Close()
		return ns.Do(func() error { return nil })
	}},
	unix.CAP_NET_ADMIN: {"with CAP_NET_ADMIN", func(int, string) error { return need("TCP_REPAIR") }},
	unix.CAP_NET_RAW:   {"lacks CAP_NET_RAW", func(int, string) error { return need("raw sockets") }},
	unix.CAP_NET_BIND_SERVICE: {"lacks CAP_NET_BIND_SERVICE", func(int, string) error {
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		return (&metricsPort{address: "0.0.0.0:81", log: slog.New(slog.NewTextHandler(io.Discard, nil))}).serve(ctx, nil)
	}},
	unix.CAP_SYS_PTRACE: {"with CAP_SYS_PTRACE", func(member int, _ string) error {
		p, err := pidfd.Open(member)
		if err != nil {
			return err
		}
		defer p.Close()
		fd, err := p.Dup(0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}},
	unix.CAP_DAC_READ_SEARCH: {"lacks CAP_DAC_READ_SEARCH", func(_ int, dir string) error {
		_, err := LoadConfig(filepath.Join(dir, "weir.yaml"))
		return err
	}},
	unix.CAP_DAC_OVERRIDE: {"lacks CAP_DAC_OVERRIDE", func(_ int, dir string) error {
		c, err := net.Dial("unix", filepath.Join(dir, "bfdd.sock")) // as dplane.Client does
		if err == nil {
			c.Close()
		}
		return users.Lacking(err, unix.CAP_DAC_OVERRIDE)
	}},
	unix.CAP_SETUID:  {"lacks CAP_SETUID", func(member int, _ string) error { return check(member, "/bin/true") }},
	unix.CAP_SETGID:  {"lacks CAP_SETGID", func(member int, _ string) error { return check(member, "/bin/true") }},
	unix.CAP_SETPCAP: {"lacks CAP_SETPCAP", func(_ int, dir string) error { return check(pidIn(dir), "/bin/true") }},
	unix.CAP_KILL: {"lacks CAP_KILL", func(member int, _ string) error {
		err := check(member, "/bin/sleep", "30")
		if err != nil && strings.Contains(err.Error(), "did not end within") {
			return nil // and was killed
		}
		return err
	}},
}

// need probes a need of moving sessions.
func need(name string) error {
	for _, n := range repair.Needs() {
		if n.Name == name {
			if err := n.Probe(); err != nil {
				return fmt.Errorf("%w: %s", err, n.RemedyFor(err))
			}
			return nil
		}
	}
	return errors.New("no such need")
}

// check runs a member's ready.command.
func check(member int, command ...string) error {
	ns, err := netns.Current()
	if err != nil {
		return err
	}
	defer ns.Close()
	r := service.Ready{Command: command, Timeout: 500 * time.Millisecond}
	return r.Check(context.Background(), ns, service.Asked{Service: "test", PID: member})
}

// pidIn reads the number of the member of root.
func pidIn(dir string) int {
	text, _ := os.ReadFile(filepath.Join(dir, "pid"))
	n, _ := strconv.Atoi(string(text))
	return n
}

// playRight runs the operation of a capability: CAPABILITY MEMBER DIR. As weir serve, it drops the ambient capabilities.
func playRight(f []string) error {
	capability, err := strconv.Atoi(f[0])
	if err != nil {
		return err
	}
	member, err := strconv.Atoi(f[1])
	if err != nil {
		return err
	}
	if err := DropRights(nil); err != nil {
		return err
	}
	if err := operations[uint(capability)].run(member, f[2]); err != nil {
		fmt.Println("fails:", err)
	} else {
		fmt.Println("works")
	}
	return nil
}

// playBounded lives as root with no capability until its input ends.
func playBounded([]string) error {
	if err := users.KeepOnly(0); err != nil {
		return err
	}
	fmt.Println("bounded")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// asServe runs a role as the user of weir serve, with the capabilities of its unit except some (one bit each).
func asServe(t *testing.T, without uint64, role string, args ...any) string {
	t.Helper()
	return asServeIn(t, nil, without, role, args...)
}

// asServeIn is asServe with supplementary groups.
func asServeIn(t *testing.T, groups []uint32, without uint64, role string, args ...any) string {
	t.Helper()
	c := nstest.Child(role, args...)
	c.Dir = "/"
	c.SysProcAttr.Credential = &syscall.Credential{Uid: serveUser, Gid: serveUser, Groups: groups}
	for bit, all := 0, serveRights(nil); bit < 64; bit++ {
		if (all&^without)>>bit&1 == 1 {
			c.SysProcAttr.AmbientCaps = append(c.SysProcAttr.AmbientCaps, uintptr(bit))
		}
	}
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", role, args, err, out)
	}
	return string(out)
}

// Each capability of weir serve has an operation that fails without it alone, and says so with the remedy.
func TestEachRight(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	member := exec.Command("/bin/sleep", "600")
	member.Stdin = os.Stdin
	member.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: memberUser, Gid: memberUser}}
	bounded := nstest.Child("bounded")
	in, err := bounded.StdinPipe()
	out, oerr := bounded.StdoutPipe()
	if err := errors.Join(err, oerr, member.Start(), bounded.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = member.Process.Kill()
		_, _ = member.Process.Wait()
		_ = bounded.Wait()
	})
	if _, err := io.ReadFull(out, make([]byte, len("bounded"))); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "bfdd.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := errors.Join(os.Chmod(dir, 0o700), os.Chmod(filepath.Join(dir, "bfdd.sock"), 0o700),
		os.WriteFile(filepath.Join(dir, "weir.yaml"), []byte("services: {telemetry: {listen: [udp :4739], guard: {limit: 20kpps}}}\n"), 0o600),
		os.WriteFile(filepath.Join(dir, "pid"), []byte(strconv.Itoa(bounded.Process.Pid)), 0o600)); err != nil {
		t.Fatal(err)
	}
	for bit := range uint(64) {
		if serveRights(nil)>>bit&1 == 0 {
			continue
		}
		t.Run(capabilityNames[bit], func(t *testing.T) {
			o, ok := operations[bit]
			if !ok {
				t.Fatal("nothing misses it: remove it from the rights and the units")
			}
			if said := asServe(t, 0, "right", bit, member.Process.Pid, dir); said != "works\n" {
				t.Errorf("with all capabilities: %s", said)
			}
			without := uint64(1) << bit
			if bit == unix.CAP_DAC_READ_SEARCH {
				without |= 1 << unix.CAP_DAC_OVERRIDE // reroute's, and includes it
			}
			if said := asServe(t, without, "right", bit, member.Process.Pid, dir); !strings.Contains(said, "fails:") || !strings.Contains(said, o.told) {
				t.Errorf("without it: %swant %q", said, o.told)
			}
		})
	}
}

// A member's ready.command gets none of the ambient capabilities of weir serve's unit.
func TestReadyCheckInheritsNothing(t *testing.T) {
	nstest.NeedRoot(t)
	member := exec.Command("/bin/sleep", "600")
	member.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: serveUser, Gid: serveUser}}
	if err := member.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = member.Process.Kill(); _, _ = member.Process.Wait() })
	if said := asServe(t, 0, "inherits", member.Process.Pid); said != "none\n" {
		t.Error(said)
	}
}

// playInherits checks a member of weir serve's own user: MEMBER.
func playInherits(f []string) error {
	member, err := strconv.Atoi(f[0])
	if err != nil {
		return err
	}
	if err := DropRights(nil); err != nil {
		return err
	}
	if err := check(member, "/bin/sh", "-c", "! grep -E '^Cap(Prm|Eff|Amb|Inh):.*[1-9a-f]' /proc/self/status"); err != nil {
		return err
	}
	fmt.Println("none")
	return nil
}

// A weir serve in the group of readers gives it pins, records and sockets, without a capability. The error of another
// one names the remedy.
func TestGroupNeedsNoRight(t *testing.T) {
	nstest.NeedRoot(t)
	if said := asServeIn(t, []uint32{memberUser}, 0, "gives"); said != "works\n" {
		t.Errorf("in the group: %s", said)
	}
	if said, want := asServe(t, 0, "gives"), fmt.Sprintf("is not in group %d: add SupplementaryGroups=%[1]d to its unit", memberUser); !strings.Contains(said, want) {
		t.Errorf("not in the group: %swant %q", said, want)
	}
}

// playGives gives a socket to a group.
func playGives([]string) error {
	if err := DropRights(nil); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/tmp", "weir-right-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "weir.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := permit(path, memberUser); err != nil {
		fmt.Println("fails:", err)
	} else {
		fmt.Println("works")
	}
	return nil
}
