// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
)

// weir serve logs waits for other processes, and none for itself.
func TestLogWait(t *testing.T) {
	var log strings.Builder
	tell := logWait(slog.New(slog.NewTextHandler(&log, nil)))
	tell(fmt.Sprintf("waiting for the lock on /sys/fs/bpf/weir, held by process %d (weir serve)", os.Getpid()))
	if log.Len() > 0 {
		t.Errorf("it waits for itself: %s", log.String())
	}
	tell(fmt.Sprintf("waiting for the lock on /sys/fs/bpf/weir, held by process %d1 (weir apply)", os.Getpid()))
	if s := log.String(); !strings.Contains(s, "level=INFO") || !strings.Contains(s, "1 (weir apply)") {
		t.Errorf("log: %q", s)
	}
}
