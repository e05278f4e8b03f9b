// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"
)

var sequence = regexp.MustCompile("\x1b\\[[?0-9;]*[A-Za-z]")

// The picture always fits 80 columns and 24 lines, and includes the newest log line.
func TestTerminalFits(t *testing.T) {
	var out bytes.Buffer
	term := NewTerminal(&out, strings.Repeat("title ", 30))
	var picture []string
	for i := range 12 {
		picture = append(picture, strings.Repeat(fmt.Sprint(i), 100))
	}
	for i := range 50 {
		term.Log("sentence %d: %s", i, strings.Repeat("words and more ", 10))
	}
	term.Print(strings.Repeat("output ", 30), strings.Repeat("x", 200))
	term.Log("the last sentence")
	term.Show(picture)
	lines := term.lines()
	if len(lines) != Rows {
		t.Errorf("%d lines, want %d", len(lines), Rows)
	}
	for _, l := range lines {
		if n := utf8.RuneCountInString(sequence.ReplaceAllString(l, "")); n > Columns {
			t.Errorf("%d columns: %q", n, l)
		}
	}
	frame := strings.Join(lines, "\n")
	if !strings.Contains(frame, "the last sentence") || strings.Contains(frame, "sentence 3:") {
		t.Errorf("the newest lines are missing:\n%s", frame)
	}
}

// A drawing writes only the changed lines.
func TestTerminalWritesChanges(t *testing.T) {
	var out bytes.Buffer
	term := NewTerminal(&out, "title")
	term.Show([]string{"one", "two"})
	out.Reset()
	term.Show([]string{"one", "three"})
	if got := out.String(); got != "\x1b[4;1Hthree\x1b[K" {
		t.Errorf("wrote %q", got)
	}
}

// Colours mark states, commands and results. NO_COLOR turns them off.
func TestTerminalColours(t *testing.T) {
	for _, no := range []string{"", "1"} {
		t.Setenv("NO_COLOR", no)
		var out bytes.Buffer
		term := NewTerminal(&out, "title")
		term.Show([]string{"slot 0  serving", "slot 1  dead", "not up"})
		term.Print("$ weir status", "✓ it holds", "✗ it fails")
		for _, want := range []string{"\x1b[32mserving\x1b[0m", "\x1b[31mdead\x1b[0m", "\x1b[1;36m$ weir status\x1b[0m", "\x1b[32m✓ it holds\x1b[0m", "\x1b[31m✗ it fails\x1b[0m"} {
			if strings.Contains(out.String(), want) != (no == "") || strings.Contains(out.String(), "not \x1b") {
				t.Errorf("NO_COLOR=%q, %q in %q", no, want, out.String())
			}
		}
	}
}

// After Close the screen belongs to the shell: nothing more is drawn.
func TestTerminalClose(t *testing.T) {
	var out bytes.Buffer
	term := NewTerminal(&out, "title")
	term.Close()
	if !strings.HasSuffix(out.String(), "\x1b[?25h\x1b[?1049l") {
		t.Errorf("%q does not restore the screen at its end", out.String())
	}
	out.Reset()
	term.Log("late")
	term.Print("later")
	term.Show([]string{"latest"})
	term.Close()
	if out.Len() != 0 {
		t.Errorf("%q after Close", out.String())
	}
}
