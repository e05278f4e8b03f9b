// SPDX-License-Identifier: Apache-2.0

package cast

import (
	"bufio"
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/picture/picturetest"
	"github.com/weir-project/weir/lab"
)

// A recording of a terminal holds all of its output. Its picture is the kept screen.
func TestRecorder(t *testing.T) {
	r := New("weir-lab demo x", lab.Columns, lab.Rows)
	term := lab.NewTerminal(r, "weir-lab demo x", nil)
	term.Show([]string{"slot 0  serving", "slot 1  dead"})
	term.Log("a & b < c")
	term.Print("NAME     STATE  AGE")
	term.Print("$ weir steer status", "✓ all is well")
	r.Still()
	term.Close()
	cast, err := r.Cast()
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(bytes.NewReader(cast))
	lines.Scan()
	var head struct{ Version, Width, Height int }
	if err := json.Unmarshal(lines.Bytes(), &head); err != nil || head.Version != 2 || head.Width != 80 || head.Height != 24 {
		t.Errorf("%v: %s", err, lines.Text())
	}
	var output strings.Builder
	last := -1.0
	for lines.Scan() {
		var e []any
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil || len(e) != 3 || e[1] != "o" || e[0].(float64) < last {
			t.Fatalf("%v: %s", err, lines.Text())
		}
		last = e[0].(float64)
		output.WriteString(e[2].(string))
	}
	for _, want := range []string{"\x1b[?1049h", "a & b < c", "$ weir steer status", "\x1b[?1049l"} {
		if !strings.Contains(output.String(), want) {
			t.Errorf("%q is missing in %q", want, output.String())
		}
	}
	svg := r.SVG()
	for _, problem := range picturetest.Problems(svg) {
		t.Error(problem)
	}
	for _, want := range []string{"a &amp; b &lt; c", `class="typed">$ weir steer status<`, `class="green">serving<`, `class="red">dead<`, "prefers-color-scheme: dark"} {
		if !strings.Contains(string(svg), want) {
			t.Errorf("%q is missing in\n%s", want, svg)
		}
	}
	if regexp.MustCompile(`>[^<]*  [^<]*</text>`).Match(svg) {
		t.Errorf("spaces between columns collapse in browsers:\n%s", svg)
	}
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if len(svg) > 60<<10 {
		t.Errorf("%d bytes", len(svg))
	}
}

// Sequences may be split between two writes.
func TestScreenSplitSequence(t *testing.T) {
	s := newScreen(10, 3)
	for _, c := range strings.SplitAfter("\x1b[2;3H\x1b[1mab\x1b[0mc\x1b[K", "") {
		s.write(c)
	}
	got := s.runs()[1]
	if len(got) != 2 || got[0] != (run{2, "ab", "1"}) || got[1] != (run{4, "c", ""}) {
		t.Errorf("%v", got)
	}
}

// Lines after the last one move the screen up.
func TestScreenScrolls(t *testing.T) {
	s := newScreen(10, 2)
	s.write("one\r\ntwo\r\nthree")
	if got := s.runs(); got[0][0].text != "two" || got[1][0].text != "three" {
		t.Errorf("%v", got)
	}
}
