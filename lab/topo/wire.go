// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/ethtool"
)

// threadLimit is the longest wait for a new kernel thread.
const threadLimit = 60 * time.Second

// Wire creates a cable with a receiving kernel thread for each end, and returns the threads' pids. Over a
// plain veth pair the *sender's* system call carries a packet up the receiver's stack and is charged with
// the receiver's work. With threads (threaded NAPI, Linux 5.12) the ends are charged like two hosts with a
// wire between them. Interface names must be unique on the machine and at most five bytes long, because the
// threads are found by them.
func Wire(a, b End) (pidA, pidB int, err error) {
	if err := Cable(a, b); err != nil {
		return 0, 0, err
	}
	// veth polls only with GRO, and only packets from an end without TSO.
	for _, e := range []End{a, b} {
		err := e.NS.Do(func() error {
			return errors.Join(ethtool.Set(e.Name, unix.ETHTOOL_STSO, false), ethtool.Set(e.Name, unix.ETHTOOL_SGRO, true))
		})
		if err != nil {
			return 0, 0, fmt.Errorf("set the offloads of %s: %w", e.Name, err)
		}
	}
	if pidA, err = threaded(a); err == nil {
		pidB, err = threaded(b)
	}
	return pidA, pidB, err
}

// threaded gives one end its thread and waits for it.
func threaded(e End) (int, error) {
	err := e.NS.Do(func() error { return writeSysfs("class/net/"+e.Name+"/threaded", "1") })
	if err != nil {
		return 0, fmt.Errorf("give %s a receiving thread: %w (threaded NAPI needs Linux 5.12)", e.Name, err)
	}
	for deadline := time.Now().Add(threadLimit); ; time.Sleep(time.Millisecond) {
		if pid, ok := napiThread(e.Name); ok {
			return pid, nil
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("no kernel thread napi/%s-… after %s", e.Name, threadLimit)
		}
	}
}

// napiThread finds the kernel thread by its name: napi/INTERFACE-ID, cut after 15 bytes on old kernels.
func napiThread(name string) (int, bool) {
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, f := range files {
		comm, err := os.ReadFile(f)
		if err == nil && strings.HasPrefix(string(comm), "napi/"+name+"-") {
			pid, err := strconv.Atoi(strings.Split(f, "/")[2])
			return pid, err == nil
		}
	}
	return 0, false
}

// writeSysfs writes to a file of a sysfs for the thread's network namespace. The sysfs at /sys shows the
// interfaces of the mounting namespace. This one is not mounted anywhere.
func writeSysfs(path, value string) error {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open a sysfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("create a sysfs: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("create a mount of a sysfs: %w", err)
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	_, err = io.WriteString(f, value)
	return errors.Join(err, f.Close())
}
