// SPDX-License-Identifier: Apache-2.0

package slots

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/kernel"
)

// Alive reports whether the process still runs.
func (p Process) Alive() bool {
	now, err := FindProcess(p.PID)
	return err == nil && now == p && Running(p.PID)
}

// Descendants returns the descendants of a process, the nearest first.
func Descendants(pid int) []int {
	var out []int
	for next := []int{pid}; len(next) > 0; next = next[1:] {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", next[0]))
		for _, l := range lists {
			b, _ := os.ReadFile(l)
			for f := range strings.FieldsSeq(string(b)) {
				if child, err := strconv.Atoi(f); err == nil {
					out, next = append(out, child), append(next, child)
				}
			}
		}
	}
	return out
}

// Process identifies a process uniquely: the kernel reuses PIDs.
type Process struct {
	PID   int
	Start uint64 // clock ticks since boot
}

// FindProcess returns the current process with a PID.
func FindProcess(pid int) (Process, error) {
	start, err := pidfd.StartTime(pid)
	return Process{pid, start}, err
}

// ProcessIn returns the process of an admitted row, or the zero Process.
func ProcessIn(pins *kernel.Opened, row uint32) (Process, error) {
	var s bpf.SteerSlot
	if err := pins.Maps["slots"].Lookup(row, &s); err != nil || RowState(s.State) != Admitted {
		return Process{}, err
	}
	return Process{int(s.Tgid), s.Start}, nil
}

// Sleep waits for d or until ctx is done, and returns the error of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
