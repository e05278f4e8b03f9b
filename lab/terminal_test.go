// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var sequence = regexp.MustCompile("\x1b\\[[?0-9;]*[A-Za-z]")

// The picture always fits 80 columns and 24 lines, and includes the newest log line.
func TestTerminalFits(t *testing.T) {
	var out bytes.Buffer
	term := NewTerminal(&out, strings.Repeat("title ", 30), nil)
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
	term := NewTerminal(&out, "title", nil)
	term.Show([]string{"one", "two"})
	out.Reset()
	term.Show([]string{"one", "three"})
	if got := out.String(); got != "\x1b[4;1H\x1b[Kthree" {
		t.Errorf("wrote %q", got)
	}
}

// A line fills the screen's last column. In a real terminal the cursor stays there, so a clearing behind the line would
// erase its last character.
func TestTerminalFullLines(t *testing.T) {
	var out bytes.Buffer
	term := NewTerminal(&out, "title", nil)
	defer term.Close()
	term.Show([]string{strings.Repeat("x", 80)})
	full := regexp.MustCompile(`(?:─{80}|x{80})(?:\x1b\[0m)?\x1b\[K`)
	if cut := full.FindString(out.String()); cut != "" {
		t.Errorf("the last character is cleared in %q", cut)
	}
}

// The screen has the terminal's size, and follows it: sentences are wrapped again, tables are cut with a mark.
func TestTerminalResize(t *testing.T) {
	var out bytes.Buffer
	columns, rows := 120, 40
	term := NewTerminal(&out, "title", func() (int, int) { return columns, rows })
	defer term.Close()
	term.Log("%s", strings.Repeat("word ", 22)+"end")
	table := strings.Repeat("column  ", 13) + "last"
	term.Print("  " + table)
	for _, c := range []struct {
		columns, rows int
		whole         bool
	}{{120, 40, true}, {80, 24, false}, {100, 30, false}, {40, 10, false}, {10, 3, false}, {1, 1, false}, {120, 40, true}} {
		columns, rows = c.columns, c.rows
		out.Reset()
		term.Show([]string{"picture"})
		lines := term.lines()
		text := sequence.ReplaceAllString(strings.Join(lines, "\n"), "")
		if len(lines) > rows || rows >= 10 && len(lines) != rows {
			t.Errorf("%dx%d: %d lines", columns, rows, len(lines))
		}
		for l := range strings.SplitSeq(text, "\n") {
			if n := utf8.RuneCountInString(l); n > columns {
				t.Errorf("%dx%d: %d columns in %q", columns, rows, n, l)
			}
		}
		if rows >= 10 && (strings.Contains(text, table) != c.whole || strings.Contains(text, "…") == c.whole || !strings.Contains(text, "end")) {
			t.Errorf("%dx%d:\n%s", columns, rows, text)
		}
		if strings.Contains(out.String(), "\x1b[2J") != (rows != 40) && c.columns != 120 {
			t.Errorf("%dx%d: old lines stay: %q", columns, rows, out.String())
		}
	}
}

// Colours mark states, commands and results. NO_COLOR turns them off.
func TestTerminalColours(t *testing.T) {
	for _, no := range []string{"", "1"} {
		t.Setenv("NO_COLOR", no)
		var out bytes.Buffer
		term := NewTerminal(&out, "title", nil)
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
	term := NewTerminal(&out, "title", nil)
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

// A command's table fits the screen: its widest columns follow below the rows. Other lines stay.
func TestFoldTables(t *testing.T) {
	table := []string{
		"$ weir steer status",
		"telemetry: udp :9991  by source",
		"by source",
		"  SLOT  STATE     MEMBER                              LAST DROP  QUEUE",
		"  0     admitted  pidfile /run/nfacctd-0/nfacctd.pid  never      0 B/8.0 MiB 0/128",
		"  1     empty     -                                   never      -",
		"  slot 1 is empty: no member is configured",
	}
	want := []string{
		table[0], table[1], table[2],
		"  SLOT  STATE     LAST DROP  QUEUE",
		"  0     admitted  never      0 B/8.0 MiB 0/128",
		"      MEMBER pidfile /run/nfacctd-0/nfacctd.pid",
		"  1     empty     never      -",
		table[6],
	}
	if got := foldTables(table, 72); !slices.Equal(got, want) {
		t.Errorf("%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := foldTables(table, 100); !slices.Equal(got, table) {
		t.Errorf("with room:\n%s", strings.Join(got, "\n"))
	}
}
