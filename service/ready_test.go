// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/pidfd"
	"golang.org/x/sys/unix"
)

func shell(script string, args ...string) *Ready {
	return &Ready{Command: append([]string{"/bin/sh", "-c", script, "sh"}, args...), Timeout: time.Minute}
}

func TestReadyCheck(t *testing.T) {
	nstest.NeedRoot(t)
	asked := Asked{Service: "telemetry", Slot: 3, PID: os.Getpid(), Netns: "blue"}
	for script, want := range map[string]string{
		"exit 0": "",
		"echo noise; echo 'no route' >&2; exit 3": "not ready: /bin/sh: exit status 3: no route",
		"kill -9 $$": "not ready: /bin/sh: signal: killed",
		`test "$WEIR_SERVICE/$WEIR_SLOT/$WEIR_PID/$WEIR_NETNS" = telemetry/3/$PPID/blue || { env; exit 1; }`: "",
		"sleep 1000 & exit 0": "", // its leftover process is killed
		// It has a session of its own: it cannot type into our terminal.
		"read -r pid comm state parent group session rest </proc/$$/stat; test $session = $$": "",
	} {
		began := time.Now()
		err := shell(script).Check(t.Context(), here(t), asked)
		if got := fmt.Sprint(err); err != nil && got != want || err == nil && want != "" || want != "" && !errors.Is(err, ErrNotReady) {
			t.Errorf("%s: %v, want %q", script, err, want)
		}
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("%s took %s", script, took)
		}
	}
	err := (&Ready{Command: []string{"/nonexistent/check"}}).Check(t.Context(), here(t), asked)
	if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "cannot start its check") {
		t.Errorf("a command that is not there: %v", err)
	}
}

// A hanging check is killed with all its children.
func TestReadyCheckHangs(t *testing.T) {
	nstest.NeedRoot(t)
	file := filepath.Join(t.TempDir(), "child")
	hung := shell(`sleep 1000 & echo $! >"$1"; wait`, file)
	var text []byte
	// On a stalled machine nothing has started within so short a time.
	for _, hung.Timeout = range []time.Duration{500 * time.Millisecond, 5 * time.Second, 30 * time.Second} {
		err := hung.Check(t.Context(), here(t), Asked{PID: os.Getpid()})
		if !errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), "did not end within "+hung.Timeout.String()) {
			t.Errorf("it says %v", err)
		}
		if text, err = os.ReadFile(file); err == nil && len(text) > 0 {
			break
		}
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	ends(t, child)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := shell("sleep 1000").Check(ctx, here(t), Asked{PID: os.Getpid()}); !errors.Is(err, context.Canceled) {
		t.Errorf("ended from outside: %v", err)
	}
}

// ends waits until a process is a zombie or gone.
func ends(t *testing.T, pid int) {
	t.Helper()
	err := nstest.Poll(nstest.Timeout(), func() error {
		state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(state), ") Z ") { // until it is reaped
			return nil
		}
		return fmt.Errorf("process %d outlives the check", pid)
	})
	if err != nil {
		unix.Kill(pid, unix.SIGKILL)
		t.Fatal(err)
	}
}

// A daemon left by a check in a session of its own ends with the check, after a normal end and after a timeout.
func TestReadyCheckEndsDaemons(t *testing.T) {
	nstest.NeedRoot(t)
	file := filepath.Join(t.TempDir(), "daemon")
	for what, c := range map[string]struct{ end, want string }{"by itself": {"exit 0", "<nil>"}, "hangs": {"sleep 1000", "not ready: "}} {
		os.Remove(file)
		// The daemon writes its number and starts another daemon before the check goes on.
		check := shell(`setsid sh -c 'setsid sleep 1000 & echo $! $$ >"$1.new"; mv "$1.new" "$1"; sleep 1000' sh "$1" >/dev/null 2>&1 &
			while ! test -e "$1"; do sleep 0.01; done; `+c.end, file)
		check.Timeout = 5 * time.Second
		if err := check.Check(t.Context(), here(t), Asked{PID: os.Getpid()}); !strings.HasPrefix(fmt.Sprint(err), c.want) {
			t.Errorf("%s: %v", what, err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range strings.Fields(string(text)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				t.Fatal(err)
			}
			ends(t, pid)
		}
	}
}

func TestReadyCheckInNetns(t *testing.T) {
	nstest.NeedRoot(t)
	ns, err := netns.Create("weir-ready")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Delete("weir-ready") })
	defer ns.Close()
	want := fmt.Sprintf("net:[%d]", ns.Inode())
	if err := shell(`test "$(readlink /proc/self/ns/net)" = "$1"`, want).Check(t.Context(), ns, Asked{PID: os.Getpid()}); err != nil {
		t.Errorf("it does not run in the service's namespace: %v", err)
	}
}

func TestReadyValidate(t *testing.T) {
	both := []string{"udp :53", "tcp :53"}
	for want, r := range map[string]*Ready{
		"":                                 {Command: []string{"true"}, Interval: time.Second, Timeout: time.Minute},
		"ready: no command":                {},
		"ready: interval 1ms: want at":     {Command: []string{"true"}, Interval: time.Millisecond},
		"ready: interval -1s: want at":     {Command: []string{"true"}, Interval: -time.Second},
		"ready: timeout 11m0s: want at":    {Command: []string{"true"}, Timeout: 11 * time.Minute},
		"ready: timeout -1ns: want at mos": {Command: []string{"true"}, Timeout: -1},
	} {
		err := Member{PID: 1, Ready: r}.validate(spec(t, both).Listen)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v: %v, want %q", r, err, want)
		}
	}
	if (&Ready{}).Every() != DefaultReadyInterval || (&Ready{}).Limit() != DefaultReadyTimeout {
		t.Error("the defaults are not used")
	}
}

// A check has the member's user, groups and rights, and nothing of this process's environment.
func TestReadyCheckRunsAsTheMember(t *testing.T) {
	nstest.NeedRoot(t)
	t.Setenv("WEIR_TEST_SECRET", "root's")
	member := exec.Command("/bin/cat")
	member.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 64001, Gid: 64002, Groups: []uint32{64003, 64004}}}
	stdin, err := member.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := member.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stdin.Close(); member.Wait() }()
	report := `echo "$(id -u) $(id -g) $(id -G) ${WEIR_TEST_SECRET:-clean}" $(grep -E 'NoNewPrivs|CapEff' /proc/self/status); exit 1`
	const want = "64001 64002 64002 64003 64004 clean CapEff: 0000000000000000 NoNewPrivs: 1"
	err = shell(report).Check(t.Context(), here(t), Asked{PID: member.Process.Pid})
	if err == nil || !strings.HasSuffix(err.Error(), ": "+want) {
		t.Errorf("the check ran as %v, want %s", err, want)
	}
	err = shell("exit 0").Check(t.Context(), here(t), Asked{PID: member.Process.Pid, Start: 1})
	if !errors.Is(err, pidfd.ErrGone) {
		t.Errorf("the check of a process with a reused number: %v", err)
	}
}

// A program that other users can change or replace is not run, under any name.
func TestReadyCheckRefusesProgramsOfOthers(t *testing.T) {
	nstest.NeedRoot(t)
	dir := t.TempDir()
	put := func(name string, uid int, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err == nil {
			err = os.WriteFile(path, []byte("#!/bin/sh\nexit 0\n"), 0o755)
		}
		if err = errors.Join(err, os.Chmod(path, mode), os.Chown(path, uid, 0)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ours := put("ours", 0, 0o755)
	group := put("group", 0, 0o775)
	link, open := filepath.Join(dir, "link"), put("open/check", 0, 0o755)
	if err := errors.Join(os.Chown(group, 0, 64002), os.Symlink(ours, link), os.Lchown(link, 64001, 0), os.Chmod(filepath.Dir(open), 0o777)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		ours:                        "",
		put("theirs", 64001, 0o755): "belongs to user 64001",
		put("all", 0, 0o757):        "is writable by users other than its owner",
		group:                       "is writable by users other than its owner",
		link:                        "belongs to user 64001",
		open:                        "is writable by users other than its owner",
		"ours":                      "does not exist",
		"./ours":                    "relative path",
	} {
		err := (&Ready{Command: []string{path}}).Check(t.Context(), here(t), Asked{PID: os.Getpid()})
		if want == "" && err != nil || want != "" && (!errors.Is(err, ErrNotReady) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}
