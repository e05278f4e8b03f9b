// SPDX-License-Identifier: Apache-2.0

package kernel

import "os"

// Claim takes work that goes with a published instance, so that one process at a
// time does it: work that takes long, and so is not done under the lock of the
// root. ok is false while another has it. The claim ends with release, and with
// the process. It gives no right to change anything; whoever may read the
// instance can take it.
func (r *Root) Claim(i Instance) (release func(), ok bool, err error) {
	dir, err := os.Open(r.dir(i))
	if err != nil {
		return nil, false, r.explainOpen(r.dir(i), err)
	}
	if ok, err = tryFlock(dir); err != nil || !ok {
		dir.Close()
		return nil, false, err
	}
	return func() { dir.Close() }, true, nil
}
