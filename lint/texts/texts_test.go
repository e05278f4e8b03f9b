// SPDX-License-Identifier: Apache-2.0

// Package texts keeps every help text and every log message of the product in
// a file each, so that a reviewer reads them as a text. `make texts` writes the
// files again; the test fails if they are not current.
package texts

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the files again")

func TestLogs(t *testing.T) {
	messages, err := logMessages(repository(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(messages) < 100 {
		t.Fatalf("%d log messages found: the search misses most", len(messages))
	}
	compare(t, "logs.txt", strings.Join(messages, "\n")+"\n")
}

// The key of an error or a reason is err, in literal attributes and in lists of them.
func TestLogKeys(t *testing.T) {
	other := regexp.MustCompile(`(?:\.(?:Debug|Info|Warn|Error)\(|append\(args, |args := \[\]any\{).*"(reason|error|why|cause)", `)
	err := filepath.WalkDir(repository(t), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for n, line := range strings.Split(string(text), "\n") {
			if m := other.FindStringSubmatch(line); m != nil {
				t.Errorf("%s:%d: log key %s: use err", path, n+1, m[1])
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestHelp(t *testing.T) {
	root := repository(t)
	for _, name := range []string{"weir", "weir-lab"} {
		binary := filepath.Join(root, "bin", name)
		if _, err := os.Stat(binary); err != nil {
			t.Fatalf("%v: run make build first", err)
		}
		help, commands := helpTexts(t, binary, nil)
		if commands < 3 {
			t.Fatalf("%d commands of %s found", commands, name)
		}
		compare(t, name+"-help.md", help)
	}
}

// helpTexts returns the help of the command with its subcommands, and their number.
func helpTexts(t *testing.T, binary string, command []string) (string, int) {
	t.Helper()
	cmd := exec.Command(binary, append(command, "--help")...)
	cmd.Env = append(os.Environ(), "NO_COLOR=1", "COLUMNS=100")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
	// cobra answers an unknown subcommand with its parent's help.
	name := strings.Join(append([]string{filepath.Base(binary)}, command...), " ")
	if !strings.Contains(string(out), "\n  "+name) {
		t.Fatalf("the help of %q shows the usage of another command:\n%s", name, out)
	}
	page := "# " + name + "\n\n" + asMarkdown(string(out)) + "\n"
	n := 1
	for _, sub := range subcommands(string(out)) {
		if sub == "help" || sub == "completion" { // cobra's own
			continue
		}
		text, m := helpTexts(t, binary, append(command[:len(command):len(command)], sub))
		page += text
		n += m
	}
	return page, n
}

// asMarkdown writes a help text as Markdown, in which the linter finds sentences:
// commands and flags become lists, indented lines (examples) code.
func asMarkdown(help string) string {
	var b strings.Builder
	section, indented := "", false
	for line := range strings.Lines(help) {
		line = strings.TrimRight(line, " \n")
		wasIndented := indented
		indented = strings.HasPrefix(line, "  ")
		switch {
		case strings.HasPrefix(line, "Use \"") || line == "Global Flags:": // the same everywhere
			section = "skip"
		case strings.HasSuffix(line, ":") && !indented && strings.Count(line, " ") < 3:
			section = line
			fmt.Fprintf(&b, "%s\n\n", line)
		case section == "skip":
		case line == "":
			b.WriteString("\n")
		case indented && section != "" && section != "Usage:" && section != "Examples:":
			name, about, _ := strings.Cut(strings.TrimSpace(line), "  ")
			if about == "" { // a long flag's description goes on
				fmt.Fprintf(&b, "  %s\n", name)
			} else {
				fmt.Fprintf(&b, "- `%s`: %s\n", name, strings.TrimSpace(about))
			}
		case indented:
			if !wasIndented {
				b.WriteString("\n")
			}
			if item := strings.TrimSpace(line); strings.HasPrefix(item, "- ") {
				fmt.Fprintf(&b, "%s\n", item)
			} else {
				fmt.Fprintf(&b, "    %s\n", item)
			}
		default:
			fmt.Fprintf(&b, "%s\n", line)
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// subcommands reads the lists of commands in a help text, under any group's heading.
func subcommands(help string) []string {
	var names []string
	listing := false
	for line := range strings.Lines(help) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasSuffix(line, "Commands:"):
			listing = true
		case line == "":
			listing = false
		case listing && strings.HasPrefix(line, "  ") && !strings.HasPrefix(line, "   "):
			names = append(names, strings.Fields(line)[0])
		}
	}
	return names
}

// compare compares a file of this folder with its current text, or writes it.
func compare(t *testing.T, file, text string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v: run make texts", err)
	}
	if string(before) == text {
		return
	}
	was, is := strings.Split(string(before), "\n"), strings.Split(text, "\n")
	for i := range is {
		if i >= len(was) || was[i] != is[i] {
			old := "end of file"
			if i < len(was) {
				old = was[i]
			}
			t.Fatalf("lint/texts/%s is out of date: run make texts, and read the difference. First at line %d:\n  file: %s\n  code: %s", file, i+1, old, is[i])
		}
	}
	t.Fatalf("lint/texts/%s is out of date: it has %d lines, the code gives %d: run make texts", file, len(was), len(is))
}

func repository(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}
