// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// The picture is made for this screen size.
const (
	Columns = 80
	Rows    = 24
)

// refresh is the interval of complete drawings, which repair a resized window. Between them only changed
// lines are written.
const refresh = 5 * time.Second

// Terminal is a Watcher for a terminal of at least 80 columns and 24 lines. It shows the picture above and
// the log below, newest line last.
type Terminal struct {
	w     io.Writer
	title string
	since time.Time
	plain bool // without colours

	mu      sync.Mutex
	picture []string
	said    []saying
	drawn   []string // the lines on the screen
	at      time.Time
	closed  bool
}

// NewTerminal takes the screen of w until Close. It uses colours unless NO_COLOR is set. w may be a recorder.
func NewTerminal(w io.Writer, title string) *Terminal {
	t := &Terminal{w: w, title: title, since: time.Now(), plain: os.Getenv("NO_COLOR") != ""}
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
	t.add(line)
}

// Print indents the lines to the text of the log.
func (t *Terminal) Print(lines ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, line := range lines {
		t.add("        " + line)
	}
}

// add wraps a line, indents its continuation and draws.
func (t *Terminal) add(line string) {
	first := wrap(line, Columns)[0]
	style := styleOf(first)
	t.said = append(t.said, saying{first, style})
	if rest := strings.TrimPrefix(line[len(first):], " "); rest != "" {
		for _, part := range wrap(rest, Columns-8) {
			t.said = append(t.said, saying{"        " + part, style})
		}
	}
	t.draw()
}

// saying is a line of the log with its style.
type saying struct{ text, style string }

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
	lines := t.lines()
	var b strings.Builder
	whole := len(t.drawn) != len(lines) || time.Since(t.at) > refresh
	for i, l := range lines {
		if whole || l != t.drawn[i] {
			fmt.Fprintf(&b, "\x1b[%d;1H%s\x1b[K", i+1, l) // \x1b[K clears the rest of the old line
		}
	}
	if whole {
		t.at = time.Now()
	}
	t.drawn = lines
	_, _ = io.WriteString(t.w, b.String())
}

// lines returns the screen.
func (t *Terminal) lines() []string {
	rule := t.paint(dim, strings.Repeat("─", Columns))
	lines := []string{t.paint(bold, clip(t.title, Columns)), rule}
	for _, l := range t.picture[:min(len(t.picture), Rows-7)] {
		lines = append(lines, t.words(clip(l, Columns)))
	}
	if len(t.picture) > 0 {
		lines = append(lines, rule)
	}
	room := Rows - 1 - len(lines)
	for _, l := range t.said[max(0, len(t.said)-room):] {
		lines = append(lines, t.line(saying{clip(l.text, Columns), l.style}))
	}
	for len(lines) < Rows-1 {
		lines = append(lines, "")
	}
	return append(lines, t.paint(dim, "Ctrl-C ends the run and removes its traces"))
}

// Styles of the terminal (SGR).
const (
	bold   = "1"
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	cyan   = "1;36"
)

func (t *Terminal) paint(style, s string) string {
	if t.plain || s == "" {
		return s
	}
	return "\x1b[" + style + "m" + s + "\x1b[0m"
}

// styleOf returns the style of a typed command, a checked fact; "" for others.
func styleOf(l string) string {
	text := strings.TrimLeft(l, " ")
	switch {
	case strings.HasPrefix(text, "$ ") || strings.HasPrefix(text, "# "):
		return cyan
	case strings.HasPrefix(text, "✓"):
		return green
	case strings.HasPrefix(text, "✗"):
		return red
	}
	return ""
}

// line paints a line of the log. The time is dim.
func (t *Terminal) line(l saying) string {
	if l.style != "" {
		text := strings.TrimLeft(l.text, " ")
		return l.text[:len(l.text)-len(text)] + t.paint(l.style, text)
	}
	if len(l.text) > 8 && l.text[5] == 's' && l.text[6] == ' ' {
		return t.paint(dim, l.text[:6]) + l.text[6:]
	}
	return l.text
}

// states are the words with a colour in the picture, in a column of their own.
var states = regexp.MustCompile(`  (serving|up|starting|draining|dead|down|refused)\b`)

// words paints the states in a line of the picture.
func (t *Terminal) words(l string) string {
	return states.ReplaceAllStringFunc(l, func(word string) string {
		word = strings.TrimSpace(word)
		style := red
		switch word {
		case "serving", "up":
			style = green
		case "starting", "draining":
			style = yellow
		}
		return "  " + t.paint(style, word)
	})
}

// wrap breaks a line between words.
func wrap(s string, width int) []string {
	var out []string
	for utf8.RuneCountInString(s) > width {
		at := strings.LastIndexByte(string([]rune(s)[:width]), ' ')
		if strings.TrimSpace(s[:max(at, 0)]) == "" {
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
