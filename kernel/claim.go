// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Claim takes work that goes with a published instance, so that one process at a
// time does it: work that takes long, and so is not done under the lock of the
// root. ok is false while another has it. The claim ends with release, and with
// the process. It gives no right to change anything.
func (r *Root) Claim(i Instance) (release func(), ok bool, err error) {
	dir, err := os.Open(r.dir(i))
	if err != nil {
		return nil, false, r.explainOpen(r.dir(i), err)
	}
	switch err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		dir.Close()
		return nil, false, nil
	case err != nil:
		dir.Close()
		return nil, false, fmt.Errorf("claiming %s: %w", i, err)
	}
	return func() { dir.Close() }, true, nil
}
