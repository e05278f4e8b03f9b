// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/cmd/weir/cli"
)

// Every file prints through internal/printable in place of fmt.
func TestFloorsPrint(t *testing.T) {
	files, err := filepath.Glob("*.go")
	parts, perr := filepath.Glob("*/*.go")
	if err != nil || perr != nil || len(files) < 10 || len(parts) < 5 {
		t.Fatal(files, parts, err, perr)
	}
	for _, name := range append(files, parts...) {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range f.Imports {
			if i.Path.Value == `"fmt"` {
				t.Errorf(`%s imports "fmt": import fmt "github.com/weir-project/weir/internal/printable", which makes text of strangers harmless`, name)
			}
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if bad := regexp.MustCompile(`fmt\.Fprintln\(.*"\\n.*`).Find(text); bad != nil {
			t.Errorf("%s: %s: Fprintln escapes the newline, use Fprintf", name, bad)
		}
		if strings.Contains(string(text), "slog.NewTextHandler(") && name != "cli/print.go" {
			t.Errorf("%s makes a log of its own: use cli.NewLog", name)
		}
	}
}

// Names from outside reach the terminal escaped, in lines, tables and JSON.
func TestNamesOnTheTerminal(t *testing.T) {
	const evil = "\x1b[31mred\nline\u202e\u009b\x7f\xff"
	var out strings.Builder
	printHandoff(&out, handoff.Report{Services: []handoff.ServiceReport{{Name: evil, Members: []handoff.MemberReport{{Name: evil}},
		Sessions: []handoff.SessionReport{{ID: "1", Member: evil, Remote: evil}}}}}, true, time.Now())
	c := newCommand()
	c.SetOut(&out)
	if err := cli.PrintJSON(c, map[string]string{evil: evil}); err != nil {
		t.Fatal(err)
	}
	if s := out.String(); (strings.ContainsAny(s, "\x1b\u202e\u009b\x7f") || strings.Contains(s, "\xff")) || strings.Contains(s, "\nline") || strings.Count(s, `\u001b[31mred\nline\u202e\u009b`) < 5 {
		t.Errorf("%q", s)
	}
	out.Reset()
	cli.NewLog(&out).Warn("x", "name", evil)
	if s := out.String(); (strings.ContainsAny(s, "\x1b\u202e\u009b\x7f") || strings.Contains(s, "\xff")) || strings.Count(s, "\n") != 1 {
		t.Errorf("%q", s)
	}
}
