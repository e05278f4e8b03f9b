// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// A terminal shows the work, its finished part and other lines above it. In the end the line is empty.
func TestLine(t *testing.T) {
	t.Setenv("TERM", "xterm")
	for _, no := range []string{"", "1"} {
		t.Setenv("NO_COLOR", no)
		p := nstest.NewPTY(t, 60)
		l := Start(p.File, "reading")
		p.Wait(`\rreading… 0 s\x1b\[K\r`)
		l.Of(1, 4)
		p.Wait(`\rreading \[#####\.{15}\]  25 %, 0 s\x1b\[K\r`)
		l.Step(strings.Repeat("long ", 30))
		p.Wait(`\r(long ){11}long\x1b\[K\r`)
		l.Writer(p.File).Write([]byte("a message\n"))
		p.Wait(`\r\x1b\[K\ra message`)
		p.Wait(`\r(long ){11}long\x1b\[K\r`)
		l.Stop()
		l.Stop()
		p.Wait(`\r\x1b\[K\r$`)
		if colour := regexp.MustCompile(`\x1b\[[0-9;]*m`); colour.MatchString(p.Text()) {
			t.Errorf("NO_COLOR=%q: %q has a colour", no, p.Text())
		}
	}
}

// Neither a pipe, a buffer nor a dumb terminal gets a byte.
func TestNoLine(t *testing.T) {
	t.Setenv("TERM", "xterm")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if Start(w, "reading") != nil || Start(&bytes.Buffer{}, "reading") != nil {
		t.Error("a pipe has a line")
	}
	p := nstest.NewPTY(t, 80)
	if !Is(p.File) || !Colours(p.File) {
		t.Error("a pseudoterminal is no terminal")
	}
	t.Setenv("NO_COLOR", "1")
	if !Is(p.File) || Colours(p.File) {
		t.Error("NO_COLOR is not honoured")
	}
	t.Setenv("TERM", "dumb")
	l := Start(p.File, "reading")
	if l != nil {
		t.Error("a dumb terminal has a line")
	}
	l.Step("next")
	l.Of(1, 2)
	l.Stop()
	if l.Reader(r) != r || l.Writer(w) != w {
		t.Error("a missing line changes a reader or writer")
	}
}

// A terminal's lines end at its width, between words. A longer word stays whole. Pipes get the text unchanged.
func TestWrap(t *testing.T) {
	p := nstest.NewPTY(t, 20)
	for text, want := range map[string]string{
		"exactly 20 columns..\n":                      "exactly 20 columns..\n",
		"! the second word is too much\nshort\n":      "! the second word is\n  too much\nshort\n",
		"/a/path/longer/than/the/terminal is wrong\n": "/a/path/longer/than/the/terminal\n  is wrong\n",
		"    a/word/without/any/space\n":              "    a/word/without/any/space\n",
	} {
		if got := Wrap(p.File, text, "  "); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
		if got := Wrap(NewBuffer(p.File), text, "  "); got != want {
			t.Errorf("a buffer for the terminal gets %q, want %q", got, want)
		}
		if got := Wrap(&bytes.Buffer{}, text, "  "); got != text {
			t.Errorf("a buffer gets %q, want %q", got, text)
		}
	}
}
