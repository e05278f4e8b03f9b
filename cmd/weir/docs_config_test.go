// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-project/weir/host"
)

// section is a yaml block of a page.
type section struct {
	line int // of its first line, from 1
	text string
}

// yamlOf returns the yaml blocks of a page. Blocks inside list items are indented: their indentation is removed.
func yamlOf(page string) (out []section) {
	inside, indent := false, ""
	for n, line := range strings.Split(page, "\n") {
		fence, isFence := strings.CutPrefix(strings.TrimLeft(line, " "), "```")
		switch {
		case isFence && inside:
			inside = false
		case isFence && fence == "yaml":
			inside, indent = true, line[:strings.Index(line, "`")]
			out = append(out, section{line: n + 2})
		case inside:
			out[len(out)-1].text += strings.TrimPrefix(line, indent) + "\n"
		}
	}
	return out
}

// namedFile matches the first comment of a block for another file than weir.yaml.
var namedFile = regexp.MustCompile(`^# (\S+\.ya?ml)\b`)

// wrappings complete a fragment: a whole file, keys of a service, keys of handoff, keys of reroute.
var wrappings = []struct {
	head   string
	indent int // of the fragment's lines
}{
	{"", 0},
	{"services:\n  example:\n    listen: [udp 192.0.2.1:4739]\n", 4},
	{"services:\n  example:\n    listen: [udp 192.0.2.1:4739]\n    steer: {slots: 4}\n", 4},
	{"handoff:\n", 2},
	{"reroute:\n", 2},
}

// parseFragment parses text as a weir.yaml, or as a part of one. The error is the one of the first wrapping that has a
// place for the fragment's keys.
func parseFragment(text string) (err error) {
	margin := len(text) - len(strings.TrimLeft(text, " "))
	text = strings.ReplaceAll("\n"+text, "\n"+strings.Repeat(" ", margin), "\n")[1:]
	for i, w := range wrappings {
		whole := w.head
		for line := range strings.Lines(text) {
			if strings.TrimSpace(line) != "" {
				whole += strings.Repeat(" ", w.indent)
			}
			whole += line
		}
		_, problem := host.ParseConfig("weir.yaml", []byte(whole))
		if problem == nil {
			return nil
		}
		if i == 0 || strings.Contains(err.Error(), "unknown key") && !strings.Contains(problem.Error(), "unknown key") {
			err = problem
		}
	}
	return err
}

// Every yaml block on a user page is a valid weir.yaml, or keys of one.
func TestDocsConfigurations(t *testing.T) {
	found := 0
	for _, page := range docsPages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range yamlOf(string(text)) {
			if m := namedFile.FindStringSubmatch(s.text); m != nil && m[1] != "weir.yaml" && !strings.HasPrefix(m[1], "/etc/weir/weir") {
				continue // of another program, or a list that weir.yaml names
			}
			found++
			if err := parseFragment(s.text); err != nil {
				t.Errorf("%s:%d: %v", strings.TrimPrefix(page, "../../"), s.line, err)
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d configurations were found", found)
	}
}

func TestYAMLOf(t *testing.T) {
	got := yamlOf("a\n```yaml\none: 1\n```\n- item\n  ```yaml\n  two:\n    three: 3\n  ```\n```sh\nfour: 4\n```\n")
	if len(got) != 2 || got[0] != (section{3, "one: 1\n"}) || got[1] != (section{7, "two:\n  three: 3\n"}) {
		t.Errorf("got %+v", got)
	}
}
