// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/cmd/weir/cli"
	"github.com/weir-project/weir/host"
	fmt "github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/terminal"
)

// extensions returns the weir apply extensions of all features.
func extensions(g *cli.Globals) (out []cli.Extension) {
	for _, f := range cli.Features() {
		if f.Extend != nil {
			out = append(out, f.Extend(g))
		}
	}
	return out
}

// overview returns the command overview in weir --help.
func overview() string {
	lines := []string{
		"weir doctor|features that this kernel and user can run",
		"weir apply -f weir.yaml|make the host match the file",
		"weir status|current state of all features",
		"weir explain PACKET|where a packet goes and why, step by step",
	}
	for _, c := range cli.Features() {
		lines = append(lines, c.Overview...)
	}
	var b strings.Builder
	for _, l := range lines {
		command, does, _ := strings.Cut(l, "|")
		fmt.Fprintf(&b, "\n  %-26s %s", command, does)
	}
	return b.String()
}

// printSummaries prints each feature's part of weir status.
func printSummaries(w io.Writer, st host.Status, now time.Time) {
	first := true
	for _, c := range cli.Features() {
		b := terminal.NewBuffer(w)
		c.Summary(b, st, slices.ContainsFunc(st.Shown(), func(name string) bool { return name != c.Name }), now)
		if b.Len() == 0 {
			continue
		}
		if !first {
			fmt.Fprintln(w)
		}
		first = false
		_, _ = io.WriteString(w, b.String())
	}
}
