// SPDX-License-Identifier: Apache-2.0

package host

import (
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
	kernel.RecordDir = was
	warnings = nil
	if err := w.Apply(t.Context(), c, func(Done) {}); err != nil || len(warnings) > 0 {
		t.Errorf("records can be written again: %v, %q", err, warnings)
	}
}
