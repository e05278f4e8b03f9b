// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/weir-project/weir/cmd/weir/cli"
)

// docsPages returns the user pages: at the top, in docs, and beside features, examples and clients.
func docsPages(t *testing.T) (pages []string) {
	t.Helper()
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/*/*.md", "feature/*/*.md", "examples/*/*.md", "clients/*/*.md"} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, found...)
	}
	return pages
}

// block matches weir with its arguments at the start of a code line; span matches it in a code span.
var (
	block = regexp.MustCompile("^(?:sudo )?(?:bin/)?weir ([^`|#]+)")
	span  = regexp.MustCompile("`(?:sudo )?(?:bin/)?weir ([^`|#]+)")
)

// invocations returns the weir command lines of a page.
func invocations(text string) (all []string) {
	inBlock := false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			inBlock = !inBlock
			continue
		}
		pattern := span
		if inBlock {
			pattern = block
		}
		for _, m := range pattern.FindAllStringSubmatch(line, -1) {
			all = append(all, strings.TrimSpace(m[1]))
		}
	}
	return all
}

// Every command line on a user page names an existing command with existing flags, under its current name.
func TestDocsCommands(t *testing.T) {
	found := 0
	for _, page := range docsPages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, words := range invocations(string(text)) {
			found++
			if problem := docsProblem(strings.Fields(words)); problem != "" {
				t.Errorf("%s: weir %s: %s", strings.TrimPrefix(page, "../../"), words, problem)
			}
		}
	}
	if found < 150 {
		t.Errorf("only %d commands were found", found)
	}
}

var (
	commandWord = regexp.MustCompile(`^[a-z][a-z-]*$`)
	longFlag    = regexp.MustCompile(`^\[?--([a-z][a-z-]*)`)
)

// docsProblem returns why words are no valid command line, or "".
func docsProblem(words []string) string {
	c := newCommand()
	c.InitDefaultHelpCmd()
	c.InitDefaultCompletionCmd()
	at := c
	for _, w := range words {
		if strings.HasPrefix(w, "-") {
			continue
		}
		i := slices.IndexFunc(at.Commands(), func(s *cobra.Command) bool { return s.Name() == w })
		if i < 0 {
			if at.HasAvailableSubCommands() && commandWord.MatchString(w) {
				return "there is no command " + at.CommandPath() + " " + w
			}
			break
		}
		if at = at.Commands()[i]; at.Hidden {
			return at.CommandPath() + " is hidden, or a former name"
		}
	}
	for _, w := range words {
		if w == "--" {
			break // of the daemon's command line
		}
		m := longFlag.FindStringSubmatch(w)
		if m == nil || m[1] == "help" || m[1] == "version" {
			continue
		}
		if at.Flags().Lookup(m[1]) == nil && at.InheritedFlags().Lookup(m[1]) == nil {
			return at.CommandPath() + " has no flag --" + m[1]
		}
	}
	return ""
}

func TestDocsProblem(t *testing.T) {
	for words, want := range map[string]bool{"steer status --json": false, "bind list --covers 192.0.2.1": false, "steer bindings": true, "steer unbind www": true, "bind list --nonsense": true,
		"apply -f weir.yaml --dry-run": false, "bind nonsense": true, "nonsense": true} {
		if got := docsProblem(strings.Fields(words)); (got != "") != want {
			t.Errorf("weir %s: %q", words, got)
		}
	}
}

// docs/BINDINGS.md uses no former command name, not even its last word.
func TestDocsBindings(t *testing.T) {
	former := map[string]bool{}
	for _, c := range movedToBind() {
		if slices.IndexFunc(bindCommand(&cli.Globals{}).Commands(), func(now *cobra.Command) bool { return now.Name() == c.Name() }) < 0 {
			former[c.Name()] = c.Name() != "bind" // the current command has the same name
		}
	}
	text, err := os.ReadFile("../../docs/BINDINGS.md")
	if err != nil {
		t.Fatal(err)
	}
	word := regexp.MustCompile("`([a-z]+)`")
	for n, line := range strings.Split(string(text), "\n") {
		names := word.FindAllStringSubmatch(line, -1)
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			heading, _, _ = strings.Cut(heading, ":")
			for _, w := range strings.Split(heading, ", ") {
				names = append(names, []string{w, w})
			}
		}
		for _, m := range names {
			if former[m[1]] {
				t.Errorf("BINDINGS.md:%d: %s is a former name", n+1, m[1])
			}
		}
	}
}
