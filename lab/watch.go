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
	// Print adds lines as they are: a command and its output, a result.
	Print(lines ...string)
	// Show draws the state of the experiment as lines of at most 80 columns. Calls may come many times a
	// second.
	Show(lines []string)
}

type nobody struct{}

func (nobody) Log(string, ...any) {}
func (nobody) Print(...string)    {}
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

// Print indents the lines to the text of the log.
func (l *Log) Print(lines ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range lines {
		fmt.Fprintf(l.W, "          %s\n", line)
	}
}

// Show does nothing: a log cannot show a changing picture.
func (l *Log) Show([]string) {}

// Both is a Watcher for two others.
type Both [2]Watcher

func (b Both) Log(format string, a ...any) {
	b[0].Log(format, a...)
	b[1].Log(format, a...)
}

func (b Both) Print(lines ...string) {
	b[0].Print(lines...)
	b[1].Print(lines...)
}

func (b Both) Show(lines []string) {
	b[0].Show(lines)
	b[1].Show(lines)
}
