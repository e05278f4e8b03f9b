// SPDX-License-Identifier: Apache-2.0

// Package cast records the output of a terminal, as an asciicast and as a picture of its last screen.
package cast

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Recorder is the terminal of a recorded run.
type Recorder struct {
	title         string
	columns, rows int
	begin         time.Time

	mu     sync.Mutex
	events []event
	screen *screen
	still  [][]run
}

type event struct {
	at   time.Duration
	text string
}

// New returns a recorder. Time begins now.
func New(title string, columns, rows int) *Recorder {
	return &Recorder{title: title, columns: columns, rows: rows, begin: time.Now(), screen: newScreen(columns, rows)}
}

// Write records output.
func (r *Recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, event{time.Since(r.begin), string(b)})
	r.screen.write(string(b))
	return len(b), nil
}

// Still keeps the present screen for the picture.
func (r *Recorder) Still() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.still = r.screen.runs()
}

// Cast returns the recording, in version 2 of the format of asciinema.
func (r *Recorder) Cast() ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	head := struct {
		Version   int               `json:"version"`
		Width     int               `json:"width"`
		Height    int               `json:"height"`
		Timestamp int64             `json:"timestamp"`
		Title     string            `json:"title"`
		Env       map[string]string `json:"env"`
	}{2, r.columns, r.rows, r.begin.Unix(), r.title, map[string]string{"TERM": "xterm-256color"}}
	if err := e.Encode(head); err != nil {
		return nil, err
	}
	for _, v := range r.events {
		if err := e.Encode([]any{float64(v.at.Milliseconds()) / 1000, "o", v.text}); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), nil
}

// The size of a character and the margin around the screen, in pixels.
const (
	charWidth  = 8.43
	charHeight = 18
	margin     = 16
)

// head is the begin of the picture. Its colours follow the reader's scheme.
const head = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" role="img">
<title>%[3]s</title>
<style>
text { font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328 }
.frame { fill: #f6f8fa; stroke: #d0d7de }
.dim { fill: #656d76 } .bold { font-weight: bold } .red { fill: #b42318 } .green { fill: #116329 } .yellow { fill: #7d4e00 } .typed { fill: #0550ae; font-weight: bold }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .frame { fill: #161b22; stroke: #30363d }
.dim { fill: #8b949e } .red { fill: #ff8c82 } .green { fill: #56d364 } .yellow { fill: #e3b341 } .typed { fill: #79c0ff }
}
</style>
<rect class="frame" x="0.5" y="0.5" width="%[4]d" height="%[5]d" rx="8"/>
`

// classes are the classes of the terminal's styles.
var classes = map[string]string{"1": "bold", "2": "dim", "31": "red", "32": "green", "33": "yellow", "1;36": "typed"}

var escape = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;")

// SVG returns the picture of the kept screen, or of the present one.
func (r *Recorder) SVG() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := r.still
	if lines == nil {
		lines = r.screen.runs()
	}
	w, h := int(float64(r.columns)*charWidth)+2*margin, r.rows*charHeight+2*margin
	var b bytes.Buffer
	fmt.Fprintf(&b, head, w, h, escape.Replace(r.title), w-1, h-1)
	for row, parts := range lines {
		y := margin + row*charHeight + 14
		for _, p := range parts {
			class := ""
			if c := classes[p.style]; c != "" {
				class = fmt.Sprintf(" class=%q", c)
			}
			for _, c := range columns(p) {
				n := float64(len([]rune(c.text))) * charWidth
				// With textLength columns stay aligned in every font.
				fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" textLength=\"%.1f\"%s>%s</text>\n", margin+float64(c.column)*charWidth, y, n, class, escape.Replace(c.text))
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// columns splits a run at each group of spaces, because browsers draw only one of them.
func columns(r run) (out []run) {
	at := r.column
	for {
		gap := strings.Index(r.text, "  ")
		if gap < 0 {
			return append(out, run{at, r.text, r.style})
		}
		rest := strings.TrimLeft(r.text[gap:], " ")
		if gap > 0 {
			out = append(out, run{at, r.text[:gap], r.style})
		}
		at += len([]rune(r.text)) - len([]rune(rest))
		r.text = rest
	}
}
