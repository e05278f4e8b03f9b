// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

// maxPath is the most bytes of a Unix socket's path: sun_path of sockaddr_un, with its end. An abstract name has no end.
const maxPath = 107

// CheckPath refuses the path of a Unix socket for its length, of which the kernel says no more than EINVAL.
func CheckPath(path string) error {
	most := maxPath
	if strings.HasPrefix(path, "@") {
		most++
	}
	if len(path) > most {
		return fmt.Errorf("the socket %s: its path has %d bytes, and %d are the most: choose a shorter one", path, len(path), most)
	}
	return nil
}

// RemoveStale removes the Unix socket that a killed process left at a path, so that another can listen there. Anything but a
// socket stays, and is an error: the path may be a mistyped one, of a configuration for instance.
func RemoveStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("the socket %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("the socket %s: there is a file that is no socket, which stays as it is: choose another path", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the socket %s: %w", path, err)
	}
	return nil
}
