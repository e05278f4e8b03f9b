// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"
)

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
	out.Reset()
	term.Show(picture)
	frame := out.String()
	lines := strings.Split(strings.TrimPrefix(frame, "\x1b[H"), "\r\n")
	if len(lines) != rows {
		t.Errorf("%d lines, want %d", len(lines), rows)
	}
	for _, l := range lines {
		if n := utf8.RuneCountInString(strings.TrimSuffix(l, "\x1b[K")); n > columns {
			t.Errorf("%d columns: %q", n, l)
		}
	}
	if !strings.Contains(frame, "sentence 49") || strings.Contains(frame, "sentence 3:") {
		t.Errorf("the newest lines are missing:\n%s", frame)
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
	term.Show([]string{"later"})
	term.Close()
	if out.Len() != 0 {
		t.Errorf("%q after Close", out.String())
	}
}
