// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

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
