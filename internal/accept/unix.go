// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// Unix listens at a Unix socket. If another weir serve answers there, it returns [ErrAnswers]. It
// removes a stale socket.
func Unix(path string) (net.Listener, error) {
	if err := CheckPath(path); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("create the socket's directory: %w", err)
	}
	if c, err := net.Dial("unix", path); err == nil {
		c.Close()
		return nil, fmt.Errorf("another weir serve answers on %s: %w: stop it, or choose another --socket", path, ErrAnswers)
	}
	if err := RemoveStale(path); err != nil {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}
