// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/mountinfo"
	"golang.org/x/sys/unix"
)

const (
	systemd    = "/usr/lib/systemd/systemd"
	systemdRun = "/run/systemd"
	managerDir = systemdRun + "/manager" // its runtime directory
	unitDir    = systemdRun + "/config/systemd/user"
)

// Systemd starts a real systemd for the test and presents it as the host's. It runs in user mode,
// which does not require process 1. In the test's own mounts, /run/systemd shows a booted systemd,
// and root's D-Bus clients reach this manager. units are unit files by name. The result runs
// systemctl against the manager and returns its output. Call it after [Enter], or in a package with
// tests under [Main].
func Systemd(t testing.TB, units map[string]string) (systemctl func(args ...string) (string, error)) {
	t.Helper()
	NeedRoot(t)
	if _, err := os.Stat(systemd); err != nil {
		t.Skip("need: tool systemd")
	}
	if err := hideHostSystemd(); err != nil {
		t.Fatalf("nstest: %v", err)
	}
	for name, text := range units {
		if err := os.WriteFile(filepath.Join(unitDir, name), []byte(text), 0o644); err != nil {
			t.Fatalf("nstest: %v", err)
		}
	}
	cgroups := makeCgroups(t)
	stop, err := startManager(cgroups)
	if err != nil {
		t.Fatalf("nstest: systemd: %v", err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("nstest: systemd: %v", err)
		}
	})
	return func(args ...string) (string, error) {
		c := exec.Command("systemctl", append([]string{"--user"}, args...)...)
		c.Env = managerEnv()
		out, err := c.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return string(out), err
	}
}

// hideHostSystemd covers the paths to the host's own manager.
func hideHostSystemd() error {
	ns, err := mountNamespace()
	if err != nil {
		return err
	}
	if _, ours := furnished.Load(ns); !ours {
		return errors.New("not in a mount namespace of our own; call Enter first")
	}
	if err := os.MkdirAll(systemdRun, 0o755); err != nil {
		return err
	}
	for _, dir := range []string{systemdRun, "/run/dbus"} {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			continue // no system bus to hide
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
		}
	}
	// sd_booted(3) checks the first.
	for _, dir := range []string{systemdRun + "/system", managerDir, unitDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	return os.Symlink(managerDir+"/systemd/private", systemdRun+"/private")
}

func managerEnv() []string {
	return []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + managerDir,
		"XDG_RUNTIME_DIR=" + managerDir, "XDG_CONFIG_HOME=" + systemdRun + "/config",
	}
}

// makeCgroups creates a cgroup for the manager in each of its hierarchies: the unified one, and
// systemd's own on hosts with one.
func makeCgroups(t testing.TB) []string {
	t.Helper()
	all, err := mountinfo.Read()
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	var dirs []string
	for _, m := range all {
		if m.Type != "cgroup2" && !strings.HasSuffix(m.Super, ",name=systemd") {
			continue
		}
		dir := filepath.Join(m.Point, fmt.Sprintf("weir-nstest-%d-%d", os.Getpid(), unix.Gettid()))
		if slices.Contains(dirs, dir) {
			continue
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatalf("nstest: %v", err)
		}
		dirs = append(dirs, dir)
		t.Cleanup(func() {
			if err := removeTree(dir); err != nil {
				t.Errorf("nstest: %v", err)
			}
		})
	}
	return dirs
}

// removeTree removes a cgroup and its descendants. Just killed processes keep theirs for a moment.
func removeTree(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	})
	slices.Reverse(dirs)
	for _, d := range dirs {
		if err := Poll(Timeout(), func() error { return unix.Rmdir(d) }); err != nil {
			return fmt.Errorf("remove cgroup %s: %w", d, err)
		}
	}
	return err
}

func startManager(cgroups []string) (stop func() error, err error) {
	// The manager uses the cgroup of its own process.
	const join = `for c in "$@"; do echo $$ >"$c/cgroup.procs" || exit; done; exec ` + systemd + ` --user --log-target=console`
	c := exec.Command("/bin/sh", append([]string{"-c", join, "sh"}, cgroups...)...)
	c.Env = managerEnv()
	var log bytes.Buffer
	c.Stdout, c.Stderr = &log, &log
	// Services may keep the log open too long.
	c.WaitDelay = time.Second
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := c.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	stop = func() error {
		// SIGTERM makes a user manager stop its units and exit.
		_ = c.Process.Signal(unix.SIGTERM)
		select {
		case err := <-ended:
			if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
				return fmt.Errorf("%w\n%s", err, log.Bytes())
			}
			return nil
		case <-time.After(30 * time.Second):
			_ = c.Process.Kill()
			<-ended
			return fmt.Errorf("did not end within 30 s\n%s", log.Bytes())
		}
	}
	for range 1500 {
		if _, err := os.Stat(systemdRun + "/private"); err == nil {
			return stop, nil
		}
		select {
		case err := <-ended:
			return nil, fmt.Errorf("ended at once: %w\n%s", err, log.Bytes())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil, errors.Join(errors.New("not ready within 30 s"), stop())
}
