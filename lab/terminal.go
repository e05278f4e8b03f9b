// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// The size of a screen without a known one. Pictures are made for it.
const (
	Columns = 80
	Rows    = 24
)

// refresh is the interval of complete drawings, which repair a disturbed screen. Between them only changed lines are
// written.
const refresh = 5 * time.Second

// Terminal is a Watcher for a terminal. It shows the picture above and the log below, newest line last.
type Terminal struct {
	w     io.Writer
	title string
	since time.Time
	plain bool // without colours
	size  func() (columns, rows int)
	end   func() // of the signals

	mu            sync.Mutex
	picture       []string
	said          []saying
	columns, rows int      // of the screen
	drawn         []string // the lines on the screen
	at            time.Time
	closed        bool
}

// saying is a line of the log.
type saying struct {
	text, style string
	output      bool // of a command
}

// NewTerminal takes the screen of w until Close. It uses colours unless NO_COLOR is set. w may be a recorder. size
// returns the present size of the screen; nil stands for 80 columns and 24 lines.
func NewTerminal(w io.Writer, title string, size func() (columns, rows int)) *Terminal {
	t := &Terminal{w: w, title: title, since: time.Now(), plain: os.Getenv("NO_COLOR") != "", size: size}
	if size == nil {
		t.size = func() (int, int) { return Columns, Rows }
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, unix.SIGWINCH)
	go func() {
		for range resized {
			t.mu.Lock()
			t.draw()
			t.mu.Unlock()
		}
	}()
	t.end = func() { signal.Stop(resized); close(resized) }
	fmt.Fprint(w, "\x1b[?1049h\x1b[?25l\x1b[2J") // the alternate screen, no cursor, cleared
	return t
}

// SizeOf returns the size of the terminal behind f.
func SizeOf(f *os.File) func() (columns, rows int) {
	return func() (int, int) {
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		if err != nil || size.Col == 0 || size.Row == 0 {
			return Columns, Rows
		}
		return int(size.Col), int(size.Row)
	}
}

// Close restores the screen.
func (t *Terminal) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		t.end()
		fmt.Fprint(t.w, "\x1b[?25h\x1b[?1049l")
	}
}

func (t *Terminal) Log(format string, a ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	line := fmt.Sprintf("%5.1fs  %s", time.Since(t.since).Seconds(), fmt.Sprintf(format, a...))
	t.add(saying{text: line})
}

// Print indents the lines to the text of the log. Tables wider than the screen are folded.
func (t *Terminal) Print(lines ...string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	columns, _ := t.size()
	for _, line := range foldTables(lines, columns-8) {
		style := styleOf(line)
		t.add(saying{"        " + line, style, style == ""})
	}
}

// add draws another line, and forgets lines without room on a screen.
func (t *Terminal) add(s saying) {
	const most = 500
	t.said = append(t.said, s)
	if len(t.said) > 2*most {
		t.said = append([]saying(nil), t.said[most:]...)
	}
	t.draw()
}

// wrapped returns the lines of a saying on the screen. Continuations are indented. A row of a table has columns with
// several spaces between, and is cut.
func (t *Terminal) wrapped(s saying) []string {
	indent := "        "
	if s.output {
		text := strings.TrimLeft(s.text, " ")
		if strings.Contains(text, "  ") {
			return []string{clip(s.text, t.columns)}
		}
		indent = s.text[:len(s.text)-len(text)] + "  "
	}
	first := wrap(s.text, t.columns)[0]
	out := []string{t.line(s.style, clip(first, t.columns))}
	if rest := strings.TrimPrefix(s.text[len(first):], " "); rest != "" {
		for _, part := range wrap(rest, max(t.columns-len(indent), 1)) {
			out = append(out, t.line(s.style, clip(indent+part, t.columns)))
		}
	}
	return out
}

func (t *Terminal) Show(picture []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.picture = picture
	t.draw()
}

// draw writes the changed lines. Needs mu.
func (t *Terminal) draw() {
	if t.closed {
		return
	}
	var b strings.Builder
	if columns, rows := t.size(); columns != t.columns || rows != t.rows {
		if t.drawn != nil {
			b.WriteString("\x1b[2J") // the terminal has wrapped or cut the old lines
		}
		t.columns, t.rows, t.drawn = columns, rows, nil
	}
	lines := t.lines()
	whole := len(t.drawn) != len(lines) || time.Since(t.at) > refresh
	for i, l := range lines {
		if whole || l != t.drawn[i] {
			fmt.Fprintf(&b, "\x1b[%d;1H\x1b[K%s", i+1, l) // \x1b[K after a full line would clear its last character
		}
	}
	if whole {
		t.at = time.Now()
	}
	t.drawn = lines
	if b.Len() > 0 {
		_, _ = io.WriteString(t.w, b.String())
	}
}

// lines returns the screen.
func (t *Terminal) lines() []string {
	rule := t.paint(dim, strings.Repeat("─", t.columns))
	lines := []string{t.paint(bold, clip(t.title, t.columns)), rule}
	for _, l := range t.picture[:min(len(t.picture), max(t.rows-7, 0))] {
		lines = append(lines, t.words(clip(l, t.columns)))
	}
	if len(t.picture) > 0 {
		lines = append(lines, rule)
	}
	room := max(t.rows-1-len(lines), 0)
	var log []string
	for i := len(t.said) - 1; i >= 0 && len(log) < room; i-- {
		log = append(t.wrapped(t.said[i]), log...)
	}
	lines = append(lines, log[max(0, len(log)-room):]...)
	for len(lines) < t.rows-1 {
		lines = append(lines, "")
	}
	lines = append(lines, t.paint(dim, clip("Ctrl-C ends the run and removes its traces", t.columns)))
	return lines[:min(len(lines), t.rows)]
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
func (t *Terminal) line(style, l string) string {
	if style != "" {
		text := strings.TrimLeft(l, " ")
		return l[:len(l)-len(text)] + t.paint(style, text)
	}
	if len(l) > 8 && l[5] == 's' && l[6] == ' ' {
		return t.paint(dim, l[:6]) + l[6:]
	}
	return l
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

// clip cuts a line at the screen's end, and shows the cut.
func clip(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:max(width-1, 0)]) + "…"
}
