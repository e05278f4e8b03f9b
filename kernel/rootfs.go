// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/kernel/internal/mounts"
)

// rootFaults checks the BPF file system of the root.
func (r *Root) rootFaults() (out []Fault) {
	add := func(text, remedy string) {
		out = append(out, Fault{Object: r.path, Kind: FaultRoot, Text: text, Remedy: remedy})
	}
	for _, device := range r.others() {
		n := len(recordCache{}.read(r, r.recordsAt(device)))
		if n == 0 {
			continue
		}
		if at := mounts.At(device); at != "" {
			add(fmt.Sprintf("%v: %d instances are hidden; they keep working, but cannot be changed", ErrCovered, n), mounts.Uncover(r.path, at))
			continue
		}
		add(fmt.Sprintf("the BPF file system with %d pinned instances is no longer mounted: none of them works", n),
			remedyApply+", with its seeds; mount it again first if another process has it: nsenter -m")
	}
	if mounts.ReadOnlyBPF(r.path) {
		add(ErrReadOnly.Error()+": no changes are possible, and members get no slots", "mount -o remount,rw "+mounts.Word(mounts.Above(r.path)))
	}
	return out
}

// others returns the file systems previously used by the root, according to their records. It ignores file systems of
// other mount namespaces.
func (r *Root) others() (out []uint64) {
	entries, err := r.files().ReadDir(r.recordsPath())
	if err != nil {
		return nil
	}
	space, _ := mounts.Namespace()
	now, boot := r.device(), fmt.Sprintf("%.8s", bootID())
	for _, e := range entries {
		number, of, _ := strings.Cut(e.Name(), "-")
		device, err := strconv.ParseUint(number, 10, 64)
		if err != nil || of != boot || device == now {
			continue
		}
		var rec rootRecord
		b, err := r.files().ReadFile(filepath.Join(r.recordsPath(), e.Name(), rootRecordName))
		if err != nil || json.Unmarshal(b, &rec) != nil {
			continue
		}
		elsewhere := rec.Host && (mounts.BPF("/proc/1/root"+r.path) == device || !mounts.Visible("/proc/1/root"))
		if rec.Mounts == space || rec.Host && !elsewhere {
			out = append(out, device)
		}
	}
	slices.Sort(out)
	return out
}

// Usable returns an error for a root outside a BPF file system, with hidden pins, or mounted read-only. A writer would
// otherwise create everything again beside working pins.
func (r *Root) Usable() error {
	for _, device := range r.others() {
		if at := mounts.At(device); at != "" && len(recordCache{}.read(r, r.recordsAt(device))) > 0 {
			return fmt.Errorf("pin root %s: %w: %s", r.path, ErrCovered, mounts.Uncover(r.path, at))
		}
	}
	if mounts.ReadOnlyBPF(r.path) {
		return fmt.Errorf("pin root %s: %w: mount -o remount,rw %s", r.path, ErrReadOnly, mounts.Word(mounts.Above(r.path)))
	}
	return r.Located()
}
