// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"net/url"
	"os"
	"path/filepath"

	"github.com/weir-project/weir/kernel"
)

// sweepRecords removes records of other roots without pins: the records of instances without a network namespace, and
// everything about a root without other records. Nothing runs at such a root, so no other process removes them. The
// records of a recoverable instance stay. The owner of the records chooses the names, so nothing is created for one.
func (h *Host) sweepRecords(ctx context.Context) {
	entries, _ := os.ReadDir(kernel.RecordDir)
	for _, e := range entries {
		path, err := url.PathUnescape(e.Name())
		if err != nil || !filepath.IsAbs(path) || path == h.Root.Path() || ctx.Err() != nil {
			continue
		}
		if r := kernel.OpenRoot(path); url.PathEscape(r.Path()) == e.Name() {
			r.SweepRecords(keptApplied)
		}
	}
}
