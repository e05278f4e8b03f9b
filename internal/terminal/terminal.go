// SPDX-License-Identifier: Apache-2.0

// Package terminal shows the progress of long work on one line of a terminal, and clears it at the end. A pipe, a file
// and a dumb terminal get no byte. The line has no colours, so NO_COLOR changes nothing. Text is wrapped at the width of
// a terminal.
package terminal

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	delay    = 300 * time.Millisecond // shorter work shows nothing
	interval = 100 * time.Millisecond
)

// Is reports whether w is a terminal with cursor movements. TERM=dumb has none.
func Is(w io.Writer) bool {
	f, ok := w.(interface{ Fd() uintptr })
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Columns returns the width of a terminal, also of a dumb one; 0 for other writers and unknown widths.
func Columns(w io.Writer) int {
	if b, ok := w.(*Buffer); ok {
		w = b.to
	}
	f, ok := w.(interface{ Fd() uintptr })
	if !ok {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}

// Buffer keeps text for a writer, and has its width.
type Buffer struct {
	strings.Builder
	to io.Writer
}

// NewBuffer returns an empty buffer of text for w.
func NewBuffer(w io.Writer) *Buffer { return &Buffer{to: w} }

// Wrap breaks the lines of text at spaces for the terminal w. Further parts of a line begin with indent. Text for other
// writers stays as it is. A longer word stays whole, because a person copies paths and commands.
func Wrap(w io.Writer, text, indent string) string {
	return WrapAt(Columns(w), text, indent)
}

// WrapAt is Wrap for a number of columns. 0 leaves text as it is.
func WrapAt(columns int, text, indent string) string {
	if columns == 0 {
		return text
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		for utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > columns {
			at := breakBefore(line, columns)
			if at < 0 {
				break
			}
			b.WriteString(line[:at] + "\n")
			line = indent + line[at+1:]
		}
		b.WriteString(line)
	}
	return b.String()
}

// breakBefore returns the index of the last space at or before a column, or of the first one behind it. The spaces that
// begin the line do not count. It returns -1 if there is none.
func breakBefore(line string, column int) int {
	last, n, begun := -1, 0, false
	for i, r := range line {
		if begun && r == ' ' && (n <= column || last < 0) {
			last = i
		}
		if n > column && last >= 0 {
			break
		}
		begun = begun || r != ' '
		n++
	}
	return last
}

// Colours reports whether w is a terminal that may get colours: see https://no-color.org.
func Colours(w io.Writer) bool { return Is(w) && os.Getenv("NO_COLOR") == "" }

// Erase empties the screen of a terminal. Other writers get an empty line.
func Erase(w io.Writer) {
	if Is(w) {
		_, _ = io.WriteString(w, "\x1b[H\x1b[2J")
	} else {
		_, _ = io.WriteString(w, "\n")
	}
}

// Line shows the progress of long work. All methods of a nil Line do nothing. They may run concurrently.
type Line struct {
	w     io.Writer
	ended chan struct{}

	mu          sync.Mutex
	work        string
	done, total int64
	since       time.Time
	text        string // on the screen now
	stopped     bool
}

var (
	shownLock sync.Mutex
	shown     *Line // the line in use
)

// Start begins a line on w. It returns nil if w is no terminal.
func Start(w io.Writer, work string) *Line {
	if !Is(w) {
		return nil
	}
	l := &Line{w: w, work: work, since: time.Now(), ended: make(chan struct{})}
	shownLock.Lock()
	shown = l
	shownLock.Unlock()
	go l.draw()
	return l
}

func (l *Line) draw() {
	next := time.NewTimer(delay)
	defer next.Stop()
	for {
		select {
		case <-l.ended:
			return
		case <-next.C:
			l.mu.Lock()
			if !l.stopped {
				l.show(l.picture())
			}
			l.mu.Unlock()
			next.Reset(interval)
		}
	}
}

// show replaces the text on the screen. The cursor returns to the beginning of the line. Needs mu.
func (l *Line) show(text string) {
	if text != l.text {
		l.text = text
		_, _ = io.WriteString(l.w, "\r"+text+"\x1b[K\r") // \x1b[K clears the rest of the old text
	}
}

// picture returns the text, at most one line of the screen. Needs mu.
func (l *Line) picture() string {
	text := fmt.Sprintf("%s… %.0f s", l.work, time.Since(l.since).Seconds())
	if l.total > 0 {
		const width = 20
		part := float64(min(l.done, l.total)) / float64(l.total)
		full := int(part * width)
		text = fmt.Sprintf("%s [%s%s] %3.0f %%, %.0f s", l.work, strings.Repeat("#", full), strings.Repeat(".", width-full), 100*part, time.Since(l.since).Seconds())
	}
	columns := cmp.Or(Columns(l.w), 80)
	if utf8.RuneCountInString(text) >= columns {
		text = string([]rune(text)[:columns-1])
	}
	return text
}

// Step names the next part of the work. Its count begins at zero, the clock runs on.
func (l *Line) Step(work string) {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.work, l.done, l.total = work, 0, 0
	}
}

// Of sets the finished part of the work.
func (l *Line) Of(done, total int64) {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.done, l.total = done, total
	}
}

// Reader counts the bytes read from r as the finished part, if r is a regular file.
func (l *Line) Reader(r io.Reader) io.Reader {
	f, ok := r.(*os.File)
	if l == nil || !ok {
		return r
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return r
	}
	return &counted{line: l, r: r, total: info.Size()}
}

type counted struct {
	line        *Line
	r           io.Reader
	done, total int64
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.done += int64(n)
	c.line.Of(c.done, c.total)
	return n, err
}

// Writer returns a writer for other text on the same terminal. The line stays below it.
func (l *Line) Writer(w io.Writer) io.Writer {
	if l == nil {
		return w
	}
	return &above{line: l, w: w}
}

type above struct {
	line *Line
	w    io.Writer
}

func (a *above) Write(b []byte) (int, error) {
	l := a.line
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clear()
	return a.w.Write(b)
}

// clear empties the line. Needs mu.
func (l *Line) clear() {
	if l.text != "" {
		l.show("")
	}
}

// Stop clears the line. Nothing is drawn afterwards.
func (l *Line) Stop() {
	if l != nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !l.stopped {
			l.stopped = true
			close(l.ended)
			l.clear()
		}
	}
}

// Clear stops the line in use before a last message of the process.
func Clear() {
	shownLock.Lock()
	defer shownLock.Unlock()
	shown.Stop()
}
