// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/kernel/internal/flock"
)

// tellAfter is the waiting time before Lock reports the wait.
const tellAfter = time.Second

var waiting struct {
	sync.Mutex
	tell func(text string)
}

// OnWait makes Lock call tell once for each wait of more than 1 s. The text names the lock's holder.
func OnWait(tell func(text string)) {
	waiting.Lock()
	defer waiting.Unlock()
	waiting.tell = tell
}

func tellWait(text string) {
	waiting.Lock()
	tell := waiting.tell
	waiting.Unlock()
	if tell != nil {
		tell(text)
	}
}

// lockOwner describes the process with the write lock, or returns "" if it is unknown.
func (r *Root) lockOwner() string {
	pid := flock.Owner(filepath.Join(r.path, lockDir))
	if pid == "" {
		return ""
	}
	return fmt.Sprintf("process %s (%s)", pid, flock.Command(pid))
}

// Locked reports whether a process holds the write lock.
func (r *Root) Locked() bool { return flock.Owner(filepath.Join(r.path, lockDir)) != "" }

const servingName = "+serve"

// ClaimServing marks this process as the server of the root until its exit or release. other describes another server,
// if any.
func (r *Root) ClaimServing() (release func(), other string) {
	path := filepath.Join(r.recordsPath(), servingName)
	for range 3 { // another process's closeServing may remove the file, or hold it briefly
		if r.makeRecords(r.recordsPath()) != nil {
			break
		}
		f, err := r.files().OpenFile(path, os.O_RDWR|os.O_CREATE, 0o640)
		if err != nil {
			continue
		}
		ok, err := flock.Try(f)
		held, _ := f.Stat()
		if now, gone := os.Stat(path); err == nil && ok && gone == nil && os.SameFile(held, now) {
			_ = f.Truncate(0)
			_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0)
			return func() { f.Close(); r.closeServing() }, ""
		}
		b := make([]byte, 16)
		n, _ := f.ReadAt(b, 0)
		f.Close()
		pid := strings.TrimSpace(string(b[:n]))
		other = fmt.Sprintf("process %s (%s)", pid, flock.Command(pid))
		time.Sleep(time.Millisecond)
	}
	return func() {}, other
}

// closeServing removes the file of an ended weir serve, and an empty directory of records.
func (r *Root) closeServing() {
	dir := r.recordsPath()
	if all, _ := r.files().ReadDir(dir); len(all) == 1 && all[0].Name() == servingName {
		if f, err := r.files().OpenFile(filepath.Join(dir, servingName), os.O_RDONLY, 0); err == nil {
			if ok, err := flock.Try(f); err == nil && ok {
				_ = r.files().Remove(filepath.Join(dir, servingName))
			}
			f.Close()
		}
	}
	_ = r.files().Remove(dir) // fails unless empty, as intended
}
