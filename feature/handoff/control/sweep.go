// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"
)

// agentSocket is the form of an agent's socket: its kind, the inode number of its network namespace, and a name if the kind has
// several in one namespace.
var agentSocket = regexp.MustCompile(`^[a-z]+-[0-9]{10}(-.+)?\.sock$`)

// staleAfter is the age from which a socket without a listener counts as left behind. An agent that starts has its socket
// for a moment before it listens there.
const staleAfter = time.Minute

// sweep removes the sockets of killed agents. Nobody else does: the number of a network namespace that is gone may never come
// back, and so no agent takes the socket over.
func sweep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type() != fs.ModeSocket || !agentSocket.MatchString(e.Name()) {
			continue
		}
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) < staleAfter {
			continue
		}
		removeDead(filepath.Join(dir, e.Name()), info)
	}
}

// removeDead removes a socket that nobody listens at.
func removeDead(path string, info fs.FileInfo) {
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		c.Close()
	case errors.Is(err, unix.ECONNREFUSED): // a listener that is merely busy gives EAGAIN
		// Meanwhile another agent may have replaced it by its own.
		if now, err := os.Lstat(path); err == nil && os.SameFile(info, now) {
			_ = os.Remove(path) // the next agent tries again
		}
	}
}

// Sweep removes the sockets of killed agents.
func Sweep() { sweep(dir) }

// Clear removes the socket of a killed agent of which nothing is left: no other agent is about to listen there. A running agent keeps
// its socket until it ends.
func Clear(name string) { clearSocket(Path(name)) }

func clearSocket(path string) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
		removeDead(path, info)
	}
}
