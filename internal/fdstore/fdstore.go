// SPDX-License-Identifier: Apache-2.0

// Package fdstore leaves descriptors with systemd while a service restarts: its file
// descriptor store (FileDescriptorStoreMax=, sd_notify(3)). The next process finds them
// as it finds sockets of activation, by name ([Take]); they stay there until [Remove].
package fdstore

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"
)

// socketEnv names the service manager's socket, which it sets for services that have a store.
const socketEnv = "NOTIFY_SOCKET"

// errNone says that this process has no service manager to leave anything with.
var errNone = errors.New("no service manager listens: $" + socketEnv + " is not set")

// batch is how many descriptors go in one message; the kernel takes 253 (SCM_MAX_FD).
const batch = 200

// Available says whether there is a service manager. Whether it stores anything is the
// unit's FileDescriptorStoreMax=: what is more is closed.
func Available() bool { return os.Getenv(socketEnv) != "" }

// Put leaves duplicates of descriptors under a name, and waits until the manager has
// them: before that the process must not end.
func Put(name string, fds ...int) error {
	for len(fds) > 0 {
		n := min(len(fds), batch)
		// FDPOLL=0: a connection that its peer closes is not for the manager to judge.
		if err := notify("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", fds[:n]); err != nil {
			return err
		}
		fds = fds[n:]
	}
	return barrier(5 * time.Second)
}

var (
	mu        sync.Mutex
	inherited []*os.File // not taken yet
	loaded    bool
)

// Take is what this process found under names that begin so. It stays in the store, and it is the caller's from then on.
func Take(prefix string) (out []*os.File) {
	mu.Lock()
	defer mu.Unlock()
	if !loaded {
		inherited, loaded = activation.Files(true), true
	}
	var rest []*os.File
	for _, f := range inherited {
		if strings.HasPrefix(f.Name(), prefix) {
			out = append(out, f)
		} else {
			rest = append(rest, f)
		}
	}
	inherited = rest
	return out
}

// Remove takes what has a name out of the store.
func Remove(name string) error {
	if err := notify("FDSTOREREMOVE=1\nFDNAME="+name, nil); err != nil {
		return err
	}
	return barrier(5 * time.Second)
}

func notify(state string, fds []int) error {
	path := os.Getenv(socketEnv)
	if path == "" {
		return errNone
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("the service manager: %w", err)
	}
	defer c.Close()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	// Not WriteMsgUnix: it refuses an address of its own connection.
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		_, sent = unix.SendmsgN(int(fd), []byte(state), oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
		return sent != unix.EAGAIN && sent != unix.EINTR
	})
	if err = errors.Join(err, sent); err != nil {
		return fmt.Errorf("the service manager: %w", err)
	}
	return nil
}

// barrier waits until the manager has dealt with all that it was told (sd_notify_barrier(3)).
func barrier(limit time.Duration) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = notify("BARRIER=1", []int{int(w.Fd())})
	w.Close()
	if err != nil {
		return err
	}
	if err := r.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	if _, err := r.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the service manager has not answered in %v", limit)
	}
	return nil // it has closed its end
}
