// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestGracefulSignal: the signal depends on the executable of a process, also after an upgrade has removed the file.
func TestGracefulSignal(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(sleep)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]syscall.Signal{
		"nginx": unix.SIGQUIT, "haproxy": unix.SIGUSR1, "apache2": unix.SIGWINCH, "php-fpm8.2": unix.SIGQUIT, "collector": unix.SIGTERM,
	} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, program, 0o755); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(file, "1000")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		for _, when := range []string{"there", "removed"} {
			if got := gracefulSignal(c.Process.Pid); got != want {
				t.Errorf("%s, its file is %s: %v, want %v", name, when, got, want)
			}
			os.Remove(file)
		}
		c.Process.Kill()
		c.Wait()
	}
	if got := gracefulSignal(1 << 30); got != unix.SIGTERM {
		t.Errorf("no such process: %v", got)
	}
}
