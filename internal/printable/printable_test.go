// SPDX-License-Identifier: Apache-2.0

package printable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"":                      "",
		"nfacctd@0.service":     "nfacctd@0.service",
		`dev-disk\x2dby`:        `dev-disk\x2dby`,
		"Zürich 東京 ✓":           "Zürich 東京 ✓",
		"\x1b[31mred\x1b[0m":    `\u001b[31mred\u001b[0m`,
		"a\nb\tc\rd":            `a\nb\tc\rd`,
		"\xff\xc3":              `\xff\xc3`,
		"\u009b31m":             `\u009b31m`,
		"x\x7f":                 `x\u007f`,
		"\u202egnp.exe":         `\u202egnp.exe`,
		"a\u200bb\u2028c\ufeff": `a\u200bb\u2028c\ufeff`,
		"\U000e0041":            `\udb40\udc41`,
		"\u3164":                `\u3164`,
		"\ufffd":                "\ufffd",
	} {
		if got := Text(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestBounded(t *testing.T) {
	a, b := strings.Repeat("é", 500)+"a", strings.Repeat("é", 500)+"b"
	x, y := Bounded(a, 100), Bounded(b, 100)
	if x == y || len(x) > 100 || !utf8.ValidString(x) {
		t.Errorf("%q, %q", x, y)
	}
	if s := Bounded("short", 100); s != "short" {
		t.Error(s)
	}
}

// TestWriter checks that text written in pieces has the same result as at once, and JSON stays
// JSON.
func TestWriter(t *testing.T) {
	in := "ü\x1b\u202e\xff\n\t\U000e0041ok"
	var out bytes.Buffer
	w := Writer(&out)
	for i := range len(in) {
		if n, err := w.Write([]byte(in[i : i+1])); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if want := `ü\u001b\u202e\xff` + "\n\t" + `\udb40\udc41ok`; out.String() != want {
		t.Errorf("%q, want %q", &out, want)
	}
	name := "a\u009b\u202e\x7f\U000e0041\x1b"
	out.Reset()
	if err := json.NewEncoder(Writer(&out)).Encode(name); err != nil {
		t.Fatal(err)
	}
	var back string
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || back != name {
		t.Errorf("%q, %v from %q", back, err, &out)
	}
	if strings.ContainsAny(out.String(), "\u009b\u202e\x7f\x1b") {
		t.Errorf("%q", &out)
	}
}

type stringer string

func (s stringer) String() string { return string(s) }

func TestPrint(t *testing.T) {
	var out bytes.Buffer
	evil := "a\x1b]0;x\a\nweir: ok"
	Fprintf(&out, "%s %-6s|%q %v %d %5.1f %v\n", evil, "b", "c\x1b", stringer(evil), 7, 1.5, []string{"x\x1by"})
	Fprintln(&out, evil, 3*time.Second, 5, errors.Join(errors.New("one"), errors.New("two\x1b")))
	Fprint(&out, evil, 1, 2, "\n")
	want := `a\u001b]0;x\u0007\nweir: ok b     |"c\x1b" a\u001b]0;x\u0007\nweir: ok 7   1.5 [x\u001by]` + "\n" +
		`a\u001b]0;x\u0007\nweir: ok 3s 5 one` + "\n" + `two\u001b` + "\n" + `a\u001b]0;x\u0007\nweir: ok1 2\n`
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", &out, want)
	}
}

func TestAttr(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: Attr}))
	log.Warn("refused", "name", "\x7f"+strings.Repeat("x", 5000), "err", errors.New("a\nb\u202e"), "n", 5)
	if s := out.String(); len(s) > 1300 || strings.ContainsAny(s, "\x7f\u202e") || strings.Count(s, "\n") != 1 {
		t.Errorf("%q", s)
	}
}

// TestAttrJoined checks that joined errors become one value, separated by semicolons, without
// repeated lines.
func TestAttrJoined(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: Attr}))
	once := errors.New("context canceled")
	log.Warn("refused", "err", fmt.Errorf("agent: %w", errors.Join(once, once, errors.New("late"))), "text", "a\nb")
	if s := out.String(); !strings.Contains(s, `err="agent: context canceled; late" text=a\nb`) {
		t.Errorf("%s", s)
	}
	out.Reset()
	log.Warn("refused", "err", errors.Join(once, once))
	if s := out.String(); !strings.Contains(s, `err="context canceled"`) {
		t.Errorf("%s", s)
	}
}

func TestOneLineOfAList(t *testing.T) {
	for in, want := range map[string]string{
		"one\ntwo\none": "one; two",
		"nothing was changed:\n  slot 0 is empty\n  slot 1 is empty\nfix the reason": "nothing was changed: slot 0 is empty; slot 1 is empty; fix the reason",
	} {
		if got := OneLine(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestCount(t *testing.T) {
	for n, want := range []string{"0 flows", "1 flow", "2 flows"} {
		if got := Count(n, "flow"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := Count(1, "entry") + ", " + Count(2, "entry") + ", " + Count(0, "prefix") + ", " + Count(2, "process"); got != "1 entry, 2 entries, 0 prefixes, 2 processes" {
		t.Errorf("%q", got)
	}
}
