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

// agentSocket matches the names of agents' sockets: the kind and the inode number of the network
// namespace. A name follows if a namespace can have several agents of the kind.
var agentSocket = regexp.MustCompile(`^[a-z]+-[0-9]{10}(-.+)?\.sock$`)

// staleAfter is the age of a socket without a listener before it counts as abandoned. A starting
// agent has its socket for a moment before it listens.
const staleAfter = time.Minute

// sweep removes the sockets of killed agents. The number of a deleted network namespace may never
// be used again, so no later agent would replace the socket.
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

// removeDead removes a socket without a listener.
func removeDead(path string, info fs.FileInfo) {
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		c.Close()
	case errors.Is(err, unix.ECONNREFUSED): // a busy listener returns EAGAIN
		// Meanwhile another agent may have replaced the socket.
		if now, err := os.Lstat(path); err == nil && os.SameFile(info, now) {
			_ = os.Remove(path) // the next agent tries again
		}
	}
}

// Sweep removes the sockets of killed agents.
func Sweep() { sweep(dir) }

// Clear removes the socket of a killed agent whose configuration is gone, so no other agent is
// about to listen there. A running agent keeps its socket.
func Clear(name string) { clearSocket(Path(name)) }

func clearSocket(path string) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
		removeDead(path, info)
	}
}
