// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// sources are the source names in the programs' debugging information: the compiler's own, and the
// names with another source directory. Their lengths are equal.
var sources = []struct{ here, there string }{
	{"././steer.bpf.c", "./b/steer.bpf.c"},
	{"././reuse.bpf.c", "./b/reuse.bpf.c"},
}

// Rebuild creates another build of the weir under test, as if compiled in another directory. Its BPF
// objects differ only in the name of their source, so weir treats them as another version.
func (w *Weir) Rebuild() error {
	b, err := os.ReadFile(w.binary)
	if err != nil {
		return err
	}
	for _, s := range sources {
		if n := bytes.Count(b, []byte(s.here)); n != 1 {
			return fmt.Errorf("%s holds the name %q %d times, want once: unexpected build", w.binary, s.here, n)
		}
		b = bytes.Replace(b, []byte(s.here), []byte(s.there), 1)
	}
	w.other = filepath.Join(w.env.Dir, "weir-rebuilt")
	return os.WriteFile(w.other, b, 0o755)
}

// Upgrade switches to the other build and returns weir's report, one step a line. Later commands use this
// build. Call Rebuild before.
func (w *Weir) Upgrade(ctx context.Context) ([]string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.binary, w.other = w.other, w.binary
	out, err := w.Run(ctx, "upgrade")
	if err != nil {
		return nil, err
	}
	steps := slices.Collect(strings.Lines(string(out)))
	if len(steps) == 0 || strings.HasPrefix(steps[0], "nothing") {
		return nil, fmt.Errorf("weir upgrade of another build did nothing: %s", out)
	}
	return steps, nil
}
