// SPDX-License-Identifier: Apache-2.0

// Package fdstore leaves descriptors with systemd during a restart of a service, in its file
// descriptor store (FileDescriptorStoreMax=, sd_notify(3)). The next process finds them by name
// like sockets of activation ([Take]). They stay there until [Remove].
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

// socketEnv names the service manager's socket. The manager sets it for services with a store.
const socketEnv = "NOTIFY_SOCKET"

// errNone reports a process without a service manager.
var errNone = errors.New("no service manager listens: $" + socketEnv + " is not set")

// batch is the number of descriptors per message. The kernel accepts 253 (SCM_MAX_FD).
const batch = 200

// Available reports whether there is a service manager. The unit's FileDescriptorStoreMax= limits
// the store, and the manager closes excess descriptors.
func Available() bool { return os.Getenv(socketEnv) != "" }

// Put stores duplicates of descriptors under a name, and waits until the manager has them. The
// process must not end earlier.
func Put(name string, fds ...int) error {
	for len(fds) > 0 {
		n := min(len(fds), batch)
		// FDPOLL=0: the manager must not drop connections closed by their peers.
		if err := notify("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", fds[:n]); err != nil {
			return err
		}
		fds = fds[n:]
	}
	return barrier(5 * time.Second)
}

var (
	mu        sync.Mutex
	inherited []*os.File // not yet taken
	loaded    bool
)

// Take returns the inherited descriptors with names of a prefix. They also stay in the store. The
// caller owns the returned files.
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

// Remove removes the descriptors of a name from the store.
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
	// Not WriteMsgUnix: it rejects an address on a connected socket.
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

// barrier waits until the manager has processed all notifications (sd_notify_barrier(3)).
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
		return fmt.Errorf("no answer from the service manager within %v", limit)
	}
	return nil // the manager has closed its end
}
