// SPDX-License-Identifier: Apache-2.0

// Package manpages writes the man pages of weir's commands, from their help.
package manpages

import (
	"cmp"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

// Write writes a page of section 8 for root and each command below it into the directory dir. It changes the texts of the
// commands: root must not be used afterwards.
func Write(root *cobra.Command, dir, version string, date time.Time) error {
	root.DisableAutoGenTag = true // it holds the time of the build
	toMarkdown(root)
	return doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "weir " + version, Manual: "weir", Date: &date}, dir)
}

// toMarkdown converts the texts of a command and its subcommands to Markdown, because the generator expects Markdown.
func toMarkdown(c *cobra.Command) {
	c.InitDefaultHelpFlag()
	long := cmp.Or(c.Long, c.Short+".")
	c.Long = text(long) + options("OPTIONS", c.NonInheritedFlags()) + options("OPTIONS OF ALL COMMANDS", c.InheritedFlags())
	c.Short = escape(c.Short)
	for _, sub := range c.Commands() {
		toMarkdown(sub)
	}
	// The generator's own list of options is hard to read. Subcommands inherit flags, so hide these last.
	c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) { f.Hidden = true })
}

// options returns a section with flags as --help prints them.
func options(heading string, flags *pflag.FlagSet) string {
	if !flags.HasAvailableFlags() {
		return ""
	}
	return "\n# " + heading + "\n```\n" + flags.FlagUsagesWrapped(columns) + "```\n"
}

// columns is the width of a line: 80 without man's indentation.
const columns = 72

// text converts a help text. Its indented lines are tables and examples: they keep their line breaks and spaces.
func text(help string) string {
	var out strings.Builder
	inside := false
	fence := func(indented bool) {
		if indented != inside {
			out.WriteString("\n```\n")
			inside = indented
		}
	}
	lines := strings.Split(help, "\n")
	for i, line := range lines {
		switch {
		case strings.HasPrefix(line, " "):
			fence(true)
			out.WriteString(line)
		case line == "" && inside && i+1 < len(lines) && strings.HasPrefix(lines[i+1], " "):
			// An empty line between two indented ones belongs to them.
		default:
			fence(false)
			out.WriteString(escape(line))
		}
		out.WriteString("\n")
	}
	fence(false)
	return out.String()
}

var special = regexp.MustCompile("[\\\\`*_<\\[\\]|~]|^[-+#>]|^[0-9]+\\.")

// escape marks the characters with a meaning in Markdown as plain text.
func escape(s string) string {
	return special.ReplaceAllStringFunc(s, func(m string) string { return m[:len(m)-1] + `\` + m[len(m)-1:] })
}
