// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Watcher is who follows a run while it goes: a person's terminal, a log, nobody.
type Watcher interface {
	// Say tells in one sentence what happens now, and why.
	Log(format string, a ...any)
	// Show draws the state of the experiment, as lines of at most 80 columns. Calls may come many times a second.
	Show(lines []string)
}

type nobody struct{}

func (nobody) Log(string, ...any) {}
func (nobody) Show([]string)      {}

// Log is a Watcher that writes what is said as lines with the time since the run began.
type Log struct {
	W     io.Writer
	Since time.Time

	mu sync.Mutex
}

func (l *Log) Log(format string, a ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.W, "[%6.1fs] %s\n", time.Since(l.Since).Seconds(), fmt.Sprintf(format, a...))
}

// Show does nothing: a log has no place for a picture that changes.
func (l *Log) Show([]string) {}
