// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Watcher follows a running experiment: a terminal, a log, or nothing.
type Watcher interface {
	// Log reports the current step and its reason, in one sentence.
	Log(format string, a ...any)
	// Show draws the state of the experiment as lines of at most 80 columns. Calls may come many times a
	// second.
	Show(lines []string)
}

type nobody struct{}

func (nobody) Log(string, ...any) {}
func (nobody) Show([]string)      {}

// Log is a Watcher. It writes lines with the time since the start of the run.
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

// Show does nothing: a log cannot show a changing picture.
func (l *Log) Show([]string) {}
