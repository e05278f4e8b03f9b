// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"regexp"
	"slices"
	"strings"
	"sync"
)

// Log keeps the text written to it. It is safe for concurrent use, for example by a logger.
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

// Has reports whether a line contains all parts.
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

// Find returns the first match of re with its groups, or nil.
func (l *Log) Find(re *regexp.Regexp) []string { return re.FindStringSubmatch(l.String()) }

// String returns all text.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
