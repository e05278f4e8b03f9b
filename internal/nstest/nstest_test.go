// SPDX-License-Identifier: Apache-2.0

package nstest_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// outerEnv names the namespace of the starting process. modeEnv selects the behaviour of
// TestTarget.
const (
	outerEnv = "WEIR_NSTEST_OUTER"
	modeEnv  = "WEIR_NSTEST_MODE"
)

func TestMain(m *testing.M) {
	nstest.Play(map[string]nstest.Role{"echo": echo, "waiter": waiter})
	if os.Getenv(outerEnv) == "" {
		os.Setenv(outerEnv, netLink("self"))
	}
	nstest.Main(m)
}

func netLink(task string) string {
	s, err := os.Readlink("/proc/" + task + "/ns/net")
	if err != nil {
		panic(err)
	}
	return s
}

func TestMainIsolates(t *testing.T) {
	nstest.NeedRoot(t)
	if now := netLink("self"); now == os.Getenv(outerEnv) || now != netLink("thread-self") {
		t.Errorf("in %s, thread in %s, started in %s", now, netLink("thread-self"), os.Getenv(outerEnv))
	}
	checkFurnished(t)
}

// checkFurnished checks for lo up, an empty private bpffs, and no named namespace.
func checkFurnished(t *testing.T) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:4739")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := os.Mkdir(nstest.BPFFS+"/weir", 0o700); err != nil {
		t.Error(err)
	}
	defer os.Remove(nstest.BPFFS + "/weir")
	entries, err := os.ReadDir(nstest.BPFFS)
	if err != nil {
		t.Error(err)
	}
	for _, e := range entries {
		// Kernels with BPF_PRELOAD create two iterators in every new bpffs.
		if name := e.Name(); name != "weir" && name != "maps.debug" && name != "progs.debug" {
			t.Errorf("%s is not empty: %s", nstest.BPFFS, name)
		}
	}
	if names, err := netns.Names(); err != nil || len(names) != 0 {
		t.Errorf("named namespaces %q, %v", names, err)
	}
}

func TestEnter(t *testing.T) {
	var seen []string
	for _, name := range []string{"a", "b"} {
		t.Run(name, func(t *testing.T) {
			do := nstest.Enter(t)
			here := netLink("thread-self")
			seen = append(seen, here)
			checkFurnished(t)
			do(func() {
				if there := netLink("thread-self"); there != here {
					t.Errorf("do runs in %s, the test in %s", there, here)
				}
				if err := os.Mkdir(nstest.BPFFS+"/from-do", 0o700); err != nil {
					t.Error(err)
				}
			})
			if _, err := os.Stat(nstest.BPFFS + "/from-do"); err != nil {
				t.Errorf("do has another bpffs: %v", err)
			}
		})
	}
	if len(seen) == 2 && (seen[0] == seen[1] || seen[0] == netLink("self")) {
		t.Errorf("namespaces %q in %s, want three", seen, netLink("self"))
	}
}

// TestTarget is not a test of its own: TestExitStatus runs it in another process.
func TestTarget(t *testing.T) {
	switch os.Getenv(modeEnv) {
	case "fail":
		t.Error("failing as asked")
	case "enter":
		nstest.Enter(t)
	}
}

func target(mode string, uid uint32) (string, int, error) {
	c := exec.Command("/proc/self/exe", "-test.run=^TestTarget$", "-test.v")
	c.Env = append(os.Environ(), modeEnv+"="+mode)
	c.Dir = "/"
	if uid != 0 {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	out, err := c.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return string(out), exit.ExitCode(), nil
	}
	return string(out), 0, err
}

func TestExitStatus(t *testing.T) {
	nstest.NeedRoot(t)
	for _, c := range []struct {
		mode   string
		uid    uint32
		status int
		text   string
	}{
		{"pass", 0, 0, "--- PASS: TestTarget"},
		{"fail", 0, 1, "failing as asked"},
		{"enter", 0, 0, "--- PASS: TestTarget"},
		{"enter", 65534, 0, "need: root"},
		{"pass", 65534, 0, "--- PASS: TestTarget"},
	} {
		out, status, err := target(c.mode, c.uid)
		if err != nil || status != c.status || !strings.Contains(out, c.text) {
			t.Errorf("%s as %d: status %d, %v, output:\n%s\nwant status %d and %q", c.mode, c.uid, status, err, out, c.status, c.text)
		}
	}
}

// echo prints its arguments, then its input, until the input ends.
func echo(args []string) error {
	for _, a := range args {
		fmt.Println(a)
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Println(in.Text())
	}
	return errors.New("ended as asked")
}

func TestChild(t *testing.T) {
	p := nstest.StartReady(t, nstest.Child("echo", "ready", "two words", 3))
	p.Expect("two words")
	p.Expect("3")
	p.Tell("hear me")
	p.Expect("hear me")
	for range 2 {
		if err := p.End(); err == nil || p.ProcessState.ExitCode() != 1 {
			t.Errorf("the role failed, and its process ended with %v", err)
		}
	}
	if line, ok := p.Line(); ok {
		t.Errorf("an ended child prints %q", line)
	}
	p.Kill() // does nothing now
	out, err := nstest.Child("nonsense").CombinedOutput()
	if err == nil || !strings.Contains(string(out), `no role "nonsense"`) {
		t.Errorf("an unknown role: %v, %s", err, out)
	}
}

// TestSystemdIsPrivate checks that the manager is private. The tests of internal/units use Systemd.
func TestSystemdIsPrivate(t *testing.T) {
	_, before := os.Lstat("/run/systemd/private")
	t.Run("inside", func(t *testing.T) {
		nstest.Enter(t)
		systemctl := nstest.Systemd(t, map[string]string{"x.service": "[Service]\nExecStart=/bin/sleep 1000\n"})
		if out, err := systemctl("start", "x.service"); err != nil {
			t.Fatal(err, out)
		}
		if _, err := os.Lstat("/run/systemd/private"); err != nil {
			t.Error(err)
		}
	})
	if _, after := os.Lstat("/run/systemd/private"); (before == nil) != (after == nil) {
		t.Errorf("outside: %v before, %v after", before, after)
	}
}
