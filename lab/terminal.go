// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// The picture is made for this screen size.
const (
	columns = 80
	rows    = 24
)

// Terminal is a Watcher for a terminal of at least 80 columns and 24 lines. It shows the picture above and
// the log below, newest line last.
type Terminal struct {
	w     io.Writer
	title string
	since time.Time

	mu      sync.Mutex
	picture []string
	said    []string
	closed  bool
}

// NewTerminal takes the screen of w until Close.
func NewTerminal(w io.Writer, title string) *Terminal {
	t := &Terminal{w: w, title: title, since: time.Now()}
	fmt.Fprint(w, "\x1b[?1049h\x1b[?25l\x1b[2J") // the alternate screen, no cursor, cleared
	return t
}

// Close restores the screen.
func (t *Terminal) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		fmt.Fprint(t.w, "\x1b[?25h\x1b[?1049l")
	}
}

func (t *Terminal) Log(format string, a ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	line := fmt.Sprintf("%5.1fs  %s", time.Since(t.since).Seconds(), fmt.Sprintf(format, a...))
	for i, part := range wrap(line, columns-8) { // continuation lines are indented
		if i > 0 {
			part = "        " + part
		}
		t.said = append(t.said, part)
	}
	t.draw()
}

func (t *Terminal) Show(picture []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.picture = picture
	t.draw()
}

func (t *Terminal) draw() {
	if t.closed {
		return
	}
	lines := []string{t.title, strings.Repeat("─", columns)}
	lines = append(lines, t.picture...)
	if len(t.picture) > 0 {
		lines = append(lines, strings.Repeat("─", columns))
	}
	room := max(3, rows-1-len(lines)-1)
	lines = append(lines, t.said[max(0, len(t.said)-room):]...)
	for len(lines) < rows-1 {
		lines = append(lines, "")
	}
	lines = append(lines[:rows-1], "Ctrl-C ends the run and removes its traces")
	var b strings.Builder
	b.WriteString("\x1b[H")
	for i, l := range lines {
		b.WriteString(clip(l, columns))
		b.WriteString("\x1b[K") // clears the rest of the old line
		if i < len(lines)-1 {
			b.WriteString("\r\n")
		}
	}
	_, _ = io.WriteString(t.w, b.String())
}

// wrap breaks a line between words.
func wrap(s string, width int) []string {
	var out []string
	for utf8.RuneCountInString(s) > width {
		at := strings.LastIndexByte(s[:width], ' ')
		if at <= 0 {
			break
		}
		out = append(out, s[:at])
		s = s[at+1:]
	}
	return append(out, s)
}

func clip(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:width])
}
