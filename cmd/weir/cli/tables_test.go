// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"
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
