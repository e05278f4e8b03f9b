// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// An apply with unwritable records, for example on a full disk, works and reports the loss.
func TestApplyWarnsWithoutRecords(t *testing.T) {
	w := newWorld(t)
	was := kernel.RecordDir
	defer func() { kernel.RecordDir = was }()
	full := t.TempDir()
	if err := unix.Mount("none", full, "tmpfs", 0, "nr_inodes=1"); err != nil { // the directory itself uses one
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(full, 0); err != nil {
			t.Error(err)
		}
	}()
	kernel.RecordDir = filepath.Join(full, "records")
	var warnings []string
	c, err := ParseConfig("weir.yaml", []byte("filter: [{name: f, hook: nft, rules: [{match: 'udp.dstport == 9', action: drop}]}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	c.Warned = func(text string) { warnings = append(warnings, text) }
	for _, what := range []string{"first", "second"} {
		warnings = nil
		if err := w.Apply(t.Context(), c, func(Done) {}); err != nil {
			t.Fatal(err)
		}
		if all := strings.Join(warnings, "\n"); !strings.Contains(all, "damage will go unnoticed") || !strings.Contains(all, "no space left") {
			t.Errorf("%s apply: warnings %q", what, warnings)
		}
	}
	// A read-only file system is no failure of the change.
	if err := unix.Mount("", full, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for _, port := range []string{"9", "10"} {
		c, err := ParseConfig("weir.yaml", []byte("filter: [{name: f, hook: nft, rules: [{match: 'udp.dstport == "+port+"', action: drop}]}]\n"))
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Apply(t.Context(), c, func(Done) {}); err != nil {
			t.Errorf("read-only: %v", err)
		}
	}
	kernel.RecordDir = was
	warnings = nil
	if err := w.Apply(t.Context(), c, func(Done) {}); err != nil || len(warnings) > 0 {
		t.Errorf("records can be written again: %v, %q", err, warnings)
	}
}

// A record written to a full disk is written again by the next apply. A replacement that fails keeps the former one.
func TestRecordOfFullDisk(t *testing.T) {
	w := newWorld(t)
	was := kernel.RecordDir
	defer func() { kernel.RecordDir = was }()
	small := t.TempDir()
	if err := unix.Mount("none", small, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	}()
	kernel.RecordDir = filepath.Join(small, "records")
	records := func() (sizes []int64) {
		_ = filepath.WalkDir(kernel.RecordDir, func(path string, d os.DirEntry, err error) error {
			if err == nil && strings.HasSuffix(path, "+filter+f") {
				st, err := d.Info()
				if err != nil {
					t.Fatal(err)
				}
				sizes = append(sizes, st.Size())
			}
			return nil
		})
		return sizes
	}
	apply := func(port string) {
		t.Helper()
		w.apply(w.config("filter: [{name: f, hook: nft, rules: [{match: 'udp.dstport == %s', action: drop}]}]\n", port))
	}
	fill := filepath.Join(small, "fill")
	_ = os.WriteFile(fill, make([]byte, 1<<20), 0o600) // until it is full
	apply("9")
	if sizes := records(); len(sizes) > 1 || len(sizes) == 1 && sizes[0] == 0 {
		t.Errorf("on a full disk: records of %d bytes", sizes)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	apply("9")
	sizes := records()
	if len(sizes) != 1 || sizes[0] == 0 {
		t.Fatalf("with space again: records of %d bytes", sizes)
	}
	_ = os.WriteFile(fill, make([]byte, 1<<20), 0o600)
	apply("10")
	if now := records(); len(now) != 1 || now[0] == 0 {
		t.Errorf("full again: records of %d bytes, were %d", now, sizes)
	}
}
