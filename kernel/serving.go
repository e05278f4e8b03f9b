// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const servingName = "+serve"

// ClaimServing says that this process serves the root until it ends, or release is called.
// Where another one does already, other names it.
func (r *Root) ClaimServing() (release func(), other string) {
	release = func() {}
	dir := r.recordsOf()
	if r.makeRecords(dir) != nil {
		return release, ""
	}
	f, err := os.OpenFile(filepath.Join(dir, servingName), os.O_RDWR|os.O_CREATE, 0o640)
	if err != nil {
		return release, ""
	}
	if ok, err := tryFlock(f); err != nil || !ok {
		b := make([]byte, 16)
		n, _ := f.ReadAt(b, 0)
		f.Close()
		pid := strings.TrimSpace(string(b[:n]))
		return release, fmt.Sprintf("process %s (%s)", pid, commandOf(pid))
	}
	_ = f.Truncate(0)
	_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
	return func() { f.Close() }, ""
}
