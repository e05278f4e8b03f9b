// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// sweepRecords removes records of other roots without pins: the records of instances without a network namespace, and
// everything about a root without other records. Nothing runs at such a root, so no other process removes them. The
// records of a recoverable instance stay.
func (h *Host) sweepRecords(ctx context.Context) {
	entries, _ := os.ReadDir(kernel.RecordDir)
	for _, e := range entries {
		path, err := url.PathUnescape(e.Name())
		if err != nil || !filepath.IsAbs(path) || path == h.Root.Path() || ctx.Err() != nil {
			continue
		}
		sweepRoot(ctx, path)
	}
}

// sweepTime is the time limit for the records of one root; the next weir serve tries again.
const sweepTime = time.Second

func sweepRoot(ctx context.Context, path string) {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return // its next weir command sweeps it
	}
	made, ok := makeParents(path)
	defer func() {
		for _, dir := range made {
			_ = os.Remove(dir) // fails unless empty, as intended
		}
	}()
	if !ok {
		return
	}
	r := kernel.OpenRoot(path)
	l, err := r.Lock(ctx) // removes the records of gone instances
	if err != nil {
		return
	}
	l.Unlock() // removes empty directories
	if l, err = r.Lock(ctx); err != nil {
		return
	}
	defer l.Unlock()
	rest, err := os.ReadDir(filepath.Join(kernel.RecordDir, url.PathEscape(path)))
	for _, e := range rest {
		if e.Name() != "+"+keptApplied && e.Name() != "+serve" {
			return // instances, or a change to be confirmed
		}
	}
	if all, ierr := l.Instances(""); err == nil && ierr == nil && len(all) == 0 {
		_ = l.Forget(keptApplied)
	}
}

// makeParents creates the directories above a root on a BPF file system, and returns them, the lowest first. ok is false
// if the root would be outside a BPF file system.
func makeParents(path string) (made []string, ok bool) {
	var missing []string
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		var st unix.Statfs_t
		err := unix.Statfs(dir, &st)
		if errors.Is(err, unix.ENOENT) && strings.Count(dir, "/") > 1 {
			missing = append(missing, dir)
			continue
		}
		if err != nil || st.Type != unix.BPF_FS_MAGIC {
			return nil, false
		}
		break
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := os.Mkdir(missing[i], 0o700); err != nil {
			return made, errors.Is(err, fs.ErrExist)
		}
		made = append([]string{missing[i]}, made...)
	}
	return made, true
}
