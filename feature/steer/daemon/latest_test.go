// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/kernel"
)

// A note of a start in the future is forged. It ends no weir steer run --replace, now or later.
func TestLatestInTheFuture(t *testing.T) {
	was := kernel.RecordDir
	kernel.RecordDir = filepath.Join(t.TempDir(), "records")
	defer func() { kernel.RecordDir = was }()
	s := &supervisor{root: kernel.OpenRoot("/sys/fs/bpf/latest"), began: kernel.Boottime()}
	s.Slot = slots.Slot{Scope: "1", Service: "web"}
	who, err := slots.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	path := s.root.KeptPath(s.latestName())
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		began    uint64
		outdated bool
	}{"later": {s.began + 1, true}, "earlier": {s.began - 1, false}, "in an hour": {s.began + 3600e9, false}, "at the end of time": {math.MaxUint64, false}} {
		text, err := json.Marshal(latest{c.began, kernel.BootID(), who})
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := s.outdated(); errors.Is(err, errOutdated) != c.outdated {
			t.Errorf("a start %s: %v", name, err)
		}
	}
}
