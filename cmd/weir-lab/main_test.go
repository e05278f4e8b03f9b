// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/lab"
)

// asMain makes the test binary behave as weir-lab.
const asMain = "WEIR_LAB_TEST_MAIN"

func TestMain(m *testing.M) {
	lab.Enter()
	if os.Getenv(asMain) != "" {
		main()
	}
	nstest.Main(m)
}

func command(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), asMain+"=1")
	return cmd
}

func status(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

func TestExitStatus(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"list", 0, "telemetry    routers' IPFIX and BMP steered"},
		{"list --names", 0, "telemetry\n"},
		{"list x", 2, "unknown command"},
		{"run", 2, "accepts 1 arg"},
		{"run nothing", 2, `no experiment is named "nothing"; there are: [telemetry]`},
		{"run telemetry --slow", 2, "unknown flag: --slow"},
		{"run telemetry --quick --smoke", 2, "choose one"},
		{"nonsense", 2, "unknown command"},
	} {
		out, err := command(strings.Fields(c.args)...).CombinedOutput()
		if got := status(err); got != c.status || !strings.Contains(string(out), c.says) {
			t.Errorf("weir-lab %s: status %d, want %d, and %q in\n%s", c.args, got, c.status, c.says, out)
		}
	}
}

// Without root the lab says what to do, and with which status.
func TestNotRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root, to become someone else")
	}
	cmd := command("run", "telemetry", "--smoke")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if status(err) != exitCannot || !strings.Contains(string(out), "sudo") {
		t.Errorf("status %d: %s", status(err), out)
	}
}

// Ctrl-C at any moment ends the run soon and leaves nothing behind. The telemetry experiment interrupts
// itself when everything is there; these are earlier moments.
func TestInterrupt(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("need: root")
	}
	if _, err := lab.Find("nfacctd"); err != nil {
		t.Skip("need: tool nfacctd (Debian package pmacct)")
	}
	for _, after := range []time.Duration{50 * time.Millisecond, 300 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			var out bytes.Buffer
			cmd := command("run", "telemetry", "--smoke", "--json")
			cmd.Stderr = &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(after)
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			err := cmd.Wait()
			if took := time.Since(begin); took > 15*time.Second {
				t.Errorf("it took %s to end", took)
			}
			if status(err) == 0 {
				t.Errorf("status 0 of a run that was interrupted: %s", out.String())
			}
			if left := lab.LeftoversOf(cmd.Process.Pid); len(left) > 0 {
				t.Errorf("left behind: %v\n%s", left, out.String())
			}
		})
	}
}
