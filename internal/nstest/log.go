// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Log keeps what is written to it, by whom and when it may be: a test gives it to a logger.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *Log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// Has says whether there is a line with all of the parts.
func (l *Log) Has(parts ...string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			return true
		}
	}
	return false
}

// Find returns what matches re, with its groups; nil where nothing does.
func (l *Log) Find(re *regexp.Regexp) []string { return re.FindStringSubmatch(l.String()) }

// String is all that was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
