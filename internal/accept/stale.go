// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// maxPath is the maximum length of a Unix socket's path in bytes: sun_path of sockaddr_un without
// its terminator. An abstract name has no terminator.
const maxPath = 107

// CheckPath rejects a Unix socket's path of excessive length. The kernel would only return EINVAL.
func CheckPath(path string) error {
	most := maxPath
	if strings.HasPrefix(path, "@") {
		most++
	}
	if len(path) > most {
		return fmt.Errorf("socket %s: its path has %d bytes, more than %d: choose a shorter one", path, len(path), most)
	}
	return nil
}

// RemoveStale removes a Unix socket left by a killed process, so another one can listen there. It
// fails for anything but a socket and leaves it alone. The path may be mistyped in a configuration,
// for example.
func RemoveStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("socket %s: another kind of file is there: choose another path", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	return nil
}
