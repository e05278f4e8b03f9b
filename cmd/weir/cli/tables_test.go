// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

func TestPrintRows(t *testing.T) {
	type row struct {
		Name      string `table:"NAME"`
		hidden    string
		Since     time.Time `table:"SINCE"`
		Data      uint64    `table:"DATA,bytes"`
		Member    string    `table:"MEMBER,dash"`
		Undecided int       `table:"UNDECIDED,omitzero"`
		Note      string    `table:""`
	}
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name   string
		rows   []row
		indent bool
		want   string
	}{
		{"options", []row{{"a", "x", now.Add(-time.Minute), 1536, "", 0, ""}, {Name: "long", Member: "m", Note: "!"}}, false,
			"NAME  SINCE  DATA     MEMBER  \na     1m00s  1.5 KiB  -       \nlong  -      0 B      m       !\n"},
		{"a column that one row fills", []row{{Name: "a"}, {Name: "b", Undecided: 2}}, false,
			"NAME  SINCE  DATA  MEMBER  UNDECIDED  \na     -      0 B   -       0          \nb     -      0 B   -       2          \n"},
		{"below a line", []row{{Name: "a"}}, true, "  NAME  SINCE  DATA  MEMBER  \n  a     -      0 B   -       \n"},
		{"no rows", nil, false, "NAME  SINCE  DATA  MEMBER  \n"},
	} {
		var b bytes.Buffer
		if c.indent {
			PrintIndentedRows(&b, c.rows, now)
		} else {
			PrintRows(&b, c.rows, now)
		}
		if b.String() != c.want {
			t.Errorf("%s:\n%q, want\n%q", c.name, b.String(), c.want)
		}
	}
}

// Control characters in a program name or path do not reach the terminal.
func TestPrintRowsHarmless(t *testing.T) {
	var b bytes.Buffer
	PrintRows(&b, []struct {
		Name string `table:"NAME"`
	}{{"a\x1b[2J\tb"}}, time.Time{})
	if bytes.ContainsAny(b.Bytes(), "\x1b\t") {
		t.Errorf("printed as %q", b.String())
	}
}

func ExamplePrintRows() {
	type row struct {
		Name    string `table:"GUARD"`
		Netns   string `table:"NETNS,dash"`
		Refused uint64 `table:"REFUSED"`
	}
	PrintRows(os.Stdout, []row{{"dns", "", 12}, {"snmp", "/run/netns/blue", 0}}, time.Now())
	// Output:
	// GUARD  NETNS            REFUSED
	// dns    -                12
	// snmp   /run/netns/blue  0
}

func TestPrintRowsUnknownOption(t *testing.T) {
	defer func() {
		if recover() == nil {
			t.Error("a heading with a comma was cut in silence")
		}
	}()
	PrintRows(io.Discard, []struct {
		Rate int `table:"PPS (avg, min)"`
	}{{1}}, time.Time{})
}

// On a terminal of 80 columns no cell is torn: the widest columns follow below their rows. A single network namespace
// is not shown.
func TestPrintRowsNarrow(t *testing.T) {
	type row struct {
		Slot   int    `table:"SLOT"`
		State  string `table:"STATE"`
		Member string `table:"MEMBER,dash"`
		UDP    uint64 `table:"UDP"`
		Queue  string `table:"QUEUE,dash"`
		Netns  string `table:"NETNS"`
	}
	member := "pidfile /run/nfacctd/collector-0.pid"
	queue := "0 B/8.0 MiB 0 B/8.0 MiB 0/1024 0/1024"
	for name, c := range map[string]struct {
		columns uint16
		rows    []row
		want    string
	}{
		"one namespace": {80, []row{{0, "admitted", member, 12, queue, "net:[4026531833]"}, {1, "empty", "", 0, "", "net:[4026531833]"}},
			"SLOT  STATE     MEMBER                                UDP\n" +
				"0     admitted  pidfile /run/nfacctd/collector-0.pid  12\n" +
				"    QUEUE 0 B/8.0 MiB 0 B/8.0 MiB 0/1024 0/1024\n" +
				"1     empty     -                                     0\n"},
		"two namespaces": {80, []row{{0, "admitted", member, 12, queue, "net:[4026531833]"}, {1, "empty", "", 0, "", "ring-a"}},
			"SLOT  STATE     MEMBER                                UDP  NETNS\n" +
				"0     admitted  pidfile /run/nfacctd/collector-0.pid  12   net:[4026531833]\n" +
				"    QUEUE 0 B/8.0 MiB 0 B/8.0 MiB 0/1024 0/1024\n" +
				"1     empty     -                                     0    ring-a\n"},
		"40 columns": {40, []row{{0, "admitted", member + " of a long name", 12, "", "ring-a"}},
			"SLOT  STATE     UDP  QUEUE\n" +
				"0     admitted  12   -\n" +
				"    MEMBER pidfile\n" +
				"      /run/nfacctd/collector-0.pid of a\n" +
				"      long name\n"},
		"wide enough": {160, []row{{0, "empty", "", 0, "", "ring-a"}}, "SLOT  STATE  MEMBER  UDP  QUEUE  NETNS\n0     empty  -       0    -      ring-a\n"},
	} {
		p := nstest.NewPTY(t, c.columns)
		PrintRows(p.File, c.rows, time.Time{})
		io.WriteString(p.File, "end\n")
		p.Wait("end\r\n")
		if got := strings.ReplaceAll(strings.TrimSuffix(p.Text(), "end\r\n"), "\r\n", "\n"); got != c.want {
			t.Errorf("%s:\n%swant\n%s", name, got, c.want)
		}
	}
}

func TestReflow(t *testing.T) {
	text := "A paragraph with a long line of words.\nIts rest follows.\n\n  a table stays as it is, however wide\n\nShort one.\n"
	want := "A paragraph with a\nlong line of words.\nIts rest follows.\n\n  a table stays as it is, however wide\n\nShort one.\n"
	if got := Reflow(text, 20); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
