// SPDX-License-Identifier: Apache-2.0

package awake

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/nstest"
)

// aheadChild makes of the test's program one that is ahead, and does what it says.
const (
	aheadChild = "WEIR_AWAKE_AHEAD"
	plain      = "1"
)

func TestMain(m *testing.M) {
	if os.Getenv(aheadChild) != "" {
		Ahead()
		os.Stdout.WriteString("ready\n")
		if os.Getenv(aheadChild) != plain {
			go keepFirst(os.Getenv(aheadChild))
		}
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// startAhead starts a program that is ahead, in a session of its own, and returns when it is. It is there until in is closed.
func startAhead(t *testing.T, nice int, what string) (c *exec.Cmd, in io.Closer) {
	t.Helper()
	c = exec.Command("nice", "-n", strconv.Itoa(nice), os.Args[0])
	c.Env = append(os.Environ(), aheadChild+"="+what)
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return c, in
}

// All threads of a process come before others, and those of one that somebody has set stay as they are.
func TestAhead(t *testing.T) {
	nstest.NeedRoot(t)
	for _, was := range []int{0, 5} {
		c, in := startAhead(t, was, plain)
		want := was
		if was == 0 {
			want = ahead
		}
		dir := "/proc/" + strconv.Itoa(c.Process.Pid)
		threads, err := os.ReadDir(dir + "/task")
		if err != nil || len(threads) < 2 {
			t.Fatalf("%d threads, %v", len(threads), err)
		}
		for _, th := range threads {
			id, _ := strconv.Atoi(th.Name())
			if n, err := unix.Getpriority(unix.PRIO_PROCESS, id); err != nil || 20-n != want {
				t.Errorf("started with nice %d: a thread has %d, want %d (%v)", was, 20-n, want, err)
			}
		}
		if b, err := os.ReadFile(dir + "/autogroup"); err == nil && was == 0 && !strings.HasSuffix(strings.TrimSpace(string(b)), strconv.Itoa(ahead)) {
			t.Errorf("its session: %q, want nice %d", b, ahead)
		}
		in.Close()
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}
